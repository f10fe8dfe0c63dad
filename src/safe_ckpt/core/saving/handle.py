"""The handle of a save that may still run: its result, its error, and the wait for both."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.core.home.home import Home
from safe_ckpt.errors import (
    ForkedError,
    RendezvousTimeout,
    SafeCheckpointError,
    SaveSkippedError,
)
from safe_ckpt.text import bytes_text, duration


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

    def __init__(self, save: OpenSave) -> None:
        self._save = save

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        return self._save.name

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._save.done()

    @property
    def committed(self) -> CheckpointInfo | None:
        """The committed checkpoint; None while that is not known, and when the save failed. Neither waits nor raises."""
        return None if self._save.failed else self._save.outcome

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
        return self._save.result(timeout_s)

    def wait_until_over(self, timeout_s: float | None = None) -> None:
        """Wait until the save is over, whatever came of it.

        Raises:
            RendezvousTimeout: it is not over yet.
            ForkedError: in a forked child it never will be.
        """
        self._save.wait_until_over(timeout_s)

    def wait_snapshot(self, timeout_s: float | None = None) -> None:
        """Wait until the copy is complete and the state may change. An eager copy is complete when ``save`` returns.

        Raises:
            RendezvousTimeout: it is not complete yet.
            ForkedError: in a forked child it never will be.
        """
        self._save.wait_snapshot(timeout_s)

    def __repr__(self) -> str:
        return f"<SaveHandle of {self.name}: {self._save.standing}>"


class OpenSave:
    """A save that was begun, as the engine and adapters follow it; the same on every rank.

    Args:
        name: of the checkpoint.
        limit_s: how long it may take.
        op_id: unique to this save; "" for one that was not started.
        within: the directory that it goes to.

    Example:
        ```python
        folder = Path("runs/followed").absolute()
        with Saver(CheckpointConfig(), "toy") as saver:
            planned = Planned(files=[torch_file("state.pt", {"model": model.state_dict()})])
            begun = saver.save(saver.home(folder), folder / "step-1", planned.payload(), step=1)
            begun.wait_until_over()
            print(begun.outcome.name, begun.failed)
        ```

        ```text
        step-1 False
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
        self._begun = self._ended = time.monotonic()

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._finished.is_set()

    def result(self, timeout_s: float | None = None) -> CheckpointInfo:
        """See ``SaveHandle``."""
        self.wait_until_over(timeout_s)
        if self._error is not None:
            self._reported = True
            raise self._error
        if self._info is None:
            raise SaveSkippedError(name=self.name, cause="no outcome was recorded")
        return self._info

    def wait_until_over(self, timeout_s: float | None = None) -> None:
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
        """The committed checkpoint; None while it is not over, and when it failed."""
        return self._info

    @property
    def error(self) -> SafeCheckpointError | None:
        """Why it failed, once that is known."""
        return self._error

    @property
    def skipped(self) -> bool:
        """Whether it was never started, because another one was in flight."""
        return isinstance(self._error, SaveSkippedError)

    @property
    def failed(self) -> bool:
        """Whether it is over and failed."""
        return self._error is not None

    def mark_snapshot_taken(self) -> None:
        """The copy is complete."""
        self._snapshot_taken.set()

    def finish(self, info: CheckpointInfo | None, error: SafeCheckpointError | None) -> None:
        """Record the outcome; the first one counts."""
        if self._finished.is_set():
            return
        self._info, self._error, self._ended = info, error, time.monotonic()
        self._snapshot_taken.set()
        self._finished.set()

    @property
    def unreported(self) -> SafeCheckpointError | None:
        """The error, if there is one that was not reported yet."""
        return None if self._reported or not self._finished.is_set() else self._error

    def mark_reported(self) -> None:
        """The error was reported."""
        self._reported = True

    @property
    def handle(self) -> SaveHandle:
        """For the caller of ``save``."""
        return SaveHandle(self)

    @property
    def standing(self) -> str:
        """How it stands, in words."""
        if not self.done():
            doing = "being written" if self._snapshot_taken.is_set() else "being copied"
            return f"{doing} for {duration(time.monotonic() - self._begun)}"
        if self._info is None:
            return f"{type(self._error).__name__}: {self._error}"
        return f"committed after {duration(self._ended - self._begun)}, {bytes_text(self._info.size_bytes)}"


def skipped(name: str) -> OpenSave:
    """A save that is not started."""
    save = OpenSave(name, 0.0)
    save.finish(None, SaveSkippedError(name=name, cause="another save is in flight and on_busy is 'skip'"))
    save.mark_reported()
    return save


class Handles:
    """The saves of one engine that are not over, and those whose error was not reported yet. On the thread that trains."""

    def __init__(self) -> None:
        self._each: list[OpenSave] = []

    def __len__(self) -> int:
        return len(self._each)

    def add(self, handle: OpenSave) -> None:
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
            handle.wait_until_over()

    def wait_until_over(self, within: Home | None = None) -> None:
        """Wait until everything in flight is over, or what goes to one directory, whatever came of it."""
        for handle in list(self._each):
            if within is None or handle.within is within:
                handle.wait_until_over()

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
