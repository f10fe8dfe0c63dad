"""What nobody holds any more is gone, on every rank, whenever Python gets round to it; what is held is named."""

import gc
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from accelerate_runs import make
from kit.limits import QUICK
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, set_up_directory
from safe_ckpt.accelerate import register
from safe_ckpt.core.coordination.coordinator import _open, open_coordinator
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.errors import ClosedError

CONFIG = CheckpointConfig(timeouts=QUICK)


def _drop_at_different_times(rank, folder, early):
    gc.disable()  # from here on what is in a cycle goes when this says so
    steps = []
    for step in range(1, 5):
        ckpt = Checkpointer(folder, CONFIG)
        steps.append(ckpt.save(step, {"x": step}).result(timeout_s=20).step)
        if rank != early:
            ckpt.itself = ckpt  # only Python's collector will find it
        del ckpt
        dist.barrier()
    return steps, len(_open)


@pytest.mark.parametrize("early", [0, 1])
def test_a_dropped_checkpointer_may_be_collected_when_it_likes(tmp_path, early):
    """Dropped without close(), gone at once on one rank and in a cycle on the others: the next one works, again and again."""
    for steps, _ in values(spawn_ranks(_drop_at_different_times, 3, tmp_path, early)):
        assert steps == [1, 2, 3, 4]


def _hold_on(rank, folder):
    first = Checkpointer(folder, CONFIG)
    handle = first.save(1, {"x": 1})
    if rank == 1:
        first.close()  # not the same on all ranks, as where the interpreter collects one of them
    with Checkpointer(folder, CONFIG) as second:
        return handle.committed.step, second.save(2, {"x": 2}).result(timeout_s=20).step


def test_a_second_checkpointer_takes_over_on_every_rank(tmp_path):
    """A second one beside one that lives, on some ranks or on all: the first finishes what is in flight and has ended."""
    assert values(spawn_ranks(_hold_on, 2, tmp_path)) == [(1, 2)] * 2


def _one_has_it_no_more(rank):
    """Some ranks have the session, others released it: they find each other in a new one."""
    first = open_coordinator(None, QUICK)
    kept = open_coordinator(None, QUICK)
    assert kept is first
    first.release()
    if rank == 1:
        kept.release()  # the last user here, not there
    second = open_coordinator(None, QUICK)
    found = second.agree("x", timeout_s=10, local=lambda: rank, decide=sum)
    same = second is kept
    third = open_coordinator(None, QUICK)
    assert third is second
    for coordinator in (second, third, *([] if rank == 1 else [kept])):
        coordinator.release()
    return {"agreed": found, "the one that was kept": same, "left open": len(_open)}


def _all_have_it(rank):
    """Every rank has released one user of the session and keeps the other."""
    first = open_coordinator(None, QUICK)
    kept = open_coordinator(None, QUICK)
    first.release()
    second = open_coordinator(None, QUICK)
    found = second.agree("x", timeout_s=10, local=lambda: rank, decide=sum)
    for coordinator in (second, kept):
        coordinator.release()
    return {"agreed": found, "the one that was kept": second is kept, "left open": len(_open)}


def test_a_session_serves_again_only_where_all_have_it():
    """One rank closed it: all meet anew; when all have it, it is the same one, and in the end nothing is left."""
    expected = {"agreed": 0 + 1 + 2, "the one that was kept": False, "left open": 0}
    assert values(spawn_ranks(_one_has_it_no_more, 3)) == [expected] * 3
    assert values(spawn_ranks(_all_have_it, 3)) == [{**expected, "the one that was kept": True}] * 3


def _set_up_and_go_on(rank, folder):
    set_up_directory(folder, mode="fresh", timeout_s=20)
    with Checkpointer(folder, CONFIG) as ckpt:
        alone = len(_open)
        return ckpt.save(1, {"x": 1}).result(timeout_s=20).step, alone


def test_a_session_of_set_up_directory_serves_the_next_checkpointer(tmp_path):
    """set_up_directory leaves its session to the Checkpointer that follows."""
    assert values(spawn_ranks(_set_up_and_go_on, 2, tmp_path / "exp")) == [(1, 1)] * 2


def _notebook(rank, folder):
    """The cell that makes an Accelerator, run three times with its variables still bound, and free_memory() at the end."""
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    counts = []
    for _ in range(3):
        accelerator = make(folder)
        handle = register(accelerator, CONFIG)
        model = torch.nn.Linear(2, 2)
        accelerator._models.append(model)
        accelerator.save_state()
        handle.wait()
        counts.append(len(list((folder / "checkpoints").iterdir())))
    again = register(accelerator, CONFIG)  # only this line of it
    assert handle.closed
    assert not again.closed
    accelerator.free_memory()
    with pytest.raises(ClosedError):
        accelerator.save_state()
    with Checkpointer(folder / "checkpoints", CONFIG) as ckpt:
        assert ckpt.save(1, {"x": 1}).result(timeout_s=20).step == 1
    return counts


def test_a_cell_that_is_run_again_takes_the_directory(tmp_path):
    """register() in a cell that is run again ends the registration before it; free_memory() gives the directory back."""
    for counts in values(spawn_ranks(_notebook, 2, tmp_path)):
        assert counts[0] == 1


def _dropped_and_run_again(rank, folder):
    """Accelerators of three cells: one dropped, which rank 1 has not collected; then two that save under one name."""
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    gc.disable()
    kept, steps = [], []
    for number in range(3):
        accelerator = make(folder if number == 0 else None)
        handle = register(accelerator, CONFIG)
        accelerator._models.append(torch.nn.Linear(2, 2))
        path = accelerator.save_state(folder / "last", step=number, async_save=False)
        steps.append(read_manifest(path).step)
        if number == 1:
            kept.append(handle)  # as a notebook's Out does
        del accelerator, handle
        if rank == 0:
            gc.collect()
        dist.barrier()
    kept.clear()
    gc.collect()
    dist.barrier()
    with Checkpointer(folder / "checkpoints", CONFIG) as ckpt:
        steps.append(ckpt.save(9, {"x": 1}).result(timeout_s=20).step)
    deadline = time.monotonic() + 10  # the store's host gives the others a moment to leave
    while (threads := _ours()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return steps, threads, len(_open)


def _ours():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("safe_ckpt")]


def test_a_dropped_accelerator_frees_what_it_held(tmp_path):
    """Dropped without a word and collected on one rank only: its directory is free. A cell that is run again saves under the
    same name although something still holds the handle before it. In the end nothing of ours is left.
    """
    for steps, threads, left in values(spawn_ranks(_dropped_and_run_again, 2, tmp_path)):
        assert steps == [0, 1, 2, 9]
        assert (threads, left) == ([], 0)
