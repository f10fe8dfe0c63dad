"""Takes snapshots: owns their memory, allocates it ahead of time, and ends every copy that was begun."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable

from safe_ckpt import machine as host_memory
from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.saving.extension import Extensions
from safe_ckpt.core.saving.request import Streamed
from safe_ckpt.core.saving.save import SaveJob
from safe_ckpt.core.staging import snapshot
from safe_ckpt.core.staging.buffer import SharedBuffer, rounded
from safe_ckpt.core.staging.device import Devices
from safe_ckpt.core.staging.snapshot import KnownCopies, StagingCopy
from safe_ckpt.core.staging.worker_thread import Background, Refused
from safe_ckpt.core.state import overlap
from safe_ckpt.errors import NotEnoughSpaceError, RendezvousTimeout, SaveError

logger = logging.getLogger(__name__)
_LOOK_S = 0.05
_END_S = 1.0
_INTERPRETER_BYTES = 24 << 20  # of the writer process with numpy: 17 MiB that nobody shares were measured
_CHUNKS = 2


class Stager:
    """The snapshots of one rank. Called on the thread that drives training, but for ``give_back``.

    Args:
        config: settings.
        rank: this rank, for messages.
        extensions: tell which files need not be copied.
        devices: None for those of this process.
    """

    def __init__(
        self, config: CheckpointConfig, rank: int, extensions: Extensions | None = None, devices: Devices | None = None
    ) -> None:
        self._config = config
        self._devices = devices or Devices()
        self._rank = rank
        self._extensions = extensions or Extensions()
        self._free = [SharedBuffer() for _ in range(config.max_in_flight)]
        self._preparing: threading.Thread | None = None
        self._copy_thread = Background("safe_ckpt-copy", _call)
        self._helper = Background("safe_ckpt-help", _call)
        self._known = KnownCopies()
        self._last: weakref.ref[StagingCopy] | None = None  # the one that was put in last
        self._giving_back = threading.RLock()
        self._closed = False

    def prepare(self, size_bytes: int, begin: Callable[[], None]) -> None:
        """Allocate memory for snapshots of this size, in the background.

        Args:
            size_bytes: of one snapshot.
            begin: called there first, to get ready whatever else a save needs.
        """
        if size_bytes <= 0 or self._is_too_large(size_bytes):
            return
        if self._preparing is not None and self._preparing.is_alive():
            return
        buffers = list(self._free)
        devices = self._devices.here()  # a new thread stands on device 0, which may be another rank's

        def work() -> None:
            try:
                self._copy_thread.start()
                self._helper.start()
                begin()
                for buffer in buffers:
                    buffer.beside_bytes = self._writing_bytes(size_bytes)
                    buffer.reserve(size_bytes)
                    for device in devices:
                        buffer.pin(device, self._devices)
            except (NotEnoughSpaceError, OSError, ValueError, RuntimeError) as error:
                logger.info("the first save could not be made ready for: %s", error)

        self._preparing = threading.Thread(target=work, name="safe_ckpt-prepare", daemon=True)
        self._preparing.start()

    def lay_out(self, job: SaveJob) -> None:
        """Plan the copy of ``job``. An error goes into ``job.error``; every rank gets it through the save's verdict."""
        payload = job.request.payload
        place = str(job.folder), job.manifest.to_json()
        job.existing = self._extensions.existing("before the copy", lambda one: one.laying_out(job))
        job.files = [plan for plan in payload.files if plan.path not in job.existing]
        size = snapshot.buffer_bytes(job.files)
        if isinstance(payload, Streamed) or self._is_too_large(size):
            job.tasks = snapshot.list_tasks(job.files, *place)
            job.streamed, job.error = True, None
            try:
                # Another thread reads the tensors, and its streams do not wait for those of this thread.
                self._devices.synchronize(tensor for plan in job.files for _, tensor in plan.tensors)
            except Exception as error:  # as the docstring says
                job.error = error
            return
        job.buffer = self._take_buffer()
        job.buffer.beside_bytes = self._writing_bytes(size)
        try:
            job.tasks, job.copy = snapshot.lay_out(
                job.files, job.buffer, *place, name=job.name, overlap_plan=job.overlap, known=self._known
            )
            job.error = None
        except Exception as error:  # as the docstring says
            job.error = error

    def copy(self, job: SaveJob) -> None:
        """Copy now what may change; the rest on a thread, behind the gate. Without a buffer wait until all is written."""
        copy, payload = job.copy, job.request.payload
        if copy is not None and job.overlap is not None:
            overlap.close_gate(copy, self._config.timeouts.barrier_s)
        if isinstance(payload, Streamed) and payload.feed is not None:
            payload.feed(job.save)
        elif job.streamed:
            self._await(job, job.save.wait_snapshot)  # what is not written yet must not change
        elif copy is not None and copy.run(self._ask_for_help):
            finish = functools.partial(self._finish, job)
            try:
                self._free_copy_thread().put(finish)
                self._last = weakref.ref(copy)
            except Refused:  # the system gives no more threads: copy now
                finish()
        elif not payload.copies:
            job.save.mark_snapshot_taken()
        if payload.copies:
            self._await(job, lambda: self._await_copies(job))
        job.stall_s = time.monotonic() - job.started

    def give_back(self, job: SaveJob) -> None:
        """The save is over: its copy ends, and its memory is free for the next one. Called on the background thread."""
        if job.copy is not None:
            cause = "the save was over before the copy was"
            job.copy.fail(SaveError(name=job.name, cause=cause, rank=self._rank))
            if not job.copy.wait(self._config.timeouts.shutdown_s):
                logger.error("the memory of %s stays taken: a copy into it does not end", job.name)
                return
        if job.buffer is not None:
            self._keep(job.buffer)

    def _keep(self, buffer: SharedBuffer) -> None:
        with self._giving_back:
            if not self._closed:
                self._free.append(buffer)
                return
        buffer.close()  # of a save that was given up at the end

    def close(self) -> None:
        """Free the memory, and let the thread that copies end."""
        for thread in (self._copy_thread, self._helper):
            thread.end()
        for thread in (self._copy_thread, self._helper):
            if not thread.is_current:  # a collector may call this from anywhere
                thread.join(_END_S)
        with self._giving_back:
            self._closed = True
        for buffer in self._free:
            buffer.close()

    def _is_too_large(self, size: int) -> bool:
        """Whether a snapshot of this size may not be taken: then its files are written straight from the tensors."""
        most, largest = self._config.max_host_bytes, host_memory.largest_file_bytes()
        return (most is not None and size > most) or (largest is not None and rounded(size) > largest)

    def _writing_bytes(self, size: int) -> int:
        """The bytes that a process needs to write so much: it may not have started yet, and a control group's limit kills."""
        writer = self._config.writer
        return 0 if size <= writer.inline_bytes else _INTERPRETER_BYTES + _CHUNKS * writer.chunk_bytes

    def _take_buffer(self) -> SharedBuffer:
        if self._preparing is not None:
            # It allocates what is needed here, and a buffer must not grow during a copy.
            self._preparing.join(self._config.timeouts.barrier_s)
            if self._preparing.is_alive():
                return SharedBuffer()
        return self._free.pop() if self._free else SharedBuffer()

    def _ask_for_help(self, help_copying: Callable[[], None]) -> None:
        if self._copy_thread.is_current or self._helper.is_current:
            self._helper.offer(help_copying)
            return
        with contextlib.suppress(Refused):  # it is faster with, and works without
            self._helper.put(help_copying)

    def _finish(self, job: SaveJob) -> None:
        if job.copy is not None:
            # Not only ``run_deferred``: the one that helps may have begun it, and then this one helps.
            job.copy.help()
            while not job.copy.wait(self._config.timeouts.barrier_s):
                if job.copy.error is not None:
                    return
        job.save.mark_snapshot_taken()

    def _free_copy_thread(self) -> Background[Callable[[], None]]:
        last = self._last() if self._last is not None else None
        if last is not None and last.error is not None and not last.wait(0):
            # It was given up and does not end (a device or a mount hangs). Later copies need not wait for it.
            self._copy_thread.end()
            self._helper.end()
            self._copy_thread, self._helper = Background("safe_ckpt-copy", _call), Background("safe_ckpt-help", _call)
        return self._copy_thread

    def _await_copies(self, job: SaveJob) -> None:
        limit_s = self._config.timeouts.lengthy_s
        limit = time.monotonic() + limit_s
        # The save may be over before anything was read: it may have failed.
        while not job.read.wait(_LOOK_S) and not job.save.done():
            if time.monotonic() > limit:
                raise RendezvousTimeout(phase=f"copying files of {job.name}", seconds=limit_s)
        job.save.mark_snapshot_taken()

    def _await(self, job: SaveJob, wait: Callable[[], None]) -> None:
        """Wait; when that is interrupted the caller goes on, and the save fails on every rank."""
        try:
            wait()
        except BaseException:
            job.error = SaveError(name=job.name, cause="interrupted", rank=self._rank, phase="snapshot")
            raise


def _call(work: Callable[[], None]) -> None:
    work()
