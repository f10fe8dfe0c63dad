"""Several ranks under ``accelerate launch``."""

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from accelerate_launch import run, start

from kit.patience import wait_until
from kit.thorough import THOROUGH
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify
from support import kill_all, needs_root, processes_of_this_test, small_disk, writer_processes

TRAIN = """
    from safe_ckpt.errors import NoValidCheckpointError
    accelerator = make(folder, limit=2, dataloader_config=stateful())
    register(accelerator, CONFIG)
    training = Training(accelerator, width=int(sys.argv[2]))
    try:
        accelerator.load_state()
    except NoValidCheckpointError:
        say("FRESH")
    steps = len(training.loader)
    begin = training.counter.count
    say("BEGIN", begin)
    def saved(count):
        accelerator.save_state(step=count)
        say("SAVED", count)
    for epoch in range(begin // steps, int(sys.argv[3])):
        training.loader.set_epoch(epoch)
        training.epoch(saved)
    say("END", training.fingerprint(), training.counter.count)
    accelerator.end_training()
"""


@pytest.mark.timeout(900 if THOROUGH else 240)
@pytest.mark.parametrize("size", [2, 4] if THOROUGH else [4])
def test_it_survives_kills_bit_for_bit(tmp_path, size):
    """A save at every step, killed at random moments within one, started again: it goes on from the newest checkpoint, and its
    end is that of an uninterrupted run, with random generators, scheduler and the place in the data.
    """
    kills = 30 if THOROUGH else 5 - size
    width, epochs = 3000, 100 if THOROUGH else 20
    reference = run(tmp_path, TRAIN, tmp_path / "reference", width, epochs, size=size)
    seed = int.from_bytes(os.urandom(2))
    chance = random.Random(seed)
    pending = tmp_path / "exp/.safe_ckpt/pending"
    reached = newest = within = number = 0
    while number < kills or (not within and number < kills + 5):
        number += 1
        process = start(tmp_path, TRAIN, tmp_path / "exp", width, epochs, size=size)
        saves = chance.randint(1, 5) if reached else 3  # once where an epoch ends
        for line in process.stdout:
            assert "END" not in line, "the run ended before it could be killed"
            saves -= "SAVED" in line and line.startswith("RANK 0")
            if "BEGIN" in line:
                assert int(line.split()[-1]) >= newest, f"random seed {seed}"
            if "SAVED" in line:
                reached = max(reached, int(line.split()[-1]))
            if not saves:
                break
        deadline = time.monotonic() + 5
        while not any(pending.glob("*")) and time.monotonic() < deadline:
            pass
        deadline = time.monotonic() + chance.random() * 0.01
        while time.monotonic() < deadline:
            pass
        kill_all()
        process.wait()
        process.stdout.close()
        within += any(pending.glob("*"))
        for path in (tmp_path / "exp/checkpoints").iterdir():
            manifest = read_manifest(path)
            verify(path, manifest)
            newest = max(newest, manifest.step)
        assert newest >= reached - 1 > 0, f"random seed {seed}"
    done = run(tmp_path, TRAIN, tmp_path / "exp", width, epochs, size=size)
    begins = {line for said in done.values() for line in said if line.startswith("BEGIN")}
    assert begins == {f"BEGIN {newest}"}, f"random seed {seed}"  # one that begins anew comes to the same end
    ends = [[line for line in said if line.startswith("END")] for said in (*reference.values(), *done.values())]
    assert [len(one) for one in ends] == [1] * (2 * size)
    assert ends[:size] == ends[size:], f"random seed {seed}"
    assert within
    print(f"{size} ranks: {number} kills, {within} within a save, up to step {reached}")
    assert writer_processes() == []


@pytest.mark.thorough
def test_a_slow_rank_and_a_save_longer_than_the_groups_timeout(tmp_path):
    """Rank 1 comes 5 s late to the second of three saves in a row, and the disk takes 6 s for an fsync, with a group timeout of
    4 s: no race, no abort, equal counters, and the group's timeout is what it was.
    """
    body = """
        import torch.distributed as dist
        from safe_ckpt import CheckpointConfig, Timeouts
        config = CheckpointConfig(timeouts=Timeouts(lengthy_s=60, barrier_s=30, writer_stall_s=20, peer_stall_s=3))
        accelerator = make(folder, limit=2, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=4))])
        handle = register(accelerator, config)
        training = Training(accelerator)
        for number in range(3):
            if rank == 1 and number == 1:
                time.sleep(5)
            accelerator.save_state()
            say("COUNTER", accelerator.save_iteration)
        handle.wait()
        real, slow = os.fsync, []
        def fsync(fd):
            if not slow:
                slow.append(fd)
                time.sleep(6)
            real(fd)
        os.fsync = fsync
        begun = time.monotonic()
        accelerator.save_state()
        handle.wait()
        say("LONG", time.monotonic() - begun > 5)
        group = dist.distributed_c10d._get_default_group()
        say("TIMEOUT", group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
        accelerator.wait_for_everyone()
        accelerator.end_training()
        say("NAMES", sorted(os.listdir(folder / "checkpoints")))
    """
    said = run(tmp_path, body, tmp_path / "exp")
    names = "NAMES ['checkpoint_2', 'checkpoint_3']"
    expected = ["COUNTER 1", "COUNTER 2", "COUNTER 3", "LONG True", "TIMEOUT 4.0", names]
    assert said == {0: expected, 1: expected}


@needs_root
def test_a_failed_save_is_told_to_all_and_the_one_before_is_there_for_all(tmp_path):
    """total_limit=1 and a full disk: both ranks get the same error, both restore the same older checkpoint."""
    body = """
        accelerator = make(folder, limit=1)
        handle = register(accelerator, CONFIG)
        training = Training(accelerator, width=20_000)
        training.epoch()
        accelerator.save_state(async_save=False)
        expected = training.fingerprint()
        if rank == 0:
            (folder / "filler").write_bytes(b"x" * (os.statvfs(folder).f_bavail * 4096 - (1 << 20)))
        training.epoch()
        try:
            accelerator.save_state()
            handle.wait()
        except SafeCheckpointError as error:
            say(type(error).__name__)
        training.scramble()
        accelerator.load_state()
        say("EQUAL", training.fingerprint() == expected, sorted(os.listdir(folder / "checkpoints")))
        if rank == 0:
            (folder / "filler").unlink()
        accelerator.wait_for_everyone()
        accelerator.save_state(async_save=False)
        accelerator.wait_for_everyone()  # rank 0 lets the old one go after the verdict
        say(sorted(os.listdir(folder / "checkpoints")))
        accelerator.end_training()
    """
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        said = run(tmp_path, body, disk)
    expected = ["NotEnoughSpaceError", "EQUAL True ['checkpoint_0']", "['checkpoint_2']"]
    assert said == {0: expected, 1: expected}


def test_what_differs_between_ranks_is_refused_by_all(tmp_path):
    """Another path, a size that is none, a hook that breaks, a loader at another place: every rank raises it, nothing hangs."""
    body = """
        accelerator = make(None, dataloader_config=stateful())
        handle = register(accelerator, CONFIG)
        training = Training(accelerator)
        def attempt(*args):
            begun = time.monotonic()
            try:
                accelerator.save_state(*args, async_save=False)
            except Exception as error:
                say(type(error).__name__, "mine" in str(error), time.monotonic() - begun < 10)
        attempt(folder / f"mine{rank}")
        for call, *given in (
            (accelerator.save_state, folder / f"mine{rank}"),
            (accelerator.save_model, training.net, folder / f"mine{rank}"),
            (accelerator.save_model, training.net, folder / "weights", "big"),
        ):
            try:
                call(*given)
            except SafeCheckpointError as error:
                say(type(error).__name__, str(error).rpartition(": ")[2])
        def hook(models, weights, output_dir):
            (Path(output_dir) / f"extra{rank}.txt").write_text("x")
            if rank == 1 and broken:
                raise KeyError("mine")
        broken = True
        removable = accelerator.register_save_state_pre_hook(hook)
        attempt(folder / "a")
        broken = False
        attempt(folder / "a")
        say(sorted(name for name in os.listdir(folder / "a") if name.startswith(("extra", "random"))))
        removable.remove()
        for number, batch in enumerate(training.loader):
            if number == rank:
                attempt(folder / "mine")
        accelerator.end_training()
    """
    said = run(tmp_path, body, tmp_path / "exp")
    listed = "['extra0.txt', 'extra1.txt', 'random_states_0.pkl', 'random_states_1.pkl']"
    same = "DesyncError give all of them the same path"
    own = [
        "DesyncError True True",
        same,
        same,
        "ConfigError expected a number of bytes or text such as \"5GB\", got 'big'",
    ]
    assert said[0] == [*own, "UnexpectedError True True", listed, "DesyncError False True"]
    assert said[1] == [*own, "KeyError True True", listed, "DesyncError False True"]


def test_a_rank_that_the_users_own_code_could_not_meet_is_an_error_of_all(tmp_path):
    """A pre-hook on one rank raises RendezvousTimeout, as a Checkpointer of its own would: every rank raises it at once."""
    body = """
        from safe_ckpt.errors import RendezvousTimeout
        accelerator = make(folder)
        handle = register(accelerator, CONFIG)
        training = Training(accelerator)
        def hook(models, weights, output_dir):
            if rank == 1:
                raise RendezvousTimeout(phase="mine", seconds=1.0, missing=(7,))
        removable = accelerator.register_save_state_pre_hook(hook)
        begun = time.monotonic()
        try:
            accelerator.save_state()
        except RendezvousTimeout as error:
            say("mine" in str(error), time.monotonic() - begun < 10)
        removable.remove()
        accelerator.save_state(async_save=False)
        say("SAVED")
        accelerator.end_training()
    """
    assert run(tmp_path, body, tmp_path / "exp") == {0: ["True True", "SAVED"], 1: ["True True", "SAVED"]}


def test_a_missing_name_on_one_rank_is_an_error_of_all(tmp_path):
    """save_state() without a path on one rank alone: every rank raises, and the next save works."""
    body = """
        accelerator = make(None)
        handle = register(accelerator, CONFIG)
        training = Training(accelerator)
        begun = time.monotonic()
        try:
            accelerator.save_state(None if rank == 1 else folder / "a")
        except SafeCheckpointError as error:
            say(type(error).__name__, "output_dir" in str(error), time.monotonic() - begun < 10)
        accelerator.save_state(folder / "b", async_save=False)
        say("SAVED")
        accelerator.end_training()
    """
    said = run(tmp_path, body, tmp_path / "exp")
    assert said == {rank: ["ConfigError True True", "SAVED"] for rank in range(2)}


def test_handles_give_everything_back_on_every_rank(tmp_path):
    """After remove() on two ranks there is no process, no thread and no shared memory of ours; training goes on."""
    body = """
        import threading
        accelerator = make(folder)
        before = threading.active_count(), accelerator.save_state
        with register(accelerator, CONFIG) as handle:
            training = Training(accelerator)
            accelerator.save_state()
        say((threading.active_count(), accelerator.save_state) == before, shared_memory())
        training.epoch()
        accelerator.end_training()
    """
    said = run(tmp_path, body, tmp_path / "exp")
    assert said == {0: ["True []"], 1: ["True []"]}
    assert writer_processes() == []


@pytest.mark.thorough
def test_a_stock_job_loads_ours_on_both_ranks(tmp_path):
    """No part of safe_ckpt is needed to read what it wrote."""
    write = """
        accelerator = make(folder)
        register(accelerator, CONFIG)
        training = Training(accelerator)
        training.epoch()
        accelerator.save_state()
        say(training.fingerprint())
        accelerator.end_training()
    """
    read = """
        accelerator = make(folder)
        training = Training(accelerator, number=5)
        training.scramble()
        accelerator.load_state()
        say(training.fingerprint())
        accelerator.end_training()
    """
    assert run(tmp_path, write, tmp_path / "exp") == run(tmp_path, read, tmp_path / "exp")


def test_a_model_is_saved_by_all_ranks_at_once(tmp_path):
    """save_model on two ranks: one set of files, complete, with tied weights once, also file by file where checkpoints are.
    And loaders whose workers have other seeds on each rank are no reason to refuse a save.
    """
    body = """
        accelerator = make(None, dataloader_config=stateful())
        handle = register(accelerator, CONFIG)
        training = Training(accelerator, number=rank, num_workers=1)
        training.epoch()
        accelerator.save_state(folder / "state", async_save=False)
        path = accelerator.save_model(training.head, folder / "weights", max_shard_size="20B")
        say(sorted(os.listdir(path)))
        accelerator.save_model(training.head, folder, safe_serialization=False)
        say(sorted(os.listdir(folder)), sorted(torch.load(folder / "pytorch_model.bin")))
        accelerator.end_training()
    """
    said = run(tmp_path, body, tmp_path / "exp")
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    beside = "['.safe_ckpt', 'pytorch_model.bin', 'state', 'weights'] ['bias', 'tied', 'weight']"
    assert said == {rank: [str(["manifest.json", *shards]), beside] for rank in range(2)}
    index = json.loads((tmp_path / "exp/weights/model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == ["bias", "weight"] or sorted(index["weight_map"]) == ["bias", "tied"]


def test_a_signal_that_ends_the_job_loses_nothing_committed(tmp_path):
    """SIGTERM to the whole job in the middle of its saves: it ends, and what lies there is whole."""
    process = start(tmp_path, TRAIN, tmp_path / "exp", 3000, 1000)
    for line in process.stdout:
        if line.startswith("RANK 0 SAVED 3"):
            break
    for pid in processes_of_this_test():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    process.stdout.close()
    process.wait(timeout=60)
    wait_until(lambda: not processes_of_this_test(), 30, "the end of all processes")
    found = list(Path(tmp_path / "exp/checkpoints").iterdir())
    assert found
    for path in found:
        verify(path, read_manifest(path))
