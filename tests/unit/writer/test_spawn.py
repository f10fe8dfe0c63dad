"""Starting the writer process, where that is slow or where descriptors are few or many."""

import errno
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import torch

from kit.patience import scaled
from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts, WriterConfig
from safe_ckpt import machine as processes
from safe_ckpt.core.writer import supervisor as supervisors
from safe_ckpt.core.writer.sink import WriteJob
from safe_ckpt.core.writer.supervisor import WriterSupervisor
from safe_ckpt.core.writer.workers import WriterClient, WriterEnded
from safe_ckpt.errors import WriterError
from support import program_path


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_an_interpreter_whose_exec_hangs_holds_nothing_up(tmp_path):
    """As on a network file system that does not answer: the saves are written by the job itself, and it ends."""
    link = tmp_path / "python"
    link.symlink_to(os.path.realpath(sys.executable))
    log = tmp_path / "log"
    words = ["strace", "-f", "-qq", "-o", "/dev/null", "-P", str(link), "-e", "trace=execve"]
    words += ["-e", "inject=execve:delay_enter=60000000"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with log.open("w") as stream:
        # strace itself waits for the process that hangs.
        job = subprocess.Popen(
            [*words, sys.executable, program_path("saves_by_a_hanging_interpreter"), tmp_path / "run", link],
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            assert job.stdout.readline() == "done\n", log.read_text()
        finally:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait(20)
            job.stdout.close()
    assert "did not start within 2 s: writing in this process" in log.read_text()


def test_a_writer_whose_answer_cannot_be_sent_ends(tmp_path):
    """Its parent sees that at once and starts another one; one that went on would be waited for until it counts as stalled."""
    supervisor = WriterSupervisor(WriterConfig(), Timeouts(), lambda *_: None)
    writer = WriterClient(0)
    try:
        job = WriteJob(name="n", rank=0, folder=str(tmp_path))
        writer._socket.shutdown(socket.SHUT_RD)
        writer._send(job, supervisor._plan(job))
        assert writer._process.wait(scaled(20)) == 0
    finally:
        writer.kill()


def test_an_interpreter_that_never_comes_up_costs_no_save(tmp_path, monkeypatch):
    """Its own modules may lie where nothing answers; those of the job are in memory, and the job writes by itself."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    settings = CheckpointConfig(
        timeouts=Timeouts(writer_stall_s=1), writer=WriterConfig(inline_bytes=0, max_respawns=1)
    )
    with Checkpointer(tmp_path / "run", settings) as ckpt:
        ckpt.save(1, {"w": {"t": torch.ones(1000)}}).result(timeout_s=20)
        assert ckpt.resume({"w": {"t": torch.zeros(1000)}}).step == 1


def test_a_job_with_a_thousand_open_files_saves_as_any_other(tmp_path):
    """A job with many open files saves as any other."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("this shell allows no more files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        with Checkpointer(tmp_path, CheckpointConfig(writer=WriterConfig(inline_bytes=0))) as ckpt:
            ckpt.save(1, {"w": {"t": torch.ones(1000)}}).result(timeout_s=20)
            assert ckpt.resume({"w": {"t": torch.zeros(1000)}}).step == 1
    finally:
        for fd in files:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EIO])
def test_a_process_that_cannot_be_looked_at_is_not_dead(monkeypatch, number):
    """Without descriptors, say, its state is not known; only one that is not there is gone."""
    assert processes.process_state(os.getpid()) == "R"
    assert processes.process_state(2**22 + 1) == ""

    def read(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(processes.Path, "read_text", read)
    assert processes.process_state(os.getpid()) == "?"


class Fails:
    """A writer process that dies at its work, or stalls: so many of them."""

    def __init__(self, times, *, stalls):
        self.left, self.stalls, self.made, self.killed = times, stalls, 0, 0

    def __call__(self, *_):
        self.made += 1
        return self

    @property
    def pid(self):
        return self.made

    def beats(self):
        return 0

    def run(self, *_):
        self.left -= 1
        if self.left >= 0:
            raise WriterEnded("ended", self.pid, stalled=self.stalls)
        return ["written by a process"]

    def kill(self):
        self.killed += 1


@pytest.mark.parametrize("stalls", [False, True], ids=["dies", "stalls"])
@pytest.mark.parametrize(("most", "times"), [(most, times) for most in (0, 1, 3) for times in range(most + 2)])
def test_a_save_replaces_its_writer_process_as_often_as_is_set(tmp_path, monkeypatch, most, times, stalls):
    """``max_respawns`` times: what the last of them writes is saved. Behind it this process writes, or would stall too."""
    clients, told = Fails(times, stalls=stalls), []
    monkeypatch.setattr(supervisors, "WriterClient", clients)
    settings = WriterConfig(inline_bytes=0, max_respawns=most)
    writer = WriterSupervisor(settings, Timeouts(), lambda pid, _: told.append(pid))
    monkeypatch.setattr(writer, "_is_small", lambda _: False)
    job = WriteJob(name="n", rank=0, folder=str(tmp_path))
    if times > most and stalls:
        with pytest.raises(WriterError):
            writer.write(job, lambda: None)
        assert told == list(range(1, most + 1))
    else:
        assert writer.write(job, lambda: None) == ([] if times > most else ["written by a process"])
        assert told == list(range(1, times + 1))
    assert clients.made == min(times, most) + 1
    assert clients.killed == times
    writer.close()
