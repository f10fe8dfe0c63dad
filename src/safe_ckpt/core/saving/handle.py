"""The handle of a save that may still run: its result, its error, and the wait for both."""

from __future__ import annotations

import contextlib
import os
import threading

from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.core.home.home import Home
from safe_ckpt.errors import (
    ForkedError,
    RendezvousTimeout,
    SafeCheckpointError,
    SaveSkippedError,
)


class SaveHandle:
    """The outcome of a save, once it is known; the same on every rank.

    Example:
        ```python
        with Checkpointer("runs/exp") as ckpt:
            handle = ckpt.save(100, {"model": model})
            try:
                print(handle.result(timeout_s=60).name)
            except SaveError as error:  # nothing was committed; earlier checkpoints are as they were
                print(f"rank {error.rank} failed in {error.phase}: {error.cause}")
        ```

        ```text
        step-00000100
        ```
    """

    def __init__(self, name: str, limit_s: float, op_id: str = "", within: Home | None = None) -> None:
        self.name = name
        self.op_id = op_id
        self.within = within
        self._limit_s = limit_s
        self._finished = threading.Event()
        self._snapshot_taken = threading.Event()
        self._info: CheckpointInfo | None = None
        self._error: SafeCheckpointError | None = None
        self._reported = False
        self._pid = os.getpid()

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._finished.is_set()

    def result(self, timeout_s: float | None = None) -> CheckpointInfo:
        """Wait for the outcome and return what was committed.

        Args:
            timeout_s: how long to wait; None means as long as the save itself may take.

        Raises:
            SaveError: it failed while it was copied, written or committed, or ``lengthy_s`` is over. This, and what follows,
                has the same facts on every rank, and nothing was committed.
            WriterError: the writer process died or stalled more than ``writer.max_respawns`` times.
            SourceChangedError: a file changed while it was copied, or after ``publishing`` was left.
            SaveSkippedError: it was not started (``on_busy="skip"``).
            StateError: what is to be written cannot be read again.
            DirectoryError: the operating system or the object store refused.
            NotEnoughSpaceError: the file system, or host memory, cannot take it.
            DirectoryInUseError: another job took the directory over, or somebody broke its lock.
            DirectoryNotSharedError: a rank does not see the folder that rank 0 made.
            PeerLostError: a rank died or stopped before all had reported.
            TamperedError: a program that is not of this job wrote to the store of rank 0.
            UnhealthyStateError: it was committed and marked as unhealthy (``health.action="stop"``).
            CommitOutcomeUnknown: rank 0 was lost, or the storage failed, at the very commit. On the ranks that do not know.
            RendezvousTimeout: it is not over after ``timeout_s``, or a rank did not report in time.
            ForkedError: in a forked child it never will be. On this rank alone.
        """
        self.settle(timeout_s)
        if self._error is not None:
            self._reported = True
            raise self._error
        if self._info is None:
            raise SaveSkippedError(name=self.name, cause="no outcome was recorded")
        return self._info

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until the save is over, whatever came of it.

        Raises:
            RendezvousTimeout: it is not over yet.
            ForkedError: in a forked child it never will be.
        """
        self._await(self._finished, f"saving {self.name}", timeout_s)

    def wait_snapshot(self, timeout_s: float | None = None) -> None:
        """Wait until the copy is complete and the state may change. An eager copy is complete when ``save`` returns.

        Raises:
            RendezvousTimeout: it is not complete yet.
            ForkedError: in a forked child it never will be.
        """
        self._await(self._snapshot_taken, f"snapshot of {self.name}", timeout_s)

    def _await(self, awaited: threading.Event, phase: str, timeout_s: float | None) -> None:
        limit_s = self._limit_s if timeout_s is None else timeout_s
        if self._pid != os.getpid() and not awaited.is_set():
            raise ForkedError(what=f"waiting for {self.name}", pid=self._pid)
        if not awaited.wait(limit_s):
            raise RendezvousTimeout(phase=phase, seconds=limit_s)

    @property
    def outcome(self) -> CheckpointInfo | None:
        """The committed checkpoint; None while the save is not over, and when it failed. For the engine and adapters."""
        return self._info

    @property
    def error(self) -> SafeCheckpointError | None:
        """Why it failed, once that is known. For adapters."""
        return self._error

    @property
    def skipped(self) -> bool:
        """Whether it was never started, because another one was in flight. For adapters."""
        return isinstance(self._error, SaveSkippedError)

    @property
    def failed(self) -> bool:
        """Whether it is over and failed. For the engine and adapters."""
        return self._error is not None

    def mark_snapshot_taken(self) -> None:
        """The copy is complete. For the engine."""
        self._snapshot_taken.set()

    def finish(self, info: CheckpointInfo | None, error: SafeCheckpointError | None) -> None:
        """Record the outcome; the first one counts. For the engine."""
        if self._finished.is_set():
            return
        self._info, self._error = info, error
        self._snapshot_taken.set()
        self._finished.set()

    @property
    def unreported(self) -> SafeCheckpointError | None:
        """The error, if there is one that was not reported yet. For the engine."""
        return None if self._reported or not self._finished.is_set() else self._error

    def mark_reported(self) -> None:
        """The error was reported. For the engine."""
        self._reported = True


def skipped(name: str) -> SaveHandle:
    """The handle on a save that is not started."""
    handle = SaveHandle(name, 0.0)
    handle.finish(None, SaveSkippedError(name=name, cause="another save is in flight and on_busy is 'skip'"))
    handle.mark_reported()
    return handle


class Handles:
    """The saves of one engine that are not over, and those whose error was not reported yet. On the thread that trains."""

    def __init__(self) -> None:
        self._each: list[SaveHandle] = []

    def __len__(self) -> int:
        return len(self._each)

    def add(self, handle: SaveHandle) -> None:
        """One more, behind all others."""
        self._each.append(handle)

    @property
    def in_flight(self) -> int:
        """How many saves are not over."""
        return sum(not handle.done() for handle in self._each)

    def await_room(self, most: int) -> None:
        """Wait until fewer than ``most`` are in flight."""
        for handle in list(self._each):
            if self.in_flight < most:
                break
            handle.settle()

    def settle(self, within: Home | None = None) -> None:
        """Wait until everything in flight is over, or what goes to one directory, whatever came of it."""
        for handle in list(self._each):
            if within is None or handle.within is within:
                handle.settle()

    def unreported(self) -> tuple[str, SafeCheckpointError] | None:
        """The ``op_id`` and the error of the first save that failed and was not reported yet."""
        return next(((one.op_id, error) for one in self._each if (error := one.unreported) is not None), None)

    def raise_unreported(self) -> None:
        """Raise the first error of a finished save that was not reported yet."""
        for handle in list(self._each):
            if (error := handle.unreported) is not None:
                handle.mark_reported()
                raise error

    def mark_reported(self, op_id: str) -> None:
        """The error of this save is about to be raised."""
        for handle in self._each:
            if handle.op_id == op_id:
                handle.mark_reported()

    def forget_reported(self) -> None:
        """Let go of what is over and has nothing to raise, so that no save costs more than the one before."""
        for handle in list(self._each):
            if handle.done() and handle.unreported is None:
                with contextlib.suppress(ValueError):  # a signal handler that saves came first
                    self._each.remove(handle)
