"""One save: what is asked for, and what one rank knows of it while it is under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from safe_ckpt.core.directory.catalog import Catalog
from safe_ckpt.core.directory.retention import RetentionPolicy
from safe_ckpt.core.directory.workspace import Workspace
from safe_ckpt.core.formats.file_plan import FilePlan, WriteTask
from safe_ckpt.core.formats.manifest import Manifest
from safe_ckpt.core.saving.handle import SaveHandle
from safe_ckpt.core.saving.streamed_files import FileStream
from safe_ckpt.core.staging.buffer import SharedBuffer
from safe_ckpt.core.staging.copy import StagingCopy
from safe_ckpt.core.staging.overlap import OverlapPlan
from safe_ckpt.core.storage.copier import FileCopy
from safe_ckpt.core.storage.durable import Link


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where a checkpoint goes.

    Attributes:
        workspace: the directory that is held.
        path: the final name.
        kind: whether ``path`` becomes a directory with a manifest in it or a single file.
    """

    workspace: Workspace
    path: Path
    kind: Literal["directory", "file"]

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a kind that there is not."""
        if self.kind not in ("directory", "file"):
            raise ValueError(f'kind: expected "directory" or "file", got {self.kind!r}')


@dataclass(frozen=True, kw_only=True)
class Content:
    """What one rank writes. One of the classes below says how.

    Attributes:
        files: planned files; for a checkpoint that is a single file, one on rank 0.
        copies: files that are copied as they are. ``save`` returns when they have been read.
        folders: below the checkpoint's directory, for files that go into one; the same on all ranks.
    """

    files: Sequence[FilePlan] = ()
    copies: Sequence[FileCopy] = ()
    folders: Sequence[str] = ()

    @property
    def new_bytes(self) -> int:
        """How much this rank will write, as far as that is known."""
        return sum(file.total_bytes for file in self.files) + sum(copy.stamp.size_bytes for copy in self.copies)

    @property
    def writes(self) -> bool:
        """Whether this rank writes anything."""
        return bool(self.files or self.copies)


@dataclass(frozen=True, kw_only=True)
class Snapshot(Content):
    """Tensors are copied to host memory, and written from there after ``save`` has returned.

    Attributes:
        overlap: which tensors may be copied after ``save`` has returned; None for none.
    """

    overlap: OverlapPlan | None = None


@dataclass(frozen=True, kw_only=True)
class Streamed(Content):
    """Tensors are written while the caller waits, without a copy; the only way for files with lazy tensors.

    Attributes:
        feed: run on the caller's thread meanwhile; it provides what lazy tensors fetch. None where they fetch by themselves,
            else every rank has one. It raises only when it was interrupted.
    """

    feed: Callable[[SaveJob], None] | None = None

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for copies: they are read on the thread that streams."""
        if self.copies:
            raise ValueError("copies: files cannot be copied in a save that is streamed")


@dataclass(frozen=True, kw_only=True)
class Copies(Content):
    """Files are copied as they are, and nothing else."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for planned files."""
        if self.files:
            raise ValueError("files: only copies are written here")


@dataclass(frozen=True, kw_only=True)
class FileByFile(Content):
    """Files are handed over one by one, after ``save`` has returned; on every rank.

    Attributes:
        stream: takes them.
    """

    stream: FileStream

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for files that are known ahead."""
        if self.files or self.copies:
            raise ValueError("files, copies: in a save file by file all files are handed over to its stream")

    @property
    def writes(self) -> bool:
        """It may: nobody knows yet."""
        return True


@dataclass(frozen=True, kw_only=True)
class Unplanned(Content):
    """Nothing: this rank could not plan it.

    Attributes:
        error: why; every rank raises it.
    """

    error: Exception


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the manifest says of a checkpoint.

    Attributes:
        step: the training step.
        metrics: numbers that retention may look at.
        items: what this rank knows for the manifest's ``items``.
        notes: what it says besides; rank 0's counts.
    """

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    items: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)


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
class OnCommit:
    """What is done at the commit besides, by rank 0.

    Attributes:
        prefilled: a folder from ``extra_files.open_folder`` that already holds files of the checkpoint; None for none.
        carry: predicate: files in the directory that is replaced, of those that no save of ours wrote, for which it is true
            are kept in the new one; None for none.
        links: further names of a single file.
        pointers: small files elsewhere that are replaced once the checkpoint has its name, in this order.
        catalog: learns of the commit; None where nobody keeps one.
        retention: decides what is deleted then; None deletes nothing.
    """

    prefilled: Path | None = None
    carry: Callable[[str], bool] | None = None
    links: Sequence[Link] = ()
    pointers: Sequence[Pointer] = ()
    catalog: Catalog | None = None
    retention: RetentionPolicy | None = None


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """One save as an adapter asks for it, on one rank.

    Attributes:
        destination: where the checkpoint goes.
        content: what this rank writes.
        facts: what the manifest says.
        must_match: what must be equal on all ranks besides step and path. Compared when every rank could plan its content.
        on_commit: what is done at the commit besides.
        patient: wait for saves that are in flight, also where ``on_busy`` says to skip.
    """

    destination: Destination
    content: Content
    facts: Facts
    must_match: Mapping[str, str] = field(default_factory=dict)
    on_commit: OnCommit = field(default_factory=OnCommit)
    patient: bool = False

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a single file with what only a directory can have."""
        if self.destination.kind == "directory":
            return
        content, on_commit = self.content, self.on_commit
        wrong = {
            "folders": content.folders,
            "prefilled": on_commit.prefilled,
            "carry": on_commit.carry,
            "pointers": on_commit.pointers,
        }
        if names := [name for name, value in wrong.items() if value]:
            raise ValueError(f"{', '.join(names)}: only a checkpoint that is a directory has these")

    @property
    def error(self) -> Exception | None:
        """Why this rank could not plan its content."""
        return self.content.error if isinstance(self.content, Unplanned) else None

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        return self.destination.path.name


@dataclass(kw_only=True)
class SaveJob:
    """A save under way, on one rank.

    Attributes:
        manifest: what is known of it before a byte is written.
        writers: the ranks that write.
        needed_bytes: what all ranks together will write; 0 for files that come one by one.
        tasks: what this rank writes.
        copy: what fills the buffer; the writing follows it.
        read: set when the files to be copied have been read, or never will be.
        streamed: written straight from the tensors, while the caller waits; there is no buffer then.
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
        return self.request.name

    @property
    def path(self) -> Path:
        """The checkpoint's final name."""
        return self.request.destination.path

    @property
    def workspace(self) -> Workspace:
        """The directory that is held."""
        return self.request.destination.workspace

    @property
    def overlap(self) -> OverlapPlan | None:
        """Which tensors may be copied after ``save`` has returned; None for none."""
        content = self.request.content
        return content.overlap if isinstance(content, Snapshot) else None

    @property
    def stream(self) -> FileStream | None:
        """Takes the files of this rank where they come one by one."""
        content = self.request.content
        return content.stream if isinstance(content, FileByFile) else None

    @property
    def known_bytes(self) -> int:
        """What is known to be needed: of files that come one by one, those of this rank that came."""
        return self.needed_bytes or (self.stream.size_bytes if self.stream is not None else 0)

    @property
    def op_id(self) -> str:
        """Unique to this save; its pending directory is named after it."""
        return self.manifest.op_id

    @property
    def staged(self) -> Path:
        """Where the checkpoint is built: it has its final name already, in a folder of its own."""
        return self.workspace.pending / self.op_id / self.name

    @property
    def folders(self) -> list[Path]:
        """Every directory into which files are written, the innermost first."""
        return [*(self.folder / name for name in self.request.content.folders), self.folder]

    @property
    def folder(self) -> Path:
        """The directory into which files are written."""
        return self.staged if self.request.destination.kind == "directory" else self.staged.parent
