"""What ``save`` returns: the outcome to be, the same on every rank."""

from __future__ import annotations

import os
import threading

from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.errors import ForkedError, RendezvousTimeout, SafeCheckpointError, SaveSkippedError


class SaveHandle:
    """What ``save`` returns: the outcome to be, the same on every rank."""

    def __init__(self, name: str, limit_s: float, op_id: str = "") -> None:
        self.name = name
        self.op_id = op_id
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
            SafeCheckpointError: the save failed, with the same error on every rank.
            RendezvousTimeout: it is not over yet.
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
        limit_s = self._limit_s if timeout_s is None else timeout_s
        self._refuse_fork(self._finished)
        if not self._finished.wait(limit_s):
            raise RendezvousTimeout(phase=f"saving {self.name}", seconds=limit_s)

    def wait_snapshot(self, timeout_s: float | None = None) -> None:
        """Wait until the copy is complete and the state may change. An eager copy is complete when ``save`` returns.

        Raises:
            RendezvousTimeout: it is not complete yet.
            ForkedError: in a forked child it never will be.
        """
        limit_s = self._limit_s if timeout_s is None else timeout_s
        self._refuse_fork(self._snapshot_taken)
        if not self._snapshot_taken.wait(limit_s):
            raise RendezvousTimeout(phase=f"snapshot of {self.name}", seconds=limit_s)

    def _refuse_fork(self, awaited: threading.Event) -> None:
        if self._pid != os.getpid() and not awaited.is_set():
            raise ForkedError(what=f"waiting for {self.name}", pid=self._pid)

    @property
    def outcome(self) -> CheckpointInfo | None:
        """What was committed; None while it is not over, and when it failed. For the engine and adapters."""
        return self._info

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
