"""One directory of checkpoints, in a file system or in an object store: what whoever saves, resumes or deletes may ask of it.

Nobody who uses a home asks which storage it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from safe_ckpt.config import Timeouts
from safe_ckpt.core.formats.manifest import CheckpointInfo, FileEntry, Manifest
from safe_ckpt.core.storage import presence
from safe_ckpt.core.storage.durable import Link
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.core.storage.presence import Stamp
from safe_ckpt.core.storage.source import in_files
from safe_ckpt.errors import SafeCheckpointError

HIDDEN = ".safe_ckpt"
HIDDEN_TOO = "_safe_ckpt"
"""For the Transformers Trainer, which would push what begins with a dot."""
NAMES = "names"
"""In the hidden folder: those of checkpoints that jobs hold by their names, each with a lock of its own."""
PINS = "pins"
"""In the hidden folder: what readers hold, see ``safe_ckpt.core.home.pins``."""
EVENTS = "events.jsonl"

OnError = Callable[[Any, Exception], None]
SomePlace = TypeVar("SomePlace", Path, ObjectPath)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Something that may be a checkpoint.

    Attributes:
        path: where it is.
        manifest: its manifest if that is in order.
        problem: why it cannot be used, as far as a look at the manifest tells; "" when nothing is wrong so far.
        damaged: the problem is that its bytes are wrong.
        foreign: it was written by another tool.
        step: its training step, or the number in its name, where that is known of one that is foreign or a directory.
        missing: the manifest, or the file as a whole, that was not seen although this may be one of ours; None when nothing
            was missed.
        stamp: of what the manifest was read from, see ``stamp_of``; None where that is not known.
    """

    path: Place
    manifest: Manifest | None = None
    problem: str = ""
    damaged: bool = False
    foreign: bool = False
    step: int = -1
    missing: Path | None = None
    stamp: Stamp | None = None

    @property
    def file_path(self) -> Path:
        """Where it is in a file system.

        Raises:
            TypeError: it is in an object store.
        """
        return in_files(self.path)

    @property
    def number(self) -> int:
        """The number in its name, or its training step; -1 where neither is known."""
        return self.manifest.step if self.manifest is not None and self.step < 0 else self.step

    @property
    def info(self) -> CheckpointInfo | None:
        """The facts that are known without reading its payload."""
        if self.manifest is None:
            return None
        files = self.manifest.files
        size = sum(f.size_bytes for f in files)
        if not files and isinstance(self.path, Path) and not presence.is_directory(self.path):
            size = self.path.stat().st_size
        return CheckpointInfo.of(self.manifest, self.path, size)

    @property
    def summary(self) -> CheckpointInfo:
        """The ``info``; of another tool's checkpoint the little that can be told."""
        if (info := self.info) is not None:
            return replace(info, problem=self.problem) if self.problem else info
        facts: dict[str, Any] = {"metrics": {}, "created_at": "", "world_size": 0, "verified": False}
        size = self.path.stat().st_size if isinstance(self.path, Path) else 0
        return CheckpointInfo(
            path=self.path,
            name=self.path.name,
            step=self.step,
            sequence=0,
            size_bytes=size,
            problem=self.problem,
            **facts,
        )


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """A small file beside checkpoints, such as one that names the newest. It is replaced in one step.

    Attributes:
        path: where.
        data: its content.
        mode: its permissions; None for the usual ones.
        is_for_resume: whether it says what to resume from: it is never one that is marked.
    """

    path: Path
    data: bytes
    mode: int | None = None
    is_for_resume: bool = False


@dataclass(frozen=True, kw_only=True)
class Additions:
    """All that a checkpoint gets at its commit besides the files that the ranks write for it.

    Attributes:
        prefilled: a folder from ``homes.open_folder`` that already holds files of the checkpoint; None for none.
        stamps: of the files in ``prefilled``, by path: it holds these and no others, and none changes before the commit; None
            where the ranks report none of them, and rank 0 hashes what it finds there.
        keep_foreign: predicate: files in the directory that is replaced, of those that no save of ours wrote, for which it is
            true are kept in the new one; None for none.
        links: further names of a single file.
        pointers: small files elsewhere that are replaced once the checkpoint has its name, in this order.
    """

    prefilled: Path | None = None
    stamps: Mapping[str, Stamp] | None = None
    keep_foreign: Callable[[str], bool] | None = None
    links: Sequence[Link] = ()
    pointers: Sequence[Pointer] = ()


@dataclass(frozen=True, kw_only=True)
class NewCheckpoint:
    """All that a publication knows of what is to become a checkpoint.

    Attributes:
        path: the final name.
        manifest: what is known of it before a byte is written.
        op_id: unique to this attempt; "" for the manifest's.
        kind: whether ``path`` becomes a directory with a manifest in it or a single file.
        needed_bytes: what all ranks together will write; 0 where that is not known.
        needed_by_rank: what each of them will; () where that is not known.
        folders: below the checkpoint's directory, for files that go into one.
        additions: what it gets besides.
    """

    path: Place
    manifest: Manifest
    op_id: str = ""
    kind: Literal["directory", "file"] = "directory"
    needed_bytes: int = 0
    needed_by_rank: Sequence[int] = ()
    folders: Sequence[str] = ()
    additions: Additions = field(default_factory=Additions)

    @property
    def attempt(self) -> str:
        """Unique to this attempt; folders are named after it."""
        return self.op_id or self.manifest.op_id


class Publication(Protocol):
    """One save, or one fetched checkpoint, on its way to its name.

    ``folder``, ``folders`` and ``await_folder`` are for any rank, the rest is for rank 0. The methods run on the thread that
    writes.

    Attributes:
        folder: where the files go.
        folders: what is made durable behind the files.
    """

    @property
    def folder(self) -> Place:
        """See above."""

    @property
    def folders(self) -> Sequence[str]:
        """See above."""

    def prepare(self) -> None:
        """Check the space, make the folder, announce the save.

        Raises:
            NotEnoughSpaceError: it does not fit.
            DirectoryInUseError: another job has taken the directory over.
            OSError: the folder cannot be made, or the store gave no answer.
        """

    def await_folder(self, rank: int, left_s: Callable[[], float]) -> None:
        """Wait until this rank sees the folder.

        Raises:
            DirectoryNotSharedError: it does not.
        """

    def commit(
        self, entries: Sequence[FileEntry], sections: Mapping[str, Any], check_still_wanted: Callable[[], None]
    ) -> CheckpointInfo:
        """Check that what was reported is there, and make it a checkpoint, in one step.

        Args:
            entries: the files that the ranks report.
            sections: what the manifest says besides, by the names of its fields.
            check_still_wanted: called while waiting; raises to give up.

        Raises:
            SaveError: a file that was reported is not there, or has another size.
            OSError: it could not be done; ``explain`` says whether it may have been done all the same.
        """

    def abort(self) -> None:
        """It failed: take away what is left of it. Never raises."""

    def clean_up(self) -> None:
        """It is committed: take away what it replaced, and what is left of the attempt. Never raises."""

    def explain(self, error: BaseException, *, rank: int, phase: str) -> SafeCheckpointError | None:
        """Say what an error means: taken over (asked on rank 0), full, outcome unknown. None for one that is not of storage."""


class Home(Protocol):
    """One directory of checkpoints. Reading needs no lock; writing needs that it is held. Rank 0 acts, but for ``begin``.

    Attributes:
        path: where it is.
        last_sequence: the last place in the order of commits that was given out.
        is_mounted: ranks read its files where they lie; from another one a host fetches them.
        is_on_each_host: each host has one of its own, with what its ranks have written; every rank gives it back.
        unsupported: what a checkpoint cannot have here, by the names of the fields of ``Additions``; ``"file"`` is the
            kind.
    """

    is_mounted: ClassVar[bool]
    is_on_each_host: ClassVar[bool]
    unsupported: ClassVar[frozenset[str]]
    last_sequence: int

    @property
    def path(self) -> Place:
        """See above."""

    @property
    def hidden(self) -> Place:
        """The hidden folder."""

    @property
    def is_single_name(self) -> bool:
        """Whether the user names checkpoints one by one, and this was taken for one of them."""

    def open(self, patience_s: float | None = None) -> None:
        """Hold it, and finish or undo what an earlier job left.

        Args:
            patience_s: how long to wait for a holder that cannot be asked; None for as long as its lease says.

        Raises:
            DirectoryError: it cannot be used.
            DirectoryInUseError: a live job holds it.
        """

    def persist(self, seconds: float) -> None:
        """After ``open``: from now on try a request to a store again for so long, but not after ``close``."""

    def close(self) -> None:
        """Give it back."""

    def confirm(self) -> None:
        """Raise ``DirectoryInUseError`` if another job has taken it over."""

    def next_sequence(self) -> int:
        """The next place in the order of commits."""

    def start_after(self, sequence: int) -> None:
        """Everything saved from now on is newer."""

    def name_of(self, place: Place) -> str:
        """Return the name of a checkpoint here: relative to ``path``."""

    def look(self, on_error: OnError | None = None) -> list[Candidate]:
        """The checkpoints in it that are directories, in no order. Needs no lock.

        Args:
            on_error: called with one that cannot be looked at, which is then left out; None to raise instead.

        Raises:
            OSError: it could not be listed.
            UnsupportedFormatError: one is of a newer format version.
        """

    def pinned(self, places: Sequence[Place]) -> Mapping[Place, str]:
        """Return those of ``places``, all that is due to be deleted, that readers hold, and who does.

        Raises:
            OSError: that is not known.
        """

    def discard(self, places: Iterable[Place]) -> Sequence[Place]:
        """Delete checkpoints. Returns those that are gone; a failure is logged, once. One that a reader holds stays.

        Raises:
            DirectoryInUseError: another job has taken the directory over.
        """

    def quarantine(self, place: Place) -> Place:
        """Move a damaged checkpoint out of the way. Returns where it is now.

        Raises:
            DirectoryInUseError: another job has taken the directory over.
            OSError: it could not be moved.
        """

    def quarantined(self) -> Sequence[Place]:
        """Return the places in quarantine."""

    def abandon(self, prefilled: Path | None) -> None:
        """Remove a folder that was made for hooks and will not be published, see ``open_folder``. Never raises."""

    def begin(self, new: NewCheckpoint, timeouts: Timeouts) -> Publication:
        """Return the publication by which this becomes a checkpoint here. On every rank; it makes nothing yet."""

    def serve(self, action: str, answer: Callable[[Mapping[str, Any]], Any]) -> None:
        """On every rank: what a host does when rank 0 asks for ``action``, where each host has a directory of its own."""

    def send_elsewhere(self, asked: Copies) -> Sequence[FileEntry]:
        """Have files that are on other hosts alone copied from there. Returns them, as they were read; () where there are none.

        Raises:
            IncompleteCheckpointError: no host has one of them.
        """

    def fetch_elsewhere(self, publication: Publication, manifest: Manifest, source: Place) -> Sequence[FileEntry]:
        """Have other hosts fetch what their ranks read, for ``publication``. Returns what is to be fetched to this one."""


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Files that hosts send somewhere, each those that it has.

    Attributes:
        path: the checkpoint.
        manifest: its manifest.
        folder: where the files go.
        folders: what is made durable behind them.
        check: called while waiting; raises to give up.
    """

    path: Path
    manifest: Manifest
    folder: Place
    folders: Sequence[str]
    check: Callable[[], None]


class HeldHome(Generic[SomePlace]):
    """The part that the homes of both storages share.

    Attributes:
        last_sequence: see ``Home``.
    """

    is_on_each_host: ClassVar[bool] = False

    def __init__(self) -> None:
        self.last_sequence = 0
        self._told: set[SomePlace] = set()

    def start_after(self, sequence: int) -> None:
        """See ``Home``."""
        self.last_sequence = max(self.last_sequence, sequence)

    def next_sequence(self) -> int:
        """See ``Home``. Given out while it is held; a failed save leaves a gap."""
        self.last_sequence = sequence_after(self.last_sequence)
        return self.last_sequence

    def serve(self, action: str, answer: Callable[[Mapping[str, Any]], Any]) -> None:
        """See ``Home``. Nobody asks."""

    def send_elsewhere(self, asked: Copies) -> Sequence[FileEntry]:
        """See ``Home``. All is here."""
        del asked
        return ()

    def fetch_elsewhere(self, publication: Publication, manifest: Manifest, source: Place) -> Sequence[FileEntry]:
        """See ``Home``. All comes here."""
        del publication, source
        return manifest.files

    def _discard_each(self, places: Iterable[SomePlace], discard: Callable[[SomePlace], None]) -> list[SomePlace]:
        """Delete them one by one. Returns those that are gone; a failure is logged, once."""
        gone = []
        for place in places:
            try:
                discard(place)
            except OSError as error:
                if isinstance(error, FileNotFoundError) and isinstance(place, Path):
                    continue  # somebody was faster; of a store it says that the bucket is missing
                if place not in self._told:
                    logger.warning("%s could not be removed and stays: %s. The next commit tries again", place, error)
                self._told.add(place)
                continue
            self._told.discard(place)
            gone.append(place)
        return gone


def sequence_after(last: int) -> int:
    """The place in the order of commits behind ``last``.

    Never below the clock: jobs that save in one folder may not know of each other, and their numbers are compared.
    """
    return max(last + 1, int(time.time() * 1000))


def is_anything_at(place: Place) -> bool:
    """Whether there is anything at a place. In a store there are no folders: anything may be.

    Raises:
        OSError: it cannot be looked at.
    """
    return not isinstance(place, Path) or presence.is_there(place)


def around(place: Place) -> list[Place]:
    """A place, and those that it lies in. In a store that costs a request each, so there it is the place alone."""
    return [place, *place.parents] if isinstance(place, Path) else [place]


def is_run(place: Place) -> bool:
    """Whether a job held, or holds, a place as a directory of checkpoints. In a store that is not looked at."""
    return isinstance(place, Path) and any(presence.is_seen(place / name) for name in (HIDDEN, HIDDEN_TOO))


def name_below(top: Place, place: Place) -> str | None:
    """Return the name of a place relative to one above it; None where that is not above."""
    if isinstance(top, Path):
        return place.relative_to(top).as_posix() if isinstance(place, Path) and place.is_relative_to(top) else None
    key = f"{top.key}/" if top.key else ""
    return place.key.removeprefix(key) if isinstance(place, ObjectPath) and place.key.startswith(key) else None
