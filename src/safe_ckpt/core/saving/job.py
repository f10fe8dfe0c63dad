"""A save under way on one rank, and the handle on its outcome that ``save`` returns."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from safe_ckpt.core.directory.object_root import ObjectRoot
from safe_ckpt.core.formats.file_plan import FilePlan, WriteTask
from safe_ckpt.core.formats.manifest import CheckpointInfo, Manifest
from safe_ckpt.core.saving.request import Root, SaveRequest, Snapshot
from safe_ckpt.core.staging.buffer import SharedBuffer
from safe_ckpt.core.staging.overlap import OverlapPlan
from safe_ckpt.core.staging.snapshot import StagingCopy
from safe_ckpt.core.staging.unchanged import Sharing
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.errors import ForkedError, RendezvousTimeout, SafeCheckpointError, SaveSkippedError


class SaveHandle:
    """The outcome of a save, once it is known; the same on every rank."""

    def __init__(self, name: str, limit_s: float, op_id: str = "", within: Root | None = None) -> None:
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


def skipped(name: str) -> SaveHandle:
    """The handle on a save that is not started."""
    handle = SaveHandle(name, 0.0)
    handle.finish(None, SaveSkippedError(name=name, cause="another save is in flight and on_busy is 'skip'"))
    handle.mark_reported()
    return handle


@dataclass(kw_only=True)
class SaveJob:
    """A save under way, on one rank.

    Attributes:
        manifest: what is known of it before a byte is written.
        writers: the ranks that write.
        needed_bytes: what all ranks together will write; 0 for files that come one by one.
        tasks: what this rank writes.
        copy: what fills the buffer; the writing follows it.
        read: set when the files to be copied have been copied, or never will be.
        streamed: written straight from the tensors, while the caller waits; there is no buffer then.
        error: what went wrong on this rank after the agreement.
        stall_s: how long the call held the caller.
        started: when the caller called, on the monotonic clock. Its deadline counts from when its turn comes.
        agreed_s: how long after that the ranks had agreed.
        call: the number of the call that began it.
        begun: whether its background phases have begun.
        files: what of its content this rank writes from memory.
        sharing: what it does not write, because a checkpoint before has it; None where nobody has looked.
        versions: which tensors that training does not change there were at the call, and how often they had been written to.
    """

    request: SaveRequest
    manifest: Manifest
    writers: tuple[int, ...]
    needed_bytes: int
    handle: SaveHandle
    buffer: SharedBuffer | None = None
    tasks: Sequence[WriteTask] = ()
    copy: StagingCopy | None = None
    read: threading.Event = field(default_factory=threading.Event)
    streamed: bool = False
    error: BaseException | None = None
    stall_s: float = 0.0
    started: float = field(default_factory=time.monotonic)
    agreed_s: float = 0.0
    call: int = 0
    begun: bool = False
    versions: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    files: Sequence[FilePlan] = ()
    sharing: Sharing | None = None

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        return self.request.name

    @property
    def path(self) -> Place:
        """The checkpoint's final name."""
        return self.request.destination.path

    @property
    def workspace(self) -> Root:
        """The directory that is held."""
        return self.request.destination.workspace

    @property
    def overlap(self) -> OverlapPlan | None:
        """Which tensors may be copied after ``save`` has returned; None for none."""
        content = self.request.content
        return content.overlap if isinstance(content, Snapshot) else None

    @property
    def op_id(self) -> str:
        """Unique to this save; its pending directory is named after it."""
        return self.manifest.op_id

    @property
    def folder(self) -> Place:
        """The directory into which files are written."""
        if isinstance(self.workspace, ObjectRoot):
            return self.workspace.place(self.name, self.op_id)
        own = self.workspace.pending / self.op_id
        return own / self.name if self.request.destination.kind == "directory" else own
