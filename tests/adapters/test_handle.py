"""The handle that adapters put on a framework's object."""

import dataclasses
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from accelerate_runs import CONFIG as ACCELERATE
from accelerate_runs import checkpoints, make
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Timeouts, WriterConfig
from safe_ckpt.accelerate import register
from safe_ckpt.adapters import AttachedHandle, Planned, Saver, torch_file
from safe_ckpt.errors import ClosedError, SafeCheckpointError
from support import writers_of

STUCK_S = 60
CONFIG = CheckpointConfig(
    timeouts=Timeouts(
        lengthy_s=STUCK_S, barrier_s=STUCK_S, writer_stall_s=STUCK_S, fsync_stall_s=STUCK_S, shutdown_s=1
    ),
    writer=WriterConfig(inline_bytes=0),
)


def test_a_handle_ends_in_time_with_a_save_that_makes_no_progress(tmp_path):
    """remove() waits for a stopped writer no longer than shutdown_s, raises that the save failed, and frees the object."""
    owner, saver = SimpleNamespace(save=None), Saver(CONFIG)
    handle = AttachedHandle(owner, saver)
    handle._attach({"save": print})
    home = saver.home(tmp_path)

    def save(step):
        content = Planned(files=[torch_file("a.pt", {"w": torch.ones(100_000)})]).payload()
        saver.save(home, tmp_path / str(step), content, step=step)

    save(1)
    handle.wait()
    (writer,) = writers_of(os.getpid())
    os.kill(writer, signal.SIGSTOP)
    save(2)
    begun, error = time.monotonic(), None
    try:
        handle.remove()
    except SafeCheckpointError as raised:
        error = raised
    assert error is not None
    assert time.monotonic() - begun < STUCK_S / 3
    assert owner.save is None
    assert handle.closed
    assert writers_of(os.getpid()) == []


@pytest.mark.quick
def test_a_handle_says_after_a_signal_that_the_loop_is_to_be_left(tmp_path):
    """From then on at each look; its handler is gone with the handle, which says then that it has ended."""
    before = signal.getsignal(signal.SIGTERM)
    owner, saver = SimpleNamespace(save=None), Saver(dataclasses.replace(CONFIG, save_on_signals=("SIGTERM",)))
    handle = AttachedHandle(owner, saver)
    handle._attach({"save": print})
    assert not handle.stop_requested
    signal.raise_signal(signal.SIGTERM)
    assert [handle.stop_requested for _ in range(2)] == [True, True]
    handle.remove()
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ClosedError, match="stop_requested"):
        handle.stop_requested  # noqa: B018 (it raises)


def _trains_until_a_signal(rank, folder):
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    accelerator = make(folder)
    with register(accelerator, dataclasses.replace(ACCELERATE, save_on_signals=("SIGUSR1",))) as handle:
        for step in range(1, 100_000):
            if rank == 1 and step == 3:
                signal.raise_signal(signal.SIGUSR1)
            if handle.stop_requested:
                accelerator.save_state(step=step)
                break
    return step, checkpoints(folder)


def test_a_signal_on_one_rank_of_an_accelerator_is_seen_by_all_at_one_step(tmp_path):
    """The loops of both ranks are left at the same step, behind a save that is committed."""
    (step, kept), other = values(spawn_ranks(_trains_until_a_signal, 2, tmp_path, init=False))
    assert (step, kept) == other
    assert 3 <= step < 99_999
    assert kept == ["checkpoint_0"]
