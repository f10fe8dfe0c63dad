"""A directory as mirror whose disk is full or gives no answer: saves go on, and what was missed goes there later."""

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import time

import pytest
import torch

from kit.faults import small_disk
from kit.limits import QUICK
from kit.patience import scaled, wait_until
from safe_ckpt import CheckpointConfig, Checkpointer, Mirror, Retention, events
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files

TIMES = dataclasses.replace(QUICK, barrier_s=4, shutdown_s=2)


def config(far, **more):
    return CheckpointConfig(timeouts=TIMES, mirror=Mirror(url=str(far), **more), retention=Retention(keep_last=2))


def state(value):
    return {"model": {"w": torch.full((1 << 16,), float(value))}, "step": value}


def steps(folder):
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


def tried(seen, step):
    """What became of the copy of a step: its last event of that kind, or None."""
    found = [one for one in seen if isinstance(one, events.Mirrored) and one.path.endswith(f"{step:08d}")]
    return found[-1] if found else None


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount")
@pytest.mark.timeout(120)
def test_a_mirror_that_is_full_fails_no_save(tmp_path):
    """The event says how much is needed and free. Nothing there is deleted for it; with room, the newest goes there."""
    seen = []
    with small_disk(tmp_path / "disk", "1m") as disk:
        far = disk / "run"
        with Checkpointer(tmp_path / "near", config(far, keep_last=1), hooks=[seen.append]) as ckpt:
            ckpt.save(1, state(1)).result()
            wait_until(lambda: tried(seen, 1), 30)
            (disk / "other").write_bytes(bytes(600 << 10))
            for step in (2, 3):
                ckpt.save(step, state(step)).result()
            wait_until(lambda: tried(seen, 3), 30)
            assert "free" in tried(seen, 3).error
            assert (steps(far), steps(tmp_path / "near")) == ([1], [2, 3])
            (disk / "other").unlink()
            ckpt.save(4, state(4)).result()
            wait_until(lambda: tried(seen, 4), 30)
        assert tried(seen, 4).error == ""
        assert steps(far) == [4]
        verify_files(far / "step-00000004", read_manifest(far / "step-00000004"))


@contextlib.contextmanager
def bindfs(behind, path):
    """A file system that can be stopped: then every call into it waits."""
    if shutil.which("bindfs") is None or os.getuid() != 0:
        pytest.skip("no bindfs here")
    behind.mkdir()
    path.mkdir()
    server = subprocess.Popen(["bindfs", "-f", "-o", "attr_timeout=0,entry_timeout=0", behind, path])
    try:
        wait_until(lambda: os.path.ismount(path) or server.poll() is not None, 30)
        if server.poll() is not None:
            pytest.skip("no bindfs mount here")
        yield server
    finally:
        server.send_signal(signal.SIGCONT)
        subprocess.run(["umount", "-l", path], check=True)
        server.wait(30)


@pytest.mark.timeout(180)
def test_a_mirror_that_gives_no_answer_holds_up_nothing(tmp_path, caplog):
    """A server that stops: saves here are committed, the end comes in time; a start with nothing here is an error, in time,
    and one with a checkpoint here goes on from that.

    Back again, the next job puts the newest there.
    """
    near = tmp_path / "near"
    with bindfs(tmp_path / "behind", tmp_path / "disk") as server:
        far, seen = tmp_path / "disk" / "run", []
        with Checkpointer(near, config(far), hooks=[seen.append]) as ckpt:
            ckpt.save(1, state(1)).result()
            wait_until(lambda: tried(seen, 1), 30)
            server.send_signal(signal.SIGSTOP)
            for step in (2, 3, 4):
                begun = time.monotonic()
                ckpt.save(step, state(step)).result()
                assert time.monotonic() - begun < scaled(3)
            begun = time.monotonic()
        assert time.monotonic() - begun < scaled(4 * TIMES.shutdown_s)
        assert steps(near)[-2:] == [3, 4]  # and 2, which was on its way
        begun = time.monotonic()
        with pytest.raises(OSError, match="no answer"), Checkpointer(tmp_path / "empty", config(far)) as ckpt:
            ckpt.resume(state(0))
        assert time.monotonic() - begun < scaled(3 * TIMES.barrier_s)
        with Checkpointer(near, config(far)) as ckpt:
            assert ckpt.resume(state(0)).step == 4
        assert "the mirror is not looked at" in caplog.text
        server.send_signal(signal.SIGCONT)
        with Checkpointer(near, config(far)) as ckpt:
            ckpt.resume(state(0))
            ckpt.save(5, state(5)).result()
        assert steps(tmp_path / "behind" / "run")[-1] == 5
