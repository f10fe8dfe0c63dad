"""The workers that write, as seen by who waits for them: a process, and a thread for small saves. One loop watches both."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from safe_ckpt.config import Timeouts
from safe_ckpt.core.staging.progress import STACK_SIGNAL, Progress, ProgressPage, new_page
from safe_ckpt.core.staging.worker_thread import Background
from safe_ckpt.core.storage.direct_io import Unwatched, WriteOptions, write_without_direct
from safe_ckpt.core.storage.durable import WrittenFile
from safe_ckpt.core.writer.sink import WriteJob, write_job
from safe_ckpt.machine import process_state

logger = logging.getLogger(__name__)
_HOME = Path(__file__).parents[3]  # where this package lies
_SHELL = "/bin/sh"
_POLL_S = 0.1
_REAP_S = 5.0
_ABSENT_S = 1.0
_STOPPED = ("T", "t")
_STOPPED_S = 3.0
_WAITING = ("D", "R")  # for the disk, or for a processor
# Once more, in a new file, or with other memory: for a process.
_AGAIN = (errno.EIO, errno.EEXIST, errno.ENOMEM)
_BOOT = (
    "import sys; sys.path += {path!r}; "
    "from safe_ckpt.core.writer.process import main; main({sock}, {page}, {nice}, {parent}, {ahead!r})"
)


class WriterEnded(Exception):
    """The process is of no use any more, and is to be replaced: it ended, never came up, or ``stalled`` at its work."""

    def __init__(self, how: str, pid: int, *, stalled: bool = False) -> None:
        super().__init__(how)
        self.pid = pid
        self.stalled = stalled


class _Look(NamedTuple):
    """One look at a worker.

    Attributes:
        beats: a number that changes as long as it makes progress.
        phase: what it is doing.
        state: what the kernel says of its process; "" for a thread.
    """

    beats: int
    phase: str
    state: str = ""


def _watch(
    pid: int,
    is_done: Callable[[float], bool],
    look: Callable[[], _Look],
    where: Callable[[_Look], str],
    timeouts: Timeouts,
    stop: Callable[[], None],
) -> None:
    """Wait for a worker as long as it makes progress. Time in which this process itself stood still does not count.

    Args:
        pid: of the process that works.
        is_done: waits so many seconds; returns whether it is over. Raises ``WriterEnded`` if the worker is.
        look: shows the worker.
        where: says where one is that makes no progress.
        timeouts: how long that may be.
        stop: called ten times a second; raises to give up.

    Raises:
        WriterEnded: it makes no progress for too long.
    """
    beats, since = look().beats, time.monotonic()
    while True:
        asked = time.monotonic()
        if is_done(_POLL_S):
            return
        now, looked = look(), time.monotonic()
        if now.beats != beats:
            beats, since = now.beats, looked
        elif looked - asked > _ABSENT_S:  # this process was stopped or very busy, and the worker perhaps with it
            since += looked - asked
        limit_s = _stall_limit_s(timeouts, now.phase, now.state)
        if looked - since > limit_s:
            how = f"made no progress for {limit_s:g} s {where(now)}"
            raise WriterEnded(how, pid, stalled=now.beats > 0 or now.state in _STOPPED)
        stop()


def _stall_limit_s(timeouts: Timeouts, phase: str, state: str) -> float:
    """Return how long the process may move no byte, by what the kernel says of it."""
    if state in _STOPPED:  # a moment of it, for a debugger or a freezer, harms nothing
        return min(_STOPPED_S, timeouts.writer_stall_s)
    if phase in ("fsync", "upload"):
        return timeouts.fsync_stall_s
    return max(timeouts.fsync_stall_s, timeouts.writer_stall_s) if state in _WAITING else timeouts.writer_stall_s


def _program() -> list[str]:
    """The interpreter, so that an ``exec`` of it that hangs holds up the calling thread alone.

    Raises:
        OSError: it is not there.
    """
    if sys.version_info >= (3, 11):
        return [sys.executable]
    os.stat(sys.executable)
    # Python 3.10 keeps the GIL until ``exec`` returns (vfork). That of a shell on a local disk does.
    return [_SHELL, "-c", 'exec "$0" "$@"', sys.executable]


def _await_exec(process: subprocess.Popen[bytes]) -> None:
    """Wait until it is no shell any more."""
    while process.poll() is None:
        try:
            if not Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(f"{_SHELL}\0".encode()):
                return
        except OSError:  # it ended
            return
        time.sleep(0.002)


class WriterClient:
    """One running writer process.

    Args:
        niceness: of it.
        ahead: modules that it imports before its first job.
    """

    def __init__(self, niceness: int, ahead: Sequence[str] = ()) -> None:
        if not sys.executable:
            raise OSError("cannot start the writer process: sys.executable is not set in this interpreter")
        ours, theirs = socket.socketpair()
        page_fd = new_page()
        self._log = os.memfd_create("safe_ckpt-log", os.MFD_CLOEXEC)
        used = [xxhash, *(sys.modules[name] for name in ("isal", "obstore", "numpy") if name in sys.modules)]
        homes = [_HOME, *(Path(module.__file__).parent.parent for module in used if module.__file__)]
        roots = list(dict.fromkeys(map(str, homes)))
        ends = {"sock": theirs.fileno(), "page": page_fd, "parent": os.getpid()}
        boot = _BOOT.format(path=roots, nice=niceness, ahead=list(ahead), **ends)
        with theirs:
            try:
                # Not multiprocessing: its spawn re-imports the user's main and fails where that came from stdin.
                self._process = subprocess.Popen(
                    # -I: nothing in the working directory or the environment stands in for the standard library.
                    [*_program(), "-I", "-S", "-c", boot],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._log,
                    pass_fds=(theirs.fileno(), page_fd),
                )
                _await_exec(self._process)
            except OSError:
                ours.close()
                os.close(page_fd)
                os.close(self._log)
                raise
        self._socket = ours
        self._socket.settimeout(0)
        self._readable = select.poll()  # ``select.select`` takes no descriptor above 1023
        self._readable.register(self._socket, select.POLLIN)
        self._page = ProgressPage(page_fd)
        os.close(page_fd)
        self._owner = os.getpid()
        self._buffers: set[int] = set()
        self._buffer = b""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def beats(self) -> int:
        """A number that changes as long as it makes progress."""
        return self._page.read().beats

    def run(self, job: WriteJob, plan: bytes, timeouts: Timeouts, stop: Callable[[], None]) -> list[WrittenFile]:
        """Let it write a job, described by ``plan``.

        Raises:
            WriterEnded: it ended, or made no progress for too long.
            OSError: the file system refused.
        """
        self._send(job, plan)

        def is_done(seconds: float) -> bool:
            if self._readable.poll(seconds * 1000) and self._receive(job):
                return True
            if self._process.poll() is not None:
                raise self._ended(self._how_it_ended(job))
            return False

        def look() -> _Look:
            now = self._page.read()
            return _Look(now.beats, now.phase, process_state(self._process.pid))

        def where(now: _Look) -> str:
            why = " (it is stopped)"
            if now.state not in _STOPPED:
                # A stopped process, or one deep in the kernel, will not answer; then there is nothing to show.
                self._process.send_signal(STACK_SIGNAL)
                time.sleep(0.2)
                why = self._said()
            return f"{_where(self._page.read(), job)}{why}"

        _watch(self._process.pid, is_done, look, where, timeouts, stop)
        line, self._buffer = self._buffer, b""
        return _results(json.loads(line), job)

    def kill(self) -> None:
        """End the process now. One that the kernel does not let go of is left behind, without its socket."""
        self._socket.close()
        if os.getpid() != self._owner:
            return  # a process that was forked has a copy of this, and the writer is its parent's
        self._process.kill()
        try:
            self._process.wait(timeout=_REAP_S)
        except subprocess.TimeoutExpired:
            logger.warning("writer process %d cannot be killed: it waits for the disk", self._process.pid)
        os.close(self._log)

    def _send(self, job: WriteJob, plan: bytes) -> None:
        buffer = job.buffer
        place = {"buffer": buffer.id, "buffer_bytes": buffer.size} if buffer is not None else {}
        line = json.dumps(place).encode() + b"\n"
        fds = [] if buffer is None or buffer.id in self._buffers else [buffer.fileno()]
        # The plan may be long, and a socket takes only so much before it blocks: it goes as a file in memory.
        plan_fd = os.memfd_create("safe_ckpt-plan", os.MFD_CLOEXEC)
        try:
            with open(plan_fd, "wb", closefd=False) as file:
                file.write(plan)
            socket.send_fds(self._socket, [line], [plan_fd, *fds])
        except BlockingIOError as error:
            raise self._ended("does not take jobs") from error
        except OSError as error:
            raise self._ended(self._how_it_ended(job)) from error
        finally:
            os.close(plan_fd)
        if buffer is not None:
            self._buffers.add(buffer.id)

    def _receive(self, job: WriteJob) -> bool:
        """Take what has come of the reply. Returns whether that is all of it."""
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            raise self._ended(self._how_it_ended(job))
        self._buffer += data
        return self._buffer.endswith(b"\n")

    def _ended(self, how: str) -> WriterEnded:
        return WriterEnded(how, self._process.pid)

    def _how_it_ended(self, job: WriteJob) -> str:
        where = _where(self._page.read(), job)
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return f"closed its connection {where}"
        if code >= 0:
            return f"exited with status {code} {where}{self._said()}"
        hint = " (the kernel's out-of-memory killer sends this)" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint} {where}{self._said()}"

    def _said(self) -> str:
        size = os.fstat(self._log).st_size
        text = os.pread(self._log, 4096, max(0, size - 4096)).decode(errors="replace").strip()
        return f"; it said:\n{text}" if text else ""


def _results(reply: dict[str, Any], job: WriteJob) -> list[WrittenFile]:
    if "error" in reply:
        error = reply["error"]
        raise OSError(error["errno"], error["message"], error["path"])
    for device, path in reply["refused_direct"]:
        write_without_direct(device, path)
    results = [WrittenFile(**file) for file in reply["files"]]
    if [result.path for result in results] != job.paths:
        raise OSError(None, "the writer reports other files than it was given")
    return results


def _where(standing: Progress, job: WriteJob) -> str:
    if standing.phase == "idle":
        return "while idle"
    paths = job.paths
    file = paths[standing.file_index] if standing.file_index < len(paths) else "its last job"
    return f"in phase {standing.phase} of {file}, after {standing.moved_bytes} bytes"


class WriterThread:
    """A thread of this process that writes small snapshots: to start a process would take longer than the writing.

    It is watched like the process. It cannot be killed. If it does not return from the kernel, it is abandoned, and a process
    writes the same snapshot again. When it returns, it may finish the call that it was in. So it makes no call that could harm
    another file: it creates new files, and neither removes nor replaces any. If a file is in its way, or the disk fails, it
    leaves the job to the process. Used by one thread at a time.
    """

    def __init__(self) -> None:
        self._background = Background("safe_ckpt-write", _Task.work)
        self._task: _Task | None = None  # the one that is written now
        self._moves = 0  # of those before it

    def run(
        self, job: WriteJob, options: WriteOptions, timeouts: Timeouts, stop: Callable[[], None]
    ) -> list[WrittenFile]:
        """Let it write a job without copies of files.

        Args:
            job: what to write.
            options: how.
            timeouts: how long it may make no progress.
            stop: called ten times a second; raises to give up.

        Raises:
            WriterEnded: it made no progress for too long, or met what is to be tried once more.
            OSError: the file system refused.
            Refused: the system gives no more threads.
        """
        task = _Task(job, dataclasses.replace(options, replace=False, direct=False))

        self._background.put(task)
        self._task = task
        try:
            _watch(
                os.getpid(),
                task.over.wait,
                lambda: _Look(task.beats, task.phase),
                lambda now: f"in phase {now.phase} of {job.name}",
                timeouts,
                stop,
            )
        finally:
            self._task, self._moves = None, self._moves + task.beats + 1
            if not task.over.is_set():
                task.abandoned = True
                self._background.end()
                self._background = Background("safe_ckpt-write", _Task.work)
        failure = task.failure
        if isinstance(failure, MemoryError) or (isinstance(failure, OSError) and failure.errno in _AGAIN):
            raise WriterEnded(f"met an error: {failure}", os.getpid()) from failure
        if failure is not None:
            raise failure
        return task.results

    def progress(self) -> int:
        """A number that changes as long as bytes move."""
        task = self._task
        return self._moves + (task.beats if task is not None else 0)

    def close(self) -> None:
        """End the thread, when it has done what it does. One that idles is over by then."""
        self._background.end()
        if not self._background.is_current:  # a collector may call this from anywhere
            self._background.join(_POLL_S)


class _Abandoned(Exception):
    """The job was given up, and its memory may be used by another save."""


class _Task(Unwatched):
    """One job on its way, and how far it is."""

    def __init__(self, job: WriteJob, options: WriteOptions) -> None:
        self._job = job
        self._options = options
        self.over = threading.Event()
        self.results: list[WrittenFile] = []
        self.failure: BaseException | None = None
        self.abandoned = False
        self.phase = "write"
        self.beats = 0

    def work(self) -> None:
        """On the thread."""
        job = self._job
        try:
            memory = memoryview(job.buffer.memory) if job.buffer is not None else None
            self.results = write_job(job, self._options, self, memory)
        except BaseException as error:  # raised in the thread that waits
            self.failure = error
        finally:
            self.over.set()

    def moved(self, count: int) -> None:
        """So many bytes were hashed or written."""
        del count
        self.beats += 1
        self.waiting()

    def entered(self, phase: str) -> None:
        """A phase began."""
        self.phase = phase
        self.moved(0)

    def waiting(self) -> None:
        """There is nothing to write yet."""
        if self.abandoned:
            raise _Abandoned
