"""What did not change is not written again, and what did is never taken for it."""

import ctypes
import errno
import json
import math
import os
import random
import re
import shutil
import sys
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from frozen_jobs import FROZEN, SIZE, Job, Model, digest

from kit import warm
from kit.inside import copy_all_tensors
from kit.thorough import THOROUGH
from kit.writing import write_file
from safe_ckpt import CheckpointConfig, Checkpointer, Health, Retention, Unchanged, WriterConfig, events
from safe_ckpt.core.formats.file_plan import WriteTask
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.core.storage.direct_io import Unwatched, WriteOptions
from safe_ckpt.core.writer import existing
from safe_ckpt.errors import CorruptCheckpointError, NoValidCheckpointError, StateError
from safe_ckpt.extensions import unchanged

SEEDS = 200 if THOROUGH else 8


def config(*, keep=None, **more):
    return CheckpointConfig(retention=Retention(keep_last=keep), unchanged=Unchanged(**more))


def inodes(folder, name=FROZEN):
    return {path.parent.name: path.stat().st_ino for path in sorted(Path(folder).glob(f"*/{name}"))}


@pytest.fixture
def elsewhere(monkeypatch):
    """No tensor lies in host memory in its order, as on a GPU: all is copied, and the writer looks."""
    copy_all_tensors(monkeypatch)


@pytest.mark.parametrize("writer", [WriterConfig(), WriterConfig(inline_bytes=0)], ids=["thread", "process"])
@pytest.mark.parametrize("mode", ["eager", "overlapped", "streamed", "transposed", "transposed, overlapped"])
def test_a_frozen_part_is_written_once(tmp_path, mode, writer):
    """Every later checkpoint has it under a further name, and its own bytes are little more than what changed."""
    job, written = Job(), []
    if "transposed" in mode:
        job.model.base.weight.data = torch.randn(SIZE, SIZE).t()
        mode = "overlapped" if "overlapped" in mode else "eager"
    settings = {"max_host_bytes": 1 << 20} if mode == "streamed" else {"snapshot": mode}

    def hook(event):
        if isinstance(event, events.Written):
            written.append(event.size_bytes)

    with Checkpointer(tmp_path, CheckpointConfig(writer=writer, **settings), hooks=[hook]) as ckpt:
        for number in range(1, 5):
            job.step()
            handle = ckpt.save(number, job.state)
            handle.wait_snapshot()
            handle.result()
    assert len(set(inodes(tmp_path).values())) == 1
    changed = sum(p.numel() for p in job.model.head.parameters()) * 4 * 3
    assert written[0] > 4 * SIZE * SIZE
    assert max(written[1:]) < 1.02 * changed + (1 << 20)
    for number in range(1, 5):
        path = tmp_path / f"step-{number:08d}"
        assert verify_files(path, read_manifest(path)) > 4 * SIZE * SIZE


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("links", ["linked", "never", "gone"])
def test_a_tensor_that_the_writer_finds_unchanged_is_shared(tmp_path, monkeypatch, links):
    """It gets a further name, or a copy where there are none; a change in one bit is found, and all bytes are right."""
    job, expected, written = Job(), {}, []
    link = existing.Existing.link

    def late(shared, path):
        if links == "gone":
            for old in tmp_path.glob("step-*"):
                shutil.rmtree(old)
        return link(shared, path) if links != "never" else "never"

    monkeypatch.setattr(existing.Existing, "link", late)

    def hook(event):
        if isinstance(event, events.Written):
            written.append(event.size_bytes > 4 * SIZE * SIZE)

    with Checkpointer(tmp_path, config(), hooks=[hook]) as ckpt:
        for number in range(1, 6):
            job.step()
            if number == 4:
                job.model.base.weight.data.view(torch.int32)[SIZE - 1, SIZE - 1] ^= 1
            expected[number] = digest(job.model)
            ckpt.save(number, job.state).result()
        for path in sorted(tmp_path.glob("step-*")):
            verify_files(path, read_manifest(path))
            other = Job()
            ckpt.resume(other.state, step=int(path.name[5:]))
            assert digest(other.model) == expected[int(path.name[5:])]
    linked = [True, False, False, True, True]  # at the fifth save it is not worth a look
    assert written == (linked if links == "linked" else [True] * 5)


def test_stock_loaders_read_a_checkpoint_with_shared_files(tmp_path):
    """The shards and their index, as Hugging Face's tools write them; a copy of the directory is complete."""
    from accelerate import load_checkpoint_in_model

    job = Job()
    with Checkpointer(tmp_path / "run", config()) as ckpt:
        for number in (1, 2):
            job.step()
            ckpt.save(number, job.state).result()
    shutil.copytree(tmp_path / "run/step-00000002", tmp_path / "copy")
    shutil.rmtree(tmp_path / "run")
    index = json.loads((tmp_path / "copy/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(job.model.state_dict())
    other = Model()
    load_checkpoint_in_model(other, str(tmp_path / "copy"))
    assert digest(other) == digest(job.model)
    frozen = safetensors.torch.load_file(tmp_path / "copy" / FROZEN)
    assert torch.equal(frozen["base.weight"], job.model.base.weight)


@pytest.mark.parametrize("frozen", [True, False])
def test_the_index_names_what_its_shards_have(tmp_path, frozen):
    """A tied tensor is stored under one name: the index has that one, in the file that has it, and counts it once."""
    job = Job()
    job.model.tied = job.model.base if frozen else job.model.head
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.save(1, {"model": job.model}).result()
        index = json.loads((tmp_path / "step-00000001/model.safetensors.index.json").read_text())
        stored = {
            name: (file.name, tensor.nbytes)
            for file in (tmp_path / "step-00000001").glob("*.safetensors")
            for name, tensor in safetensors.torch.load_file(file).items()
        }
        assert index["weight_map"] == {name: file for name, (file, _) in stored.items()}
        assert index["metadata"]["total_size"] == sum(size for _, size in stored.values())
        other = Job()
        other.model.tied = other.model.base if frozen else other.model.head
        ckpt.resume({"model": other.model})
        assert digest(other.model) == digest(job.model)


def test_sharing_goes_on_after_a_resume(tmp_path):
    """The first save of the next start already writes only what changed."""
    job = Job()
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.save(1, job.state).result()
    job = Job()
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.resume(job.state)
        ckpt.save(2, job.state).result()
    assert len(set(inodes(tmp_path).values())) == 1


def test_without_a_resume_nothing_is_taken_from_a_directory(tmp_path):
    """What lies there from before was not verified."""
    for number in (1, 2):
        with Checkpointer(tmp_path, config()) as ckpt:
            ckpt.save(number, Job().state).result()
    assert len(set(inodes(tmp_path).values())) == 2


def test_full_every_writes_all_anew_at_each_nth_save(tmp_path):
    """``full_every``: not all checkpoints depend on the same blocks of the disk."""
    job = Job()
    with Checkpointer(tmp_path, config(full_every=3)) as ckpt:
        for number in range(1, 8):
            ckpt.save(number, job.state).result()
    found = list(inodes(tmp_path).values())
    assert [found.index(inode) for inode in found] == [0, 0, 0, 3, 3, 3, 6]
    with Checkpointer(tmp_path / "off", config(share=False)) as ckpt:
        ckpt.save(1, job.state).result()
    assert sorted(os.listdir(tmp_path / "off/step-00000001")) == ["manifest.json", "model.safetensors", "optimizer.pt"]


def test_any_file_that_stays_the_same_is_shared(tmp_path):
    """A table in a dict, of which nobody says that it is frozen: from the third save on. One that changes is not looked at."""
    state = {"table": {"t": torch.randn(SIZE, SIZE)}, "other": {"t": torch.randn(SIZE, SIZE)}}
    with Checkpointer(tmp_path, config()) as ckpt:
        for number in range(1, 6):
            state["other"]["t"] += 1
            ckpt.save(number, state).result()
    found = list(inodes(tmp_path, "table.safetensors").values())
    assert [found.index(inode) for inode in found] == [0, 1, 1, 1, 1]
    assert len(set(inodes(tmp_path, "other.safetensors").values())) == 5


def test_an_average_that_needs_no_gradient_is_looked_at_once(tmp_path, monkeypatch):
    """A teacher that changes at every step is hashed at the second save, and not again."""
    hashed = []
    whole = unchanged.digest_of_plan
    monkeypatch.setattr(unchanged, "digest_of_plan", lambda plan: hashed.append(plan.path) or whole(plan))
    teacher = torch.nn.Linear(SIZE, SIZE).requires_grad_(requires_grad=False)
    with Checkpointer(tmp_path, config()) as ckpt:
        for number in range(1, 6):
            teacher.weight.data.mul_(0.9)
            ckpt.save(number, {"teacher": teacher}).result()
    assert hashed == ["teacher.safetensors"]


@pytest.mark.parametrize("gone", ["deleted", "touched", "no links"])
def test_where_the_old_file_cannot_be_had_all_is_written(tmp_path, monkeypatch, gone):
    """Somebody deleted or wrote to the checkpoint before, or the file system has no hard links."""
    job = Job()
    if gone == "no links":
        monkeypatch.setattr(existing, "link_open_file", lambda *_: "never")
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.save(1, job.state).result()
        if gone == "deleted":
            shutil.rmtree(tmp_path / "step-00000001")
        if gone == "touched":
            os.utime(tmp_path / "step-00000001" / FROZEN)
        ckpt.save(2, job.state).result()
        ckpt.save(3, job.state).result()
    path = tmp_path / "step-00000002"
    verify_files(path, read_manifest(path))
    found = inodes(tmp_path)
    assert found["step-00000002"] != found.get("step-00000001")
    assert (found["step-00000003"] == found["step-00000002"]) == (gone != "no links")


def test_the_old_file_stays_open_until_it_has_its_new_name(tmp_path, monkeypatch):
    """It is deleted after it was chosen: its bytes are copied from what is still open."""
    job = Job()
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.save(1, job.state).result()
        link = existing.Existing.link

        def late(shared, path):
            shutil.rmtree(tmp_path / "step-00000001")
            return link(shared, path)

        monkeypatch.setattr(existing.Existing, "link", late)
        ckpt.save(2, job.state).result()
        monkeypatch.undo()
        other = Job()
        assert ckpt.resume(other.state).step == 2
        ckpt.save(3, job.state).result()
    assert digest(other.model) == digest(job.model)
    assert (
        inodes(tmp_path)["step-00000003"] == inodes(tmp_path)["step-00000002"]
    )  # and it is no reason to share nothing more


def test_a_damaged_source_fails_the_save_and_not_the_next_one(tmp_path, monkeypatch):
    """Its bytes changed on the disk, and there are no hard links: the copy is compared with what was written."""
    job = Job()
    monkeypatch.setattr(existing, "link_open_file", lambda *_: "never")
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.save(1, job.state).result()
        _flip(tmp_path / "step-00000001" / FROZEN)
        handle = ckpt.save(2, job.state)
        with pytest.raises(Exception, match="whose bytes are not those that were written"):
            handle.result()
        ckpt.save(3, job.state).result()
        assert ckpt.resume(Job().state).step == 3


def _flip(path):
    """One bit, with the times as they were."""
    status = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(8 << 10)
        byte = file.read(1)
        file.seek(8 << 10)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_damaged_shared_file_damages_all_checkpoints_that_share_it(tmp_path):
    """A resume reads the damaged bytes once, and falls back to the newest checkpoint that has others."""
    job = Job()
    with Checkpointer(tmp_path, config(full_every=4)) as ckpt:
        for number in range(1, 8):
            ckpt.save(number, job.state).result()
    found = inodes(tmp_path)
    _flip(tmp_path / "step-00000007" / FROZEN)
    damaged = [name for name, inode in found.items() if inode == found["step-00000007"]]
    assert damaged == [f"step-{number:08d}" for number in (5, 6, 7)]
    for name in damaged:
        with pytest.raises(CorruptCheckpointError):
            verify_files(tmp_path / name, read_manifest(tmp_path / name))
    with Checkpointer(tmp_path, config()) as ckpt:
        assert ckpt.resume(Job().state).step == 4
    assert list(inodes(tmp_path)) == [f"step-{number:08d}" for number in (1, 2, 3, 4)]
    events = map(json.loads, (tmp_path / ".safe_ckpt/events.jsonl").read_text().splitlines())
    reasons = [event["reason"] for event in events if event["event"] == "quarantined"]
    assert ["is the damaged" in reason for reason in reasons] == [False, True, True]
    _flip(tmp_path / "step-00000004" / FROZEN)
    with Checkpointer(tmp_path, config()) as ckpt, pytest.raises(NoValidCheckpointError):
        ckpt.resume(Job().state)


def test_the_command_counts_shared_bytes_once(tmp_path):
    """``list`` says how much is shared; ``verify`` reads it once; ``gc`` frees what is freed."""
    job = Job()
    with Checkpointer(tmp_path, config()) as ckpt:
        for number in range(1, 4):
            ckpt.save(number, job.state).result()

    def command(*words):
        return warm.run(
            [sys.executable, "-m", "safe_ckpt.tools.cli", *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        )

    rows = json.loads(command("list", str(tmp_path), "--json").stdout)
    assert {row["shared_bytes"] for row in rows} == {(tmp_path / "step-00000001" / FROZEN).stat().st_size}
    assert command("list", str(tmp_path)).stdout.count("1.4 MiB shared") == 3
    said = command("verify", str(tmp_path))
    assert said.stdout.count("valid") == 3
    assert "1.4 MiB in" in said.stdout + said.stderr
    assert re.search(r"1 kept; \d+\.\d KiB freed", command("gc", str(tmp_path), "--keep-last", "1").stderr)
    verify_files(tmp_path / "step-00000003", read_manifest(tmp_path / "step-00000003"))


def test_a_write_that_fails_at_once_leaves_no_thread_behind(tmp_path):
    """The folder is gone: a thread that went on hashing would write into the next snapshot."""
    memory = bytearray(8 << 20)
    task = WriteTask(path=str(tmp_path / "gone/file"), offset=4096, length=4 << 20)
    options = WriteOptions(direct=False, chunk_bytes=1 << 20, flush_every_bytes=1 << 20)
    with pytest.raises(FileNotFoundError):
        write_file(task, memoryview(memory), options, Unwatched(), lambda: 0)
    assert [thread for thread in threading.enumerate() if thread.name == "safe_ckpt-hash"] == []


def test_shared_files_cannot_be_written_to_by_mistake(tmp_path):
    """They have one content under several names, so they lose their permission to be written."""
    job = Job()
    with Checkpointer(tmp_path, config()) as ckpt:
        for number in (1, 2):
            ckpt.save(number, job.state).result()
    assert (tmp_path / "step-00000002" / FROZEN).stat().st_mode & 0o222 == 0
    assert (tmp_path / "step-00000002" / "optimizer.pt").stat().st_mode & 0o200


def test_what_was_found_of_the_numbers_is_not_said_again_under_other_settings(tmp_path):
    """An alarm is looked at again: what a user accepts, or ignores, or turns off, marks no later checkpoint."""
    job = Job()
    with torch.no_grad():
        job.model.base.weight[0, 0] = math.nan
    with Checkpointer(tmp_path, CheckpointConfig()) as ckpt:
        assert [ckpt.save(number, job.state).result().marked for number in (1, 2)] == [True, True]
    for number, health in enumerate((Health(ignore=("base.weight",)), Health(action="off")), start=3):
        with Checkpointer(tmp_path, CheckpointConfig(health=health)) as ckpt:
            ckpt.resume(job.state, step=number - 1)
            assert not ckpt.save(number, job.state).result().marked
    with Checkpointer(tmp_path, CheckpointConfig()) as ckpt:
        ckpt.resume(job.state, step=4)
        assert ckpt.save(5, job.state).result().marked


def test_a_jump_that_was_accepted_is_none_any_more(tmp_path):
    """Frozen weights a hundred times as large: marked once, and then the state to go on from."""
    job = Job()
    with Checkpointer(tmp_path, CheckpointConfig(health=Health(norm_jump=10.0))) as ckpt:
        assert not ckpt.save(1, job.state).result().marked
        job.model.base.weight.data.mul_(100)
        assert ckpt.save(2, job.state).result().marked
        ckpt.resume(job.state, step=2)
        assert [ckpt.save(number, job.state).result().marked for number in (3, 4)] == [False, False]
    assert inodes(tmp_path)["step-00000004"] == inodes(tmp_path)["step-00000003"]


def test_a_file_that_is_edited_after_the_resume_is_not_shared(tmp_path):
    """It was verified then, and is another one by the time of the first save."""
    job = Job()
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.save(1, job.state).result()
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.resume(job.state)
        with (tmp_path / "step-00000001" / FROZEN).open("r+b") as file:
            file.seek(9000)
            file.write(b"x")
        ckpt.save(2, job.state).result()
    verify_files(tmp_path / "step-00000002", read_manifest(tmp_path / "step-00000002"))


def test_full_every_counts_over_restarts(tmp_path):
    """A job that is preempted after every other save."""
    job = Job()
    for start in range(4):
        with Checkpointer(tmp_path, config(full_every=3)) as ckpt:
            ckpt.resume(job.state)
            for number in (2 * start, 2 * start + 1):
                ckpt.save(number, job.state).result()
    found = list(inodes(tmp_path).values())
    assert [found.index(inode) for inode in found] == [0, 0, 0, 3, 3, 3, 6, 6]


def test_a_disk_needs_no_room_for_what_is_not_written(tmp_path):
    """The check before a save counts what will be written."""
    if os.getuid():
        pytest.skip("needs root to mount a tmpfs")
    folder = tmp_path / "small"
    folder.mkdir()
    warm.run(["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", folder], check=True, timeout=20)
    try:
        job = Job()
        with Checkpointer(folder, config(keep=2)) as ckpt:
            for number in range(1, 5):
                ckpt.save(number, job.state).result()
    finally:
        warm.run(["umount", folder], check=True, timeout=20)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOTTY, errno.EMLINK, errno.EEXIST, errno.ENOTSUP, errno.EPERM])
def test_a_link_that_is_refused_for_whatever_reason_is_made_up_for(tmp_path, monkeypatch, error):
    """Odd file systems have odd answers: the file is copied, or written."""
    job, link = Job(), os.link

    def refuse(source, target, **more):
        if str(source).startswith("/proc/"):
            raise OSError(error, os.strerror(error))
        return link(source, target, **more)

    monkeypatch.setattr(os, "link", refuse)
    with Checkpointer(tmp_path, config()) as ckpt:
        for number in range(1, 4):
            ckpt.save(number, job.state).result()
    for number in range(1, 4):
        verify_files(tmp_path / f"step-{number:08d}", read_manifest(tmp_path / f"step-{number:08d}"))


@pytest.mark.parametrize("name", ["model-00001-of-00002", "model.safetensors.index"])
def test_names_that_a_shard_may_need_are_refused(tmp_path, name):
    """Only beside the item that may need them."""
    with Checkpointer(tmp_path, config()) as ckpt:
        with pytest.raises(StateError, match="may need a file of this name"):
            ckpt.save(1, {"model": Model(), name: {"a": 1}})
        ckpt.save(1, {"other": Model(), name: {"a": 1}}).result()


def test_what_a_deletion_frees_is_counted_once(tmp_path):
    """A file of which all names go is freed; one that has another name is not."""
    job = Job()
    with Checkpointer(tmp_path, config(full_every=3)) as ckpt:
        for number in range(1, 6):
            ckpt.save(number, job.state).result()
    command = [sys.executable, "-m", "safe_ckpt.tools.cli", "gc", str(tmp_path), "--keep-last", "1"]
    said = warm.run(command, capture_output=True, text=True, check=True, timeout=100).stderr
    assert re.search(r"1 kept; 1\.4\d* MiB freed|1 kept; 1\.\d MiB freed", said), said


# ------------------------------------------------------------------ random programs


class Program:
    """Freezes, unfreezes, ties, replaces and edits at random, in the ways that are and are not noticed by torch."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        torch.manual_seed(seed)
        self.model = torch.nn.ModuleDict({name: torch.nn.Linear(SIZE, SIZE) for name in "abc"})
        self.model.requires_grad_(requires_grad=False)
        self.model["c"].requires_grad_(requires_grad=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=self.chance.random() < 0.5)

    @property
    def state(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def any_layer(self):
        return self.model[self.chance.choice("abc")]

    def act(self):
        self.chance.choice(
            [
                self.freeze,
                self.unfreeze,
                self.tie,
                self.replace,
                self.data,
                self.copy,
                self.reload,
                self.raw,
                self.swap,
                self.step,
            ]
        )()

    def freeze(self):
        self.any_layer().requires_grad_(requires_grad=False)

    def unfreeze(self):
        self.any_layer().requires_grad_(requires_grad=True)

    def tie(self):
        self.any_layer().weight = self.any_layer().weight

    def replace(self):
        name = self.chance.choice("abc")
        self.model[name] = torch.nn.Linear(SIZE, SIZE).requires_grad_(requires_grad=self.chance.random() < 0.5)

    def data(self):
        self.any_layer().weight.data[0, self.chance.randrange(SIZE)] += 1

    def copy(self):
        with torch.no_grad():
            layer = self.any_layer()
            layer.weight.copy_(torch.randn(SIZE, SIZE)) if self.chance.random() < 0.5 else layer.bias.mul_(2)

    def reload(self):
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        state["a.bias"][0] += 1
        self.model.load_state_dict(state, assign=self.chance.random() < 0.5)

    def raw(self):
        """As code in C++ does that counts no version."""
        tensor = self.any_layer().weight
        ctypes.memset(tensor.data_ptr() + 4 * self.chance.randrange(SIZE * SIZE), self.chance.randrange(1, 60), 4)

    def swap(self):
        layer = self.any_layer()
        layer.weight.data = torch.randn(SIZE, SIZE)

    def step(self):
        self.optimizer.zero_grad()
        loss = sum(layer(torch.randn(1, SIZE)).square().mean() for layer in self.model.values())
        if loss.requires_grad:
            loss.backward()
            self.optimizer.step()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_a_program_does_each_checkpoint_is_what_was_there(tmp_path, seed, request):
    """Six saves with changes in between, some of them none: read back, each has the bytes that it was given, by hash."""
    if seed % 2:
        request.getfixturevalue("elsewhere")
    program, expected = Program(seed), []
    chosen = config(full_every=program.chance.choice([None, None, 3]))
    with Checkpointer(tmp_path, chosen) as ckpt:
        for number in range(1, 7):
            for _ in range(program.chance.choice([0, 0, 1, 2])):
                program.act()
            expected.append(digest(program.model))
            ckpt.save(number, program.state)
            program.model["c"].weight.data[1, 1] -= 1  # in the line behind the save
        ckpt.wait()
    for number in range(1, 7):
        other = Program(seed + 1)
        with Checkpointer(tmp_path, chosen) as ckpt:
            ckpt.resume({"model": other.model}, step=number)
        assert digest(other.model) == expected[number - 1], (seed, number)
