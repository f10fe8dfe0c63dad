"""The parent's side of the writer process: start it, hand it jobs, watch it, replace it.

Nothing here can block for longer than its deadline: the job lies in shared memory, only a short line crosses a non-blocking
socket, and progress is read from a shared page. A writer that dies or makes no progress is killed and replaced, and the same
snapshot is written again to new files. After ``max_respawns`` deaths, or processes that never came up, the parent writes by
itself. After as many stalls the save fails, because the parent would stall too. A thread writes a small job, which takes less
time than to start the process.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future

from safe_ckpt.config import Timeouts, WriterConfig
from safe_ckpt.core.formats.file_plan import FilePlan
from safe_ckpt.core.staging.worker_thread import Refused
from safe_ckpt.core.storage.direct_io import PAGE, Unwatched, WriteOptions
from safe_ckpt.core.storage.durable import WrittenFile
from safe_ckpt.core.storage.objects.options import StorageOptions, variables
from safe_ckpt.core.writer.content import TensorContent
from safe_ckpt.core.writer.inline import saves_inline
from safe_ckpt.core.writer.sink import WriteJob, write_job
from safe_ckpt.core.writer.workers import WriterClient, WriterEnded, WriterThread
from safe_ckpt.errors import WriterError

logger = logging.getLogger(__name__)
_STREAM_BYTES = 64 << 20
_MOMENT_S = 1.0
_LOOK_S = 0.1


def _spawned(niceness: int, ahead: Sequence[str]) -> Future[WriterClient]:
    """Start the process on a thread of its own: ``exec`` may hang for good, and nothing can be done about that.

    The interpreter may lie on a network file system that does not answer. The thread that waits then is neither the one that
    trains nor the one that saves.
    """
    spawn: Future[WriterClient] = Future()

    def run() -> None:
        try:
            spawn.set_result(WriterClient(niceness, ahead))
        except BaseException as error:  # the one that waits says so
            spawn.set_exception(error)
            if not isinstance(error, Exception):
                raise

    try:
        threading.Thread(target=run, name="safe_ckpt-spawn", daemon=True).start()
    except RuntimeError:  # no more threads, or Python 3.12 shuts down
        run()
    return spawn


def _end(spawn: Future[WriterClient]) -> None:
    if spawn.exception() is None:
        spawn.result().kill()


class WriterSupervisor:
    """Writes snapshots through a child process. Used by one thread at a time.

    Args:
        config: how to write and how often to replace the process.
        timeouts: how long it may make no progress.
        respawned: called with pid and reason when the process was replaced.
        storage: how object stores are reached; None where no file goes to one.
        ahead: modules that the process imports before its first job.
    """

    def __init__(
        self,
        config: WriterConfig,
        timeouts: Timeouts,
        respawned: Callable[[int, str], None],
        storage: StorageOptions | None = None,
        ahead: Sequence[str] = (),
    ) -> None:
        self._config = config
        self._ahead = ahead
        self._timeouts = timeouts
        self._respawned = respawned
        self._child: WriterClient | None = None
        self._spawn: Future[WriterClient] | None = None
        self._late = False
        self._thread = WriterThread()
        self._starting = (
            threading.RLock()
        )  # it may be started ahead of a save, on another thread; never held while waiting
        self._closed = False
        self._inline = saves_inline()
        self.moves = 0  # of writing in this process
        self._options = WriteOptions.of(config, storage)

    def start(self) -> None:
        """Start the process ahead of the first job. Waits a moment for it, and not for one that hangs."""
        with self._starting:
            if self._child is not None or self._closed or self._inline:
                return
            first = self._spawn is None
            spawn = self._spawn = self._spawn or _spawned(self._config.niceness, self._ahead)
        if first:
            futures.wait([spawn], timeout=_MOMENT_S)
        self._take(spawn)

    def _started(self, stop: Callable[[], None]) -> WriterClient | None:
        """The process; None if it cannot be started, or does not come up in time: then this process writes by itself."""
        self.start()
        spawn = self._spawn
        if spawn is not None and not self._late:
            limit_s = self._timeouts.writer_stall_s
            deadline = time.monotonic() + limit_s
            while not futures.wait([spawn], timeout=_LOOK_S).done and time.monotonic() < deadline:
                stop()
            self._late = not spawn.done()  # each further job only looks whether it is there by now
            if self._late:
                logger.warning("the writer process did not start within %g s: writing in this process", limit_s)
            self._take(spawn)
        return self._child

    def _take(self, spawn: Future[WriterClient]) -> None:
        with self._starting:
            if not spawn.done() or self._spawn is not spawn:  # or another thread was faster, or this is closed
                return
            error = spawn.exception()
            self._spawn, self._child, self._late = None, None if error is not None else spawn.result(), False
            if error is not None:
                logger.warning("the writer process cannot be started (%s): writing in this process", error)

    @property
    def pid(self) -> int | None:
        """The process's pid, None when it is not running."""
        return self._child.pid if self._child is not None else None

    def progress(self) -> int:
        """A number that changes as long as bytes move."""
        child = self._child
        return self.moves + self._thread.progress() + (child.beats() if child is not None else 0)

    def write(self, job: WriteJob, stop: Callable[[], None]) -> list[WrittenFile]:
        """Write all files of ``job`` and make them durable.

        Args:
            job: what to write; its shared buffer may still be being filled. Results come in the order of ``job.paths``.
            stop: called ten times a second; raises to give up.

        Raises:
            OSError: the file system refused.
            WriterError: the process made no progress, and neither did those that replaced it.
        """
        if self._is_small(job) and (results := self._write_aside(job, stop)) is not None:
            return results
        plan = self._plan(job)
        for spare in range(self._config.max_respawns, -1, -1):
            child = self._started(stop)
            if child is None:
                return self._write_here(job, stop)
            try:
                return child.run(job, plan, self._timeouts, stop)
            except PermissionError as error:
                # A descriptor of this process is its own where it has changed its user, or where /proc hides it.
                read = (*job.copies, *(one.instead for one in job.adoptions))
                if error.filename not in {copy.read for copy in read if copy is not None}:
                    self._drop_child()
                    raise
                return self._write_here(job, stop)
            except WriterEnded as ended:
                self._drop_child()
                if ended.stalled and not spare:
                    how = f"writer process {ended.pid} {ended}"
                    raise WriterError(
                        name=job.name, rank=job.rank, phase="write", cause=how, pid=ended.pid, ended=str(ended)
                    ) from None
                self._respawned(ended.pid, f"{ended}; the same snapshot is written again")
            except BaseException:
                # What it is writing is of no use any more; the next job gets a fresh process.
                self._drop_child()
                raise
        logger.warning("the writer process ended %d times; writing in this process", self._config.max_respawns + 1)
        return self._write_here(job, stop)

    def stream(
        self, job: WriteJob, plans: Sequence[FilePlan], most_bytes: int | None, stop: Callable[[], None]
    ) -> list[WrittenFile]:
        """Write the files of ``job`` straight from their ``plans``, in this process, with at most ``most_bytes`` of memory.

        Raises:
            OSError: the file system refused.
        """
        size = min(most_bytes or _STREAM_BYTES, _STREAM_BYTES) // PAGE * PAGE
        options = dataclasses.replace(self._options, chunk_bytes=size)
        contents = (TensorContent(task, plan) for task, plan in zip(job.files, plans, strict=True))
        return write_job(job, options, _OwnProgress(self, stop), contents=contents)

    def close(self) -> None:
        """End the process, for good. Does not wait for a job."""
        with self._starting:
            self._closed = True
            spawn, self._spawn = self._spawn, None
        if spawn is not None:
            spawn.add_done_callback(_end)
        self._thread.close()
        self._drop_child()

    def needs_process(self, size_bytes: int) -> bool:
        """Whether so many bytes, from memory, are written by the process."""
        return size_bytes > self._config.inline_bytes and not self._inline

    def _is_small(self, job: WriteJob) -> bool:
        if any(one.instead is not None for one in job.adoptions) or any(copy.source for copy in job.copies):
            return False
        sizes = [*(task.length for task in job.files), *(copy.stamp.size_bytes for copy in job.copies)]
        return not self.needs_process(sum(sizes))

    def _write_aside(self, job: WriteJob, stop: Callable[[], None]) -> list[WrittenFile] | None:
        """Write on the thread; None if it does not return, or the system gives no more threads."""
        try:
            return self._thread.run(job, self._options, self._timeouts, stop)
        except Refused:
            return None
        except WriterEnded as ended:
            self._respawned(
                ended.pid, f"the thread that writes {ended}; the same snapshot is written again, by a process"
            )
            return None

    def _plan(self, job: WriteJob) -> bytes:
        plan = {
            "job": job.to_json(),
            "options": dataclasses.asdict(self._options),
            "variables": variables() if self._options.storage is not None else {},  # credentials may be new ones
        }
        return json.dumps(plan).encode()

    def _write_here(self, job: WriteJob, stop: Callable[[], None]) -> list[WrittenFile]:
        memory = memoryview(job.buffer.memory) if job.buffer is not None else None
        return write_job(job, self._options, _OwnProgress(self, stop), memory)

    def _drop_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()


class _OwnProgress(Unwatched):
    """The progress of writing in this process: it counts for the supervisor. Writing ends when ``stop`` raises."""

    def __init__(self, supervisor: WriterSupervisor, stop: Callable[[], None]) -> None:
        self._supervisor = supervisor
        self._stop = stop

    def moved(self, count: int) -> None:
        del count
        self._supervisor.moves += 1
        self._stop()

    def entered(self, phase: str) -> None:
        del phase
        self.moved(0)

    def waiting(self) -> None:
        self._stop()
