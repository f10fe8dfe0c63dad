"""What a resume gives back, what it passes over, and what it refuses."""

import contextlib
import ctypes
import dataclasses
import json
import math
import mmap
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch
from small_runs import config, steps, trained

from kit import inside
from kit.limits import QUICK
from safe_ckpt import (
    Checkpointer,
    PerRank,
    load,
)
from safe_ckpt.core.formats.manifest import FileEntry, Manifest, read_manifest
from safe_ckpt.core.home import candidates as catalog
from safe_ckpt.core.home.visibility import Patience
from safe_ckpt.core.resuming import candidate
from safe_ckpt.core.resuming.items import StoredItems, files_for, warn_of_other_ranks
from safe_ckpt.core.storage.reader import drop_cache
from safe_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NoValidCheckpointError,
    RestoreError,
    UnsupportedFormatError,
)
from safe_ckpt.events import Resumed
from safe_ckpt.testing import inline_saves
from support import flip_bit, needs_root, run_program


def test_a_training_state_is_restored_in_place(tmp_path):
    """Module, optimizer, scheduler and generators come back bit for bit, into the objects that are given."""
    state = trained()
    saved = {name: state[name].state_dict() for name in ("model", "optimizer", "scheduler")}
    saved = {name: json.loads(json.dumps(v, default=lambda t: t.tolist())) for name, v in saved.items()}
    with Checkpointer(tmp_path, config()) as ckpt:
        assert ckpt.resume(state) is None
        info = ckpt.save(7, state, metrics={"loss": torch.tensor(0.5)}).result(timeout_s=20)
    expected = torch.rand(3)
    assert (info.step, info.metrics, info.path) == (7, {"loss": 0.5}, tmp_path / "step-00000007")
    fresh = trained()
    for parameter in fresh["model"].parameters():
        torch.nn.init.constant_(parameter, 9.0)
    address = fresh["model"][0].weight.data_ptr()
    with Checkpointer(tmp_path, config()) as ckpt:
        assert ckpt.resume(fresh).step == 7
    assert fresh["model"][0].weight.data_ptr() == address
    found = {name: fresh[name].state_dict() for name in saved}
    assert {n: json.loads(json.dumps(v, default=lambda t: t.tolist())) for n, v in found.items()} == saved
    assert torch.rand(3).equal(expected)


def test_values_that_cannot_change_in_place_are_replaced(tmp_path):
    """A number in the state is replaced in the mapping; a read-only mapping gets an error that says so."""
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.save(1, {"epoch": 3}).result(timeout_s=20)
        state = {"epoch": 0}
        ckpt.resume(state)
        assert state == {"epoch": 3}


@pytest.mark.parametrize("value", [1000, "text", (1, "a"), 2.5, None, True, {"seed": 1}], ids=repr)
def test_what_each_rank_has_of_its_own_stays_its_own(tmp_path, value):
    """Behind a resume it is in ``PerRank`` as before, so the next save stores that of each rank again."""
    state = {"own": PerRank(value), "shared": 3}
    with Checkpointer(tmp_path, config()) as ckpt:
        for step in (1, 2):
            info = ckpt.save(step, state).result(timeout_s=20)
            assert read_manifest(info.path).items["own"]["per_rank"]
            state = {"own": PerRank({"seed": 0} if isinstance(value, dict) else None), "shared": 0}
            ckpt.resume(state)
            assert isinstance(state["own"], PerRank)
            assert (state["own"].value, state["shared"]) == (value, 3)


def test_what_was_read_wrongly_once_is_read_from_the_disk_the_second_time(tmp_path):
    """The page in memory may be the damaged one. A good checkpoint is not condemned by the same page read twice."""
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.save(1, {"a": {"t": torch.ones(1000)}}).result(timeout_s=20)
    path, kept = tmp_path / "step-00000001", []
    file = path / "a.safetensors"

    def load(place):
        kept.append(is_in_memory(file))
        file.read_bytes()
        if len(kept) == 1 and not is_in_memory(file):
            pytest.skip("what is in memory is not known here")
        if len(kept) == 1:
            raise CorruptCheckpointError(path=str(place), file=file.name, message="differs")
        return "read"

    assert candidate._read(path, load, Patience(QUICK)) == "read"
    if kept[1] and not can_be_dropped(tmp_path):
        pytest.skip("these files lie in memory alone")
    assert not kept[1]


def is_in_memory(file):
    """Whether the page cache has the first page of a file."""
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as memory:
        view = ctypes.c_char.from_buffer(memory)
        pages = (ctypes.c_ubyte * (len(memory) // mmap.PAGESIZE + 1))()
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(len(memory)), pages)
        del view
    return not failed and bool(pages[0] & 1)


def can_be_dropped(folder):
    """Whether what is in memory of this disk can be dropped."""
    file = folder / "trial"
    with file.open("wb") as stream:
        stream.write(b"x" * 5000)
        os.fsync(stream.fileno())
    drop_cache(file)
    return not is_in_memory(file)


def test_a_damaged_checkpoint_is_passed_over_and_kept_for_people(tmp_path):
    """One flipped bit in the newest: the older one is restored, and the damaged one is in quarantine with a reason."""
    with Checkpointer(tmp_path, config()) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"w": {"t": torch.full((1000,), float(step))}, "n": step}).result(timeout_s=20)
    flip_bit(tmp_path / "step-00000003" / "w.safetensors", 5000)
    flip_bit(tmp_path / "step-00000002" / "manifest.json", 100)
    target = {"w": {"t": torch.zeros(1000)}}
    seen = []
    begun = time.monotonic()
    with Checkpointer(tmp_path, config(), hooks=[seen.append]) as ckpt:
        assert ckpt.resume(target).step == 1
        took_s = time.monotonic() - begun
        assert ckpt.save(4, {"n": 4}).result(timeout_s=20).sequence > 1
    (told,) = [event for event in seen if isinstance(event, Resumed)]
    assert (told.step, told.rejected) == (1, 2)
    assert 0 < told.seconds <= took_s
    assert (target["w"]["t"] == 1).all()
    assert steps(tmp_path) == ["step-00000001", "step-00000004"]
    assert steps(tmp_path / ".safe_ckpt/quarantine") == ["step-00000002", "step-00000003"]
    events = [json.loads(line) for line in (tmp_path / ".safe_ckpt/events.jsonl").read_text().splitlines()]
    reasons = [event["reason"] for event in events if event["event"] == "quarantined"]
    assert any("w.safetensors" in reason for reason in reasons)


@pytest.mark.parametrize("verify", [True, False])
def test_a_load_compares_what_nobody_reads_where_that_is_asked_for(tmp_path, verify):
    """A checkpoint is good as a whole or not at all; a load that wants a part of it quickly may say so."""
    with Checkpointer(tmp_path, config()) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": {"t": torch.full((1000,), float(step))}, "n": step}).result(timeout_s=20)
    flip_bit(tmp_path / "step-00000002" / "w.safetensors", 3000)
    state = {"n": 0}
    assert load(tmp_path, state, verify=verify).step == state["n"] == (1 if verify else 2)


def test_damage_in_what_is_not_restored_counts_too(tmp_path):
    """A checkpoint is good as a whole: a flip in an item that this resume does not ask for is found as well."""
    with Checkpointer(tmp_path, config()) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"a": step, "b": {"t": torch.ones(10)}}).result(timeout_s=20)
    flip_bit(tmp_path / "step-00000002" / "b.safetensors", 4100)
    target = {"a": 0}
    with Checkpointer(tmp_path, config()) as ckpt:
        assert ckpt.resume(target).step == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_what_another_rank_wrote_and_nobody_reads_is_compared_by_rank_0(tmp_path, rank):
    """Two ranks resume a part: a flip in the other part, which rank 1 wrote, is found once, by rank 0."""
    with Checkpointer(tmp_path, config()) as ckpt:
        path = ckpt.save(1, {"a": 1, "b": {"t": torch.ones(10)}}).result(timeout_s=20).path
    manifest = read_manifest(path)
    files = tuple(dataclasses.replace(one, rank=int(one.path.startswith("b"))) for one in manifest.files)
    (path / "manifest.json").write_bytes(dataclasses.replace(manifest, files=files, world_size=2).to_bytes())
    flip_bit(path / "b.safetensors", 4100)
    items = StoredItems({"a": 0}, rank, 2)
    with pytest.raises(CorruptCheckpointError, match=r"b\.safetensors") if rank == 0 else contextlib.nullcontext():
        assert items.load(path) == {"a": 1}


class Anew:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def start_anew(self, state, rank):
        pass


def test_each_rank_reads_the_file_that_it_has_saved():
    """Of what each rank saved its own: that file; for one that was not there rank 0's if it may begin anew, else an error."""
    own = {"form": "torch", "per_rank": True, "files": {"0": "own.rank0.pt", "1": "own.rank1.pt"}}
    files = tuple(
        FileEntry(path=file, size_bytes=1, xxh3_128="0" * 32, rank=int(rank)) for rank, file in own["files"].items()
    )
    manifest = Manifest(name="step-1", sequence=1, step=1, world_size=2, files=files, items={"own": own})
    for rank in (0, 1):
        assert files_for(manifest, {"own": PerRank({})}, rank=rank, path="x") == {"own": f"own.rank{rank}.pt"}
    with pytest.raises(RestoreError, match=r"saved by 2 ranks, each its own, and this is rank 2") as caught:
        files_for(manifest, {"own": PerRank({})}, rank=2, path="x")
    assert caught.value.key == "state['own']"
    assert files_for(manifest, {"own": PerRank(Anew())}, rank=2, path="x") == {"own": "own.rank0.pt"}


def test_no_usable_checkpoint_is_an_error(tmp_path):
    """All damaged: an error with every reason, nothing moved, nothing started afresh; likewise with quarantine alone."""
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.save(1, {"a": 1}).result(timeout_s=20)
    (tmp_path / "step-00000001" / "a.json").write_text("2")
    with Checkpointer(tmp_path, config()) as ckpt, pytest.raises(NoValidCheckpointError, match=r"a\.json"):
        ckpt.resume({"a": 0})
    assert steps(tmp_path) == ["step-00000001"]
    (tmp_path / ".safe_ckpt/quarantine").mkdir()
    (tmp_path / "step-00000001").rename(tmp_path / ".safe_ckpt/quarantine/step-00000001")
    with Checkpointer(tmp_path, config()) as ckpt, pytest.raises(NoValidCheckpointError, match="in quarantine"):
        ckpt.resume({"a": 0})


def test_a_mistyped_step_is_not_found_whatever_lies_in_quarantine(tmp_path):
    """Of the step that was named a resume says that it is there; of another one nothing, also where all others are damaged."""
    with Checkpointer(tmp_path, config()) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"a": step}).result(timeout_s=20)
        (tmp_path / "step-00000002/a.json").write_text("3")
        assert ckpt.resume({"a": 0}).step == 1
        with pytest.raises(CheckpointNotFoundError, match="step-00000001"):
            ckpt.resume({"a": 0}, step=3)
        with pytest.raises(NoValidCheckpointError, match="step-00000002: in quarantine"):
            ckpt.resume({"a": 0}, step=2)
        (tmp_path / "step-00000001/a.json").write_text("3")
        with pytest.raises(CheckpointNotFoundError):
            ckpt.resume({"a": 0}, step=3)


@needs_root
def test_an_unreadable_file_is_not_treated_as_corrupt():
    """An I/O error while reading is raised as such: the checkpoint stays where it is."""
    with tempfile.TemporaryDirectory() as folder:
        _unreadable(Path(folder))


def _unreadable(tmp_path):
    with Checkpointer(tmp_path, config()) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"a": {"t": torch.ones(10)}}).result(timeout_s=20)
    unreadable = tmp_path / "step-00000002" / "a.safetensors"
    home = {**os.environ, "HOME": "/nonexistent"}
    done = run_program("resumes_without_permission", str(tmp_path), str(unreadable), cwd="/", env=home)
    assert done.stdout.split() == ["DirectoryError", "13"], done.stdout + done.stderr
    assert steps(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"b": 1}, "no such item"),
        ({"a": PerRank(1)}, "saved not PerRank"),
        ({"own": 1}, "saved PerRank"),
        ({"model": torch.nn.Linear(3, 3)}, "size mismatch"),
    ],
)
def test_a_state_that_does_not_fit_is_told_so(tmp_path, state, words):
    """Restoring something else than was saved is an error that says what there is."""
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.save(1, {"a": 1, "own": PerRank(1), "model": torch.nn.Linear(2, 2)}).result(timeout_s=20)
        with pytest.raises(RestoreError, match=words):
            ckpt.resume(state)


def test_a_newer_format_is_refused_not_ignored(tmp_path):
    """A checkpoint of a later release must not be passed over in silence in favour of an older one."""
    from kit.manifests import rewrite

    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.save(1, {"a": 1}).result(timeout_s=20)
    rewrite(tmp_path / "step-00000001", lambda data: data.update(format_version=99))
    with pytest.raises(UnsupportedFormatError, match="upgrade"):
        Checkpointer(tmp_path, config())


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"w": torch.zeros(3)}, "(3,) torch.float32, the checkpoint has (2,)"),
        ({"w": torch.zeros(2, dtype=torch.float64)}, "torch.float64"),
        ({"w": torch.zeros(2), "new": torch.zeros(1)}, "nothing for the tensors ['new']"),
    ],
)
def test_a_tensor_that_does_not_fit_is_an_error(tmp_path, target, words):
    """A parameter cannot be replaced through its state dict: resume() must not pretend that it was restored."""
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.save(1, {"m": {"w": torch.ones(2)}}).result()
        with pytest.raises(RestoreError) as caught:
            ckpt.resume({"m": target})
        assert words in str(caught.value)
        state = {"m": {"w": None}}
        ckpt.resume(state)
        assert state["m"]["w"].tolist() == [1, 1]


def test_a_manifest_with_nonsense_in_it_is_passed_over(tmp_path):
    """Its digest is right, as of a tool that rewrites manifests: the one before it is restored, and it goes to quarantine."""
    from kit.manifests import rewrite

    with Checkpointer(tmp_path, config()) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"a": step}).result(timeout_s=20)
        rewrite(tmp_path / "step-00000002", lambda data: data.update(items={"a": 5}))
        rewrite(tmp_path / "step-00000003", lambda data: data.update(notes={"adapter": []}))
        assert ckpt.resume({"a": 0}).step == 1
    assert steps(tmp_path) == ["step-00000001"]


def test_ranks_that_read_two_manifests_of_one_name_pass_it_over():
    """In a store each rank asks by itself. A mix of two saves is restored by none; with one manifest all go on."""
    answers = {rank: {"op_id": "first", "host": "a"} for rank in range(3)}
    assert inside.verdict_on_hosts(answers)["hosts"] == {"a": [0, 1, 2]}
    verdict = inside.verdict_on_hosts({**answers, 2: {"op_id": "other", "host": "a"}})["verdict"]
    assert verdict == {"why": "the ranks read different manifests", "kind": "missing"}


@pytest.mark.parametrize("listed", [True, False], ids=["while it is listed", "while it is read"])
@pytest.mark.parametrize("damage", [1, 2])
def test_that_a_checkpoint_is_of_another_format_two_reads_must_say(tmp_path, monkeypatch, listed, damage):
    """A read brings bytes that are no manifest, the next one bytes that name another format: it is read once more. Only where
    that is said again is the checkpoint another tool's.
    """
    with Checkpointer(tmp_path, config()) as ckpt:
        ckpt.save(1, {"a": 1}).result()
    path, file = tmp_path / "step-00000001", tmp_path / "step-00000001/manifest.json"
    whole = file.read_bytes()
    foreign = whole.replace(b'"safe_ckpt"', b'"safe-ckpt"')
    assert foreign != whole
    after = [foreign, foreign if damage == 2 else whole]
    real, read = read_manifest, []

    def next_bytes(place):
        read.append(place)
        try:
            return real(place)
        finally:
            if after:
                file.write_bytes(after.pop(0))

    file.write_bytes(b"{" + whole)
    monkeypatch.setattr(catalog if listed else candidate, "read_manifest", next_bytes)
    if listed:
        assert catalog.look_at(path).foreign == (damage == 2)
    elif damage == 2:
        with pytest.raises(UnsupportedFormatError):
            candidate._read(path, next_bytes, Patience(QUICK))
    else:
        assert candidate._read(path, next_bytes, Patience(QUICK)).step == 1
    assert len(read) == 3


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        (2, 2, ""),
        (2, 4, "ranks 2 to 3 start anew from rank 0's"),
        (1, 2, "ranks 1 to 1 start anew from rank 0's"),
        (4, 2, "what ranks 2 to 3 saved is not restored"),
        (4, 1, "what ranks 1 to 3 saved is not restored"),
    ],
)
def test_what_becomes_of_each_ranks_own_with_other_ranks_is_said(caplog, then, now, said):
    """More ranks or fewer: which ranks, and of which items; nothing where all items are of all ranks together."""
    warn_of_other_ranks({"model": 1, "step": 2}, then, now)
    assert caplog.messages == []
    warn_of_other_ranks({"model": 1, "rng": PerRank(2), "data": PerRank(3)}, then, now)
    assert [one.partition(": ")[0] for one in caplog.messages] == (["rng, data"] if said else [])
    assert said in caplog.text


def test_a_step_is_resumed_by_the_name_of_its_checkpoint(tmp_path):
    """Beside it lie others of that number: an unhealthy save of the same step, and what another program has put there."""
    with inline_saves(), Checkpointer(tmp_path, config()) as ckpt:
        for step, value in [(2, 2.0), (3, 3.0), (4, 4.0), (3, math.nan), (5, math.nan)]:
            ckpt.save(step, {"w": {"t": torch.full((4,), value)}}).result()
        shutil.copytree(tmp_path / "step-00000004", tmp_path / "mine")
        from kit.manifests import rewrite

        rewrite(tmp_path / "mine", lambda data: data.update(name="mine", step=2, sequence=99))
        for step in (2, 3, 4):
            state = {"w": {"t": torch.zeros(4)}}
            info = ckpt.resume(state, step=step)
            assert (info.path.name, info.step) == (f"step-{step:08}", step)
            assert state["w"]["t"].tolist() == [step] * 4
