"""The request for a save: where to, of what, and with which settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from safe_ckpt.core.formats.file_plan import FilePlan
from safe_ckpt.core.formats.manifest import Manifest
from safe_ckpt.core.home.home import Additions, Home, NewCheckpoint
from safe_ckpt.core.home.retention import RetentionPolicy
from safe_ckpt.core.home.standing import Catalog
from safe_ckpt.core.saving.handle import OpenSave
from safe_ckpt.core.state.overlap import OverlapPlan
from safe_ckpt.core.storage.copier import FileCopy
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.errors import (
    StateError,
)


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Where a checkpoint goes.

    Attributes:
        home: the directory that is held.
        path: the final name.
        kind: whether ``path`` becomes a directory with a manifest in it or a single file.
    """

    home: Home
    path: Place
    kind: Literal["directory", "file"]

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a kind that there is not, or not there."""
        if self.kind in self.home.unsupported:
            raise ValueError("kind: an object store has directories only")
        if self.kind not in ("directory", "file"):
            raise ValueError(f'kind: expected "directory" or "file", got {self.kind!r}')


@dataclass(frozen=True, kw_only=True)
class Payload:
    """The part of a save that one rank writes. One of the classes below says how.

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
class Snapshot(Payload):
    """Tensors are copied to host memory, and written from there after ``save`` has returned.

    Attributes:
        overlap: which tensors may be copied after ``save`` has returned; None for none.
    """

    overlap: OverlapPlan | None = None


@dataclass(frozen=True, kw_only=True)
class Streamed(Payload):
    """Tensors are written while the caller waits, without a copy; the only way for files with lazy tensors.

    Attributes:
        feed: run on the caller's thread meanwhile; it provides what lazy tensors fetch. None where they fetch by themselves,
            else every rank has one. It raises only when it was interrupted.
    """

    feed: Callable[[OpenSave], None] | None = None

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for copies: they are read on the thread that streams."""
        if self.copies or self.in_place:
            raise ValueError("copies, in_place: files cannot be read in a save that is streamed")


@dataclass(frozen=True, kw_only=True)
class PlanningFailed(Payload):
    """No payload: this rank could not plan it.

    Attributes:
        error: why; every rank raises it.
    """

    error: Exception


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a checkpoint for its manifest.

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
class OnCommit(Additions):
    """Further work of rank 0 at the commit: what the checkpoint gets, and what is deleted for it.

    Attributes:
        catalog: gets the commit; None for no catalog.
        retention: decides what is deleted then; None deletes nothing.

    Example:
        ```python
        from safe_ckpt.adapters.extras import policy_of

        on_commit = OnCommit(retention=policy_of(Retention(keep_last=3)))  # for Saver.save
        ```
    """

    catalog: Catalog | None = None
    retention: RetentionPolicy | None = None


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """One save as an adapter asks for it, on one rank.

    Attributes:
        destination: where the checkpoint goes.
        payload: what this rank writes.
        facts: what the manifest says.
        must_match: what must be equal on all ranks besides step and path. Compared when every rank could plan its payload.
        held: what this rank holds of what rank 0 saves for all, by item; see ``planner.held_by_this_rank``.
        on_commit: what is done at the commit besides.
        patient: wait for saves that are in flight, also where ``on_busy`` says to skip.
    """

    destination: Destination
    payload: Payload
    facts: Facts
    must_match: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[str, Sequence[str]] = field(default_factory=dict)
    on_commit: OnCommit = field(default_factory=OnCommit)
    patient: bool = False

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a single file, or an object store, with what only a directory can have."""
        payload, on_commit = self.payload, self.on_commit
        unsupported = sorted(self.destination.home.unsupported - {"file"})
        if names := [name for name in unsupported if getattr(on_commit, name)]:
            raise ValueError(f"{', '.join(names)}: an object store has none of these")
        if self.destination.kind == "directory":
            return
        wrong = {
            "folders": payload.folders,
            "prefilled": on_commit.prefilled,
            "keep_foreign": on_commit.keep_foreign,
            "pointers": on_commit.pointers,
        }
        if names := [name for name, value in wrong.items() if value]:
            raise ValueError(f"{', '.join(names)}: only a checkpoint that is a directory has these")

    @property
    def error(self) -> Exception | None:
        """Why this rank could not plan its payload."""
        return self.payload.error if isinstance(self.payload, PlanningFailed) else None

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        return self.destination.path.name

    def new(self, manifest: Manifest, needed_by_rank: Sequence[int]) -> NewCheckpoint:
        """Return what a publication is told of this save."""
        return NewCheckpoint(
            path=self.destination.path,
            manifest=manifest,
            kind=self.destination.kind,
            needed_bytes=sum(needed_by_rank),
            needed_by_rank=needed_by_rank,
            folders=self.payload.folders,
            additions=self.on_commit,
        )


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
