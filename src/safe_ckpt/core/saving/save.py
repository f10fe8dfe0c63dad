"""One save: as it is asked for, whether it may start, and once it is under way on a rank; and the handle on its outcome."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from safe_ckpt import events
from safe_ckpt.core.coordination.rounds import to_wire
from safe_ckpt.core.formats.file_plan import FilePlan, WriteTask
from safe_ckpt.core.formats.manifest import CheckpointInfo, Manifest
from safe_ckpt.core.home.home import Home, NewCheckpoint, Pointer, Publication
from safe_ckpt.core.home.retention import RetentionPolicy
from safe_ckpt.core.home.standing import Catalog
from safe_ckpt.core.staging.buffer import SharedBuffer
from safe_ckpt.core.staging.snapshot import StagingCopy
from safe_ckpt.core.state.overlap import OverlapPlan
from safe_ckpt.core.state.planner import refuse_differences
from safe_ckpt.core.storage.copier import FileCopy, Stamp
from safe_ckpt.core.storage.durable import Link
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.writer.existing import Existing
from safe_ckpt.errors import (
    CommitOutcomeUnknown,
    ForkedError,
    PeerLostError,
    RendezvousTimeout,
    SafeCheckpointError,
    SaveSkippedError,
    StateError,
)


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where a checkpoint goes.

    Attributes:
        workspace: the directory that is held.
        path: the final name.
        kind: whether ``path`` becomes a directory with a manifest in it or a single file.
    """

    workspace: Home
    path: Place
    kind: Literal["directory", "file"]

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a kind that there is not, or not there."""
        if self.kind in self.workspace.lacks:
            raise ValueError("kind: an object store has directories only")
        if self.kind not in ("directory", "file"):
            raise ValueError(f'kind: expected "directory" or "file", got {self.kind!r}')


@dataclass(frozen=True, kw_only=True)
class Content:
    """What one rank writes. One of the classes below says how.

    Attributes:
        files: planned files; for a checkpoint that is a single file, one on rank 0.
        copies: files that are copied as they are. ``save`` returns when they have been copied.
        in_place: files of ``OnCommit.prefilled`` that this rank hashes: their paths in the checkpoint, and no source.
        folders: below the checkpoint's directory, for files that go into one; the same on all ranks.
    """

    files: Sequence[FilePlan] = ()
    copies: Sequence[FileCopy] = ()
    in_place: Sequence[FileCopy] = ()
    folders: Sequence[str] = ()

    @property
    def new_bytes(self) -> int:
        """How much this rank will write, as far as that is known."""
        return sum(file.total_bytes for file in self.files) + sum(copy.stamp.size_bytes for copy in self.copies)

    @property
    def writes(self) -> bool:
        """Whether this rank writes anything."""
        return bool(self.files or self.copies or self.in_place)


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
        if self.copies or self.in_place:
            raise ValueError("copies, in_place: files cannot be read in a save that is streamed")


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
        unexamined: patterns of names of tensors of which the numbers are not looked at.
    """

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    items: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    unexamined: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class OnCommit:
    """What is done at the commit besides, by rank 0.

    Attributes:
        prefilled: a folder from ``homes.open_folder`` that already holds files of the checkpoint; None for none.
        stamps: of the files in ``prefilled``, by path: it holds these and no others, and none changes before the commit; None
            where the ranks report none of them, and rank 0 hashes what it finds there.
        carry: predicate: files in the directory that is replaced, of those that no save of ours wrote, for which it is true
            are kept in the new one; None for none.
        links: further names of a single file.
        pointers: small files elsewhere that are replaced once the checkpoint has its name, in this order.
        catalog: gets the commit; None for no catalog.
        retention: decides what is deleted then; None deletes nothing.

    Example:
        ```python
        from safe_ckpt.adapters.extras import policy_of

        on_commit = OnCommit(retention=policy_of(Retention(keep_last=3)))  # for Saver.save
        ```
    """

    prefilled: Path | None = None
    stamps: Mapping[str, Stamp] | None = None
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
        held: what this rank holds of what rank 0 saves for all, by item; see ``planner.held``.
        on_commit: what is done at the commit besides.
        patient: wait for saves that are in flight, also where ``on_busy`` says to skip.
    """

    destination: Destination
    content: Content
    facts: Facts
    must_match: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[str, Sequence[str]] = field(default_factory=dict)
    on_commit: OnCommit = field(default_factory=OnCommit)
    patient: bool = False

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a single file, or an object store, with what only a directory can have."""
        content, on_commit = self.content, self.on_commit
        lacks = sorted(self.destination.workspace.lacks - {"file"})
        if names := [name for name in lacks if getattr(on_commit, name)]:
            raise ValueError(f"{', '.join(names)}: an object store has none of these")
        if self.destination.kind == "directory":
            return
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

    def new(self, manifest: Manifest, needed_bytes: int) -> NewCheckpoint:
        """What a publication is told of this save."""
        return NewCheckpoint(
            path=self.destination.path,
            manifest=manifest,
            kind=self.destination.kind,
            needed_bytes=needed_bytes,
            folders=self.content.folders,
            prefilled=self.on_commit.prefilled,
            stamps=self.on_commit.stamps,
            carry=self.on_commit.carry,
            links=self.on_commit.links,
            pointers=self.on_commit.pointers,
        )


def answer(
    request: SaveRequest, earlier: tuple[str, SafeCheckpointError] | None, rank: int, spared_bytes: int
) -> dict[str, Any]:
    """What a rank answers: how much it will write, and which earlier failure it knows of.

    Args:
        request: this rank's own.
        earlier: the ``op_id`` and the error of a save that failed and was not reported yet; None for none.
        rank: this rank.
        spared_bytes: how much of it probably need not be written.

    Raises:
        Exception: why it cannot plan its content.
    """
    if request.error is not None:
        raise request.error
    failure = None
    if earlier is not None:
        failure = {"op_id": earlier[0], "error": to_wire(earlier[1], rank=rank, phase="save")}
    held = {name: list(texts) for name, texts in request.held.items()}
    return {
        "bytes": request.content.new_bytes - spared_bytes,
        "writes": request.content.writes,
        "earlier": failure,
        "held": held,
    }


def check_step(step: object) -> None:
    """Refuse what is no training step.

    Raises:
        StateError: naming it.
    """
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise StateError(key="step", message=f"expected a whole number from 0 up, got {step!r}")


def checked_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as numbers.

    Raises:
        StateError: one is none; names it.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise StateError(key=f"metrics[{name!r}]", message=f"expected a number, got {value!r}") from error
        except OverflowError as error:  # the text of the number would be as large
            raise StateError(key=f"metrics[{name!r}]", message=f"{error}: give a smaller one") from error
    return numbers


def decide(
    request: SaveRequest, answers: Mapping[int, Any], *, busy: bool, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """What rank 0 makes of the answers.

    Args:
        request: rank 0's own.
        answers: what ``answer`` returned on every rank.
        busy: as many saves are in flight as may be, and this one is not to wait.
        fields: what the manifest says besides.

    Returns:
        ``earlier``: the failed save that every rank reports instead of starting this one. Or the ``manifest`` of the save that
        may start, the ``writers``, and the ``needed_bytes`` of all of them. Nothing when the save is skipped.

    Raises:
        DesyncError: a rank holds something that would be lost; names it.
    """
    ranks = sorted(answers)
    for rank in ranks:
        if answers[rank]["earlier"]:
            return {"earlier": answers[rank]["earlier"]}
    refuse_differences({rank: answers[rank]["held"] for rank in ranks})
    if busy:
        return {}
    manifest = Manifest(
        name=request.name,
        sequence=request.destination.workspace.next_sequence(),
        step=request.facts.step,
        world_size=len(ranks),
        metrics=dict(request.facts.metrics),
        notes=dict(request.facts.notes),
        **fields,
    )
    return {
        "manifest": manifest.to_json(),
        "writers": [rank for rank in ranks if answers[rank]["writes"]],
        "needed_bytes": sum(answers[rank]["bytes"] for rank in ranks),
    }


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
        """What was committed; None while it is not over, and when it failed. For the engine and adapters."""
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


@dataclass(kw_only=True)
class SaveJob:
    """A save under way, on one rank.

    Attributes:
        manifest: what is known of it before a byte is written.
        publication: how it becomes a checkpoint.
        writers: the ranks that write.
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
        existing: what it does not write, by path: a checkpoint before has it.
    """

    request: SaveRequest
    manifest: Manifest
    publication: Publication
    writers: tuple[int, ...]
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
    files: Sequence[FilePlan] = ()
    existing: Mapping[str, Existing] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        return self.request.name

    @property
    def path(self) -> Place:
        """The checkpoint's final name."""
        return self.request.destination.path

    @property
    def workspace(self) -> Home:
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
        return self.publication.folder


def failed(request: SaveRequest, error: SafeCheckpointError, rank: int, seconds: float) -> events.Failed:
    """The event of a save that failed ``seconds`` after the call."""
    return events.Failed(
        rank=rank,
        name=request.name,
        step=request.facts.step,
        error=str(error),
        phase=str(getattr(error, "phase", "")),
        seconds=seconds,
        missing=_missing(error),
        outcome_unknown=isinstance(error, CommitOutcomeUnknown),
    )


def _missing(error: BaseException) -> tuple[int, ...]:
    """The ranks that did not come or were lost, also where that is only what the error comes from."""
    for cause in (error, error.__cause__):
        if isinstance(cause, RendezvousTimeout):
            return tuple(cause.missing)
        if isinstance(cause, PeerLostError):
            return tuple(cause.ranks)
    return ()


def since_epoch(moment: float) -> float:
    """A moment of the monotonic clock in seconds since the epoch."""
    return time.time() - (time.monotonic() - moment)
