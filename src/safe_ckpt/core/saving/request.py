"""One save: what is asked for, what the ranks agreed on, and the handle the caller gets."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from safe_ckpt.core.directory.ledger import Decision
from safe_ckpt.core.directory.workspace import Workspace
from safe_ckpt.core.formats.file_plan import FilePlan
from safe_ckpt.core.formats.manifest import CheckpointInfo, Manifest
from safe_ckpt.core.formats.write_task import WriteTask
from safe_ckpt.core.saving.streamed_files import FileStream
from safe_ckpt.core.staging.buffer import SharedBuffer
from safe_ckpt.core.staging.copy import StagingCopy
from safe_ckpt.core.staging.overlap import OverlapPlan
from safe_ckpt.core.storage.copier import FileCopy
from safe_ckpt.core.storage.durable import Link
from safe_ckpt.errors import ForkedError, RendezvousTimeout, SafeCheckpointError, SaveSkippedError

Retain = Callable[[CheckpointInfo], Decision | None]
"""Called on rank 0's background thread after a commit; says what is to be deleted now. None: no rule deletes anything."""


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """A small file beside checkpoints, such as one that names the newest. It is replaced in one step.

    Attributes:
        path: where.
        data: its content.
        mode: its permissions; None for the usual ones.
    """

    path: Path
    data: bytes
    mode: int | None = None


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """One save as an adapter asks for it, on one rank.

    Attributes:
        workspace: the directory that is held.
        path: the final name.
        kind: whether ``path`` becomes a directory with a manifest in it or a single file.
        step: the training step.
        metrics: numbers that retention may look at.
        images: the files of this rank, planned; for a single file, one image on rank 0.
        items: what this rank knows for the manifest's ``items``.
        error: why this rank could not plan; every rank raises it.
        links: further names of a single file.
        notes: what the manifest says besides; rank 0's counts.
        view: what else must be equal on all ranks.
        same: the same, but known only where planning went well: compared when no rank has an ``error``.
        retain: what to delete after the commit.
        overlap_plan: which tensors may be copied after ``save`` has returned; None for none.
        begun: a folder from ``extras.open_folder`` that already holds files of the checkpoint; None for none.
        carry: which files in a directory of this name, of those that no save of ours wrote, go along to the new one.
        patient: wait for saves that are in flight, also where ``on_busy`` says to skip.
        streamed: write straight from the tensors, while the caller waits; the only way for an image with lazy ones.
        feed: run on the caller's thread while the background streams; it provides what lazy images fetch. Every rank has one
            then. It raises only when it was interrupted.
        folders: below the directory, for images and copies that go into one; the same on all ranks.
        copies: files of this rank that are copied as they are. ``save`` returns when they have been read.
        parts: files of this rank that come one by one, after ``save`` has returned; on every rank then.
        pointers: small files elsewhere that are replaced once the checkpoint has its name, in this order; rank 0's count.
    """

    workspace: Workspace
    path: Path
    kind: Literal["directory", "file"]
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    images: Sequence[FilePlan] = ()
    items: Mapping[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    links: Sequence[Link] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    view: Mapping[str, str] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    retain: Retain | None = None
    overlap_plan: OverlapPlan | None = None
    begun: Path | None = None
    carry: Callable[[str], bool] | None = None
    patient: bool = False
    streamed: bool = False
    feed: Callable[[SaveJob], None] | None = None
    folders: Sequence[str] = ()
    copies: Sequence[FileCopy] = ()
    parts: FileStream | None = None
    pointers: Sequence[Pointer] = ()


@dataclass(kw_only=True)
class SaveJob:
    """A save under way, on one rank.

    Attributes:
        manifest: what is known of it before a byte is written.
        writers: the ranks that write.
        needed_bytes: what all ranks together will write; 0 for files that come one by one.
        tasks: what this rank writes.
        copy: what fills the arena; the writing follows it.
        read: set when the files to be copied have been read, or never will be.
        streamed: written straight from the tensors, while the caller waits; there is no arena then.
        error: what went wrong on this rank after the agreement.
        stall_s: how long the call held the caller.
        started: when the caller called, on the monotonic clock; its deadline counts from when its turn comes.
        agreed_s: how long after that the ranks had agreed.
        call: the number of the call that began it.
        begun: whether its background phases have begun.
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

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        return self.request.path.name

    @property
    def known_bytes(self) -> int:
        """What is known to be needed: of files that come one by one, those of this rank that came."""
        return self.needed_bytes or (self.request.parts.size_bytes if self.request.parts is not None else 0)

    @property
    def op_id(self) -> str:
        """Unique to this save; its staging directory is named after it."""
        return self.manifest.op_id

    @property
    def staged(self) -> Path:
        """Where the checkpoint is built: it has its final name already, in a folder of its own."""
        return self.request.workspace.staging / self.op_id / self.request.path.name

    @property
    def folders(self) -> list[Path]:
        """Every directory into which files are written, the innermost first."""
        return [*(self.folder / name for name in self.request.folders), self.folder]

    @property
    def folder(self) -> Path:
        """The directory into which files are written."""
        return self.staged if self.request.kind == "directory" else self.staged.parent


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
        """The error, if there is one that nobody was told of yet. For the engine."""
        return None if self._reported or not self._finished.is_set() else self._error

    def mark_reported(self) -> None:
        """The error was told. For the engine."""
        self._reported = True
