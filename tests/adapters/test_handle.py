"""The handle that adapters put on a framework's object."""

import os
import signal
import time
from types import SimpleNamespace

import torch

from safe_ckpt import CheckpointConfig, Timeouts, WriterConfig
from safe_ckpt.adapters import AttachedHandle, Planned, Saver, torch_file
from safe_ckpt.errors import SafeCheckpointError
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
