"""A thread of this process that writes small snapshots: to start a process would take longer than the writing.

It is watched like the process. It cannot be killed. If it does not return from the kernel, it is abandoned, and a process
writes the same snapshot again. When it returns, it may finish the call that it was in. So it makes no call that could harm
another file: it creates new files, and neither removes nor replaces any. If a file is in its way, or the disk fails, it leaves
the job to the process.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from collections.abc import Callable

from safe_ckpt.config import Timeouts
from safe_ckpt.core.staging.worker_thread import Background
from safe_ckpt.core.storage.direct_io import Unwatched, WriteOptions
from safe_ckpt.core.storage.durable import WrittenFile
from safe_ckpt.core.writer.client import StallWatch, WriterEnded
from safe_ckpt.core.writer.sink import WriteJob, write_job

_POLL_S = 0.1
# Once more, in a new file, or with other memory: for a process.
_AGAIN = (errno.EIO, errno.EEXIST, errno.ENOMEM)


class WriterThread:
    """Writes one job after the other. Used by one thread at a time."""

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
            self._watch(task, job.name, timeouts, stop)
        finally:
            self._task, self._moves = None, self._moves + task.beats + 1
            if not task.over.is_set():
                self._leave(task)
        failure = task.failure
        if isinstance(failure, MemoryError) or (isinstance(failure, OSError) and failure.errno in _AGAIN):
            raise WriterEnded(f"met an error: {failure}", os.getpid()) from failure
        if failure is not None:
            raise failure
        return task.results

    def _watch(self, task: _Task, name: str, timeouts: Timeouts, stop: Callable[[], None]) -> None:
        watch = StallWatch(task.beats)
        while True:
            asked = time.monotonic()
            if task.over.wait(_POLL_S):
                return
            limit_s = timeouts.fsync_stall_s if task.phase in ("fsync", "upload") else timeouts.writer_stall_s
            if watch.stalled_s(task.beats, asked) > limit_s:
                how = f"made no progress for {limit_s:g} s in phase {task.phase} of {name}"
                raise WriterEnded(how, os.getpid(), stalled=True)
            stop()

    def progress(self) -> int:
        """A number that changes as long as bytes move."""
        task = self._task
        return self._moves + (task.beats if task is not None else 0)

    def close(self) -> None:
        """End the thread, when it has done what it does. One that idles is over by then."""
        self._background.end()
        if not self._background.is_current:  # a collector may call this from anywhere
            self._background.join(_POLL_S)

    def _leave(self, task: _Task) -> None:
        task.abandoned = True
        self._background.end()
        self._background = Background("safe_ckpt-write", _Task.work)


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
