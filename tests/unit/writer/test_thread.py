"""Small snapshots: no process is started for them, and nothing of what a process promises is lost."""

import errno
import gc
import os
import threading
import weakref

import pytest
import torch

from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts, WriterConfig
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.core.home import file_home
from safe_ckpt.core.staging.worker_thread import Refused
from safe_ckpt.core.storage.direct_io import WriteOptions
from safe_ckpt.core.writer import sink
from safe_ckpt.core.writer.sink import WriteJob
from safe_ckpt.core.writer.workers import WriterThread
from safe_ckpt.errors import SaveError
from support import writers_of

TIMES = Timeouts(fsync_stall_s=0.5, lengthy_s=60, barrier_s=20, shutdown_s=20)


class HungDisk:
    """fsync on the thread that writes comes back when it is told to."""

    def __init__(self, monkeypatch):
        self.back = threading.Event()
        self.hung: list[threading.Thread] = []
        real = os.fsync

        def fsync(fd):
            if threading.current_thread().name == "safe_ckpt-write" and not self.hung:
                self.hung.append(threading.current_thread())
                self.back.wait(60)
            real(fd)

        monkeypatch.setattr(sink.os, "fsync", fsync)


def test_a_process_is_started_only_for_what_is_large(tmp_path):
    """Small saves are committed without one, from a resume that finds nothing on; the first large one starts it."""
    events = []
    with Checkpointer(tmp_path, hooks=[events.append]) as ckpt:
        ckpt.resume({"w": {"t": torch.zeros(1000)}})
        for step in (1, 2):
            ckpt.save(step, {"w": {"t": torch.ones(1000) * step}}).result(timeout_s=20)
        assert writers_of(os.getpid()) == []
        ckpt.save(3, {"w": {"t": torch.ones(1_000_000)}}).result(timeout_s=20)
        assert len(writers_of(os.getpid())) == 1
        state = {"w": {"t": torch.zeros(1000)}}
        assert ckpt.resume(state, step=2).step == 2
        assert torch.equal(state["w"]["t"], torch.ones(1000) * 2)
    assert [event.kind for event in events].count("committed") == 3
    with Checkpointer(tmp_path, CheckpointConfig(writer=WriterConfig(inline_bytes=0))) as ckpt:
        ckpt.save(4, {"w": {"t": torch.ones(10)}}).result(timeout_s=20)
        assert len(writers_of(os.getpid())) == 1


def test_a_disk_that_hangs_does_not_hold_the_save(tmp_path, monkeypatch):
    """An fsync that does not end within its limit: a process writes the same snapshot, the save is committed, and the thread,
    when it comes back, changes nothing that is written by then.
    """
    disk, events = HungDisk(monkeypatch), []
    with Checkpointer(tmp_path, CheckpointConfig(timeouts=TIMES), hooks=[events.append]) as ckpt:
        assert ckpt.save(1, {"w": {"t": torch.ones(1000)}}).result(timeout_s=20).step == 1
        (respawned,) = [event for event in events if event.kind == "respawned"]
        assert "made no progress for 0.5 s in phase fsync of step-00000001" in respawned.ended
        assert disk.hung[0].is_alive()
        ckpt.save(2, {"w": {"t": torch.full((1000,), 2.0)}}).result(timeout_s=20)
        disk.back.set()
        disk.hung[0].join(20)
        assert not disk.hung[0].is_alive()
        ckpt.save(3, {"w": {"t": torch.full((1000,), 3.0)}}).result(timeout_s=20)
        for step in (1, 2, 3):
            state = {"w": {"t": torch.zeros(1000)}}
            assert ckpt.resume(state, step=step).step == step
            assert state["w"]["t"][0] == step


def test_the_end_does_not_wait_for_a_disk_that_hangs(tmp_path, monkeypatch):
    """close() gives the save up after shutdown_s, and says so."""
    disk = HungDisk(monkeypatch)
    times = Timeouts(shutdown_s=0.5)
    try:
        with (
            pytest.raises(SaveError, match="shut down"),
            Checkpointer(tmp_path, CheckpointConfig(timeouts=times)) as ckpt,
        ):
            handle = ckpt.save(1, {"w": {"t": torch.ones(1000)}})
        assert handle.done()
    finally:
        disk.back.set()
        disk.hung[0].join(20)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("step")] == []


@pytest.mark.parametrize("call", ["open", "unlink", "fsync"])
def test_a_thread_that_comes_back_late_harms_no_file(tmp_path, monkeypatch, call):
    """Whatever call it hung in, and though it comes back right before the commit, what the process wrote is committed."""
    hung, back, real = [], threading.Event(), getattr(os, call)

    def hang(*args, **kwargs):
        if threading.current_thread().name == "safe_ckpt-write" and not hung:
            hung.append(threading.current_thread())
            back.wait(60)
        return real(*args, **kwargs)

    check = file_home.FilePublication._check_written

    def come_back(self, entries, look_around):
        back.set()
        for thread in hung:
            thread.join(20)
        check(self, entries, look_around)

    monkeypatch.setattr(sink.os, call, hang)
    monkeypatch.setattr(file_home.FilePublication, "_check_written", come_back)
    # The process that writes instead is to be there in less: its imports move no byte.
    times = Timeouts(fsync_stall_s=0.5, writer_stall_s=3.0, lengthy_s=60, barrier_s=20)
    with Checkpointer(tmp_path, CheckpointConfig(timeouts=times)) as ckpt:
        info = ckpt.save(1, {"w": {"t": torch.ones(1000)}}).result(timeout_s=30)
        assert bool(hung) == (call != "unlink"), "it is to remove nothing"
        verify_files(info.path, read_manifest(info.path))


def test_an_io_error_of_the_threads_fsync_makes_a_process_write_anew(tmp_path, monkeypatch):
    """EIO of an fsync of the thread: a process writes all of it once more, to other files."""
    real, failed = os.fsync, []

    def fsync(fd):
        if threading.current_thread().name == "safe_ckpt-write" and not failed:
            failed.append(fd)
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(sink.os, "fsync", fsync)
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.save(1, {"w": {"t": torch.ones(1000)}}).result(timeout_s=20).step == 1
        assert failed
        assert ckpt.save(2, {"w": {"t": torch.ones(1000)}}).result(timeout_s=20).step == 2


def test_a_job_that_gets_no_thread_is_not_kept(monkeypatch):
    """Where the system gives no thread, nothing of the job stays: not its memory, not its manifest."""
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    writer = WriterThread()
    job = WriteJob(name="n", rank=0, folder="/nowhere")
    kept = weakref.ref(job)
    with pytest.raises(Refused):
        writer.run(job, WriteOptions.of(WriterConfig()), Timeouts(), lambda: None)
    del job
    gc.collect()
    assert kept() is None


def no_thread(_):
    raise RuntimeError("can't start new thread")
