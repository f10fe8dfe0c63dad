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
from safe_ckpt.core.formats.verify import verify_files
from support import kill_all, needs_root, processes_of_this_test, small_disk, writer_processes


@pytest.mark.timeout(900 if THOROUGH else 240)
@pytest.mark.parametrize("size", [2, 4] if THOROUGH else [4])
def test_a_job_killed_within_saves_goes_on_bit_for_bit(tmp_path, size):
    """A save at every step, killed at random moments within one, started again: it goes on from the newest checkpoint, and its
    end is that of an uninterrupted run, with random generators, scheduler and the place in the data.
    """
    kills = 30 if THOROUGH else 5 - size
    width, epochs = 3000, 100 if THOROUGH else 20
    reference = run(tmp_path, "trains_on_ranks_of_accelerate", tmp_path / "reference", width, epochs, size=size)
    seed = int.from_bytes(os.urandom(2))
    chance = random.Random(seed)
    pending = tmp_path / "exp/.safe_ckpt/pending"
    reached = newest = within = number = 0
    while number < kills or (not within and number < kills + 5):
        number += 1
        process = start(tmp_path, "trains_on_ranks_of_accelerate", tmp_path / "exp", width, epochs, size=size)
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
            verify_files(path, manifest)
            newest = max(newest, manifest.step)
        assert newest >= reached - 1 > 0, f"random seed {seed}"
    done = run(tmp_path, "trains_on_ranks_of_accelerate", tmp_path / "exp", width, epochs, size=size)
    begins = {line for said in done.values() for line in said if line.startswith("BEGIN")}
    assert begins == {f"BEGIN {newest}"}, f"random seed {seed}"  # one that begins anew comes to the same end
    ends = [[line for line in said if line.startswith("END")] for said in (*reference.values(), *done.values())]
    assert [len(one) for one in ends] == [1] * (2 * size)
    assert ends[:size] == ends[size:], f"random seed {seed}"
    assert within
    print(f"{size} ranks: {number} kills, {within} within a save, up to step {reached}")
    assert writer_processes() == []


@pytest.mark.thorough
def test_a_slow_rank_or_disk_beyond_the_groups_timeout_ends_no_save(tmp_path):
    """Rank 1 comes 5 s late to the second of three saves in a row, and the disk takes 6 s for an fsync, with a group timeout of
    4 s: no race, no abort, equal counters, and the group's timeout is what it was.
    """
    said = run(tmp_path, "comes_late_to_a_save", tmp_path / "exp")
    names = "NAMES ['checkpoint_2', 'checkpoint_3']"
    expected = ["COUNTER 1", "COUNTER 2", "COUNTER 3", "LONG True", "TIMEOUT 4.0", names]
    assert said == {0: expected, 1: expected}


@needs_root
def test_a_failed_save_is_told_to_all_and_the_one_before_is_there_for_all(tmp_path):
    """total_limit=1 and a full disk: both ranks get the same error, both restore the same older checkpoint."""
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        said = run(tmp_path, "fills_the_disk_between_saves", disk)
    expected = ["NotEnoughSpaceError", "EQUAL True ['checkpoint_0']", "['checkpoint_2']"]
    assert said == {0: expected, 1: expected}


def test_arguments_and_hooks_that_differ_between_ranks_are_refused_by_all(tmp_path):
    """Another path, a size that is none, a hook that breaks, a loader at another place: every rank raises it, nothing hangs."""
    said = run(tmp_path, "saves_what_differs_between_ranks", tmp_path / "exp")
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


def test_a_meeting_that_fails_in_a_hook_of_one_rank_is_an_error_of_all(tmp_path):
    """A pre-hook on one rank raises RendezvousTimeout, as a Checkpointer of its own would: every rank raises it at once."""
    said = run(tmp_path, "misses_a_rank_in_a_hook", tmp_path / "exp")
    assert said == {rank: ["True True", "SAVED"] for rank in range(2)}


def test_a_missing_name_on_one_rank_is_an_error_of_all(tmp_path):
    """save_state() without a path on one rank alone: every rank raises, and the next save works."""
    said = run(tmp_path, "names_no_path_on_one_rank", tmp_path / "exp")
    assert said == {rank: ["ConfigError True True", "SAVED"] for rank in range(2)}


def test_handles_give_everything_back_on_every_rank(tmp_path):
    """After remove() on two ranks there is no process, no thread and no shared memory of ours; training goes on."""
    said = run(tmp_path, "removes_its_handle", tmp_path / "exp")
    assert said.keys() == {0, 1}
    for (line,) in said.values():
        found = json.loads(line)
        assert found["trains"]
        assert found["behind"] == found["before"]
        assert (found["before"]["replaced"], found["before"]["shared"]) == ([], 0)
        assert found["within"]["replaced"]  # so these do show what a handle takes
        assert len(found["within"]["threads"]) > len(found["before"]["threads"])
        assert found["within"]["shared"] > 0
    assert writer_processes() == []


@pytest.mark.thorough
def test_a_stock_job_loads_ours_on_both_ranks(tmp_path):
    """No part of safe_ckpt is needed to read what it wrote."""
    saved = run(tmp_path, "saves_after_an_epoch", tmp_path / "exp")
    assert run(tmp_path, "loads_with_stock_accelerate", tmp_path / "exp") == saved


def test_a_model_is_saved_by_all_ranks_at_once(tmp_path):
    """save_model on two ranks: one set of files, complete, with tied weights once, also file by file where checkpoints are.
    And loaders whose workers have other seeds on each rank are no reason to refuse a save.
    """
    said = run(tmp_path, "saves_models_on_all_ranks", tmp_path / "exp")
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    beside = "['.safe_ckpt', 'pytorch_model.bin', 'state', 'weights'] ['bias', 'tied', 'weight']"
    assert said == {rank: [str(["manifest.json", *shards]), beside] for rank in range(2)}
    index = json.loads((tmp_path / "exp/weights/model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == ["bias", "weight"] or sorted(index["weight_map"]) == ["bias", "tied"]


def test_a_signal_that_ends_the_job_loses_nothing_committed(tmp_path):
    """SIGTERM to the whole job in the middle of its saves: it ends, and what lies there is whole."""
    process = start(tmp_path, "trains_on_ranks_of_accelerate", tmp_path / "exp", 3000, 1000)
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
        verify_files(path, read_manifest(path))
