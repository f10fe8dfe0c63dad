"""Where pins lie: in ``pins/`` of a hidden folder, or of the address of a run in an object store."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from safe_ckpt.core.formats.manifest import MANIFEST_NAME
from safe_ckpt.core.home.home import HIDDEN, HIDDEN_TOO, NAMES, PINS, name_below
from safe_ckpt.core.home.objects.head import in_parallel, read_head
from safe_ckpt.core.storage import presence
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.core.storage.objects.second_look import is_object_there
from safe_ckpt.errors import SafeCheckpointError

SUFFIX = ".pin"
MISSED = ".missed"
_MOST_TOLD = 1000
_ABOVE = 8  # folders between a checkpoint and the hidden folder of its run


class Shelf(Protocol):
    """The pins of one run.

    Attributes:
        place: the folder, which need not be there.
    """

    @property
    def place(self) -> Place:
        """See above."""

    def name_of(self, place: Place) -> str:
        """Return the name of a checkpoint as pins have it; "" for one that lies elsewhere."""

    def read(self) -> tuple[dict[str, bytes], list[str]]:
        """Return all pins that are there, by the names of their files; and the names of other files.

        Raises:
            OSError: they could not be read.
        """

    def write(self, name: str, data: bytes) -> None:
        """Put a file there, as a whole, in place of the one of this name.

        Raises:
            OSError: that is not allowed, or not possible now.
        """

    def renew(self, name: str, data: bytes) -> None:
        """Show a sign of life: as ``write``, where a few digits of the file differ.

        Raises:
            OSError: that is not possible now.
        """

    def told(self, name: str) -> bytes:
        """Return one file; b"" where it is not there.

        Raises:
            OSError: it could not be read.
        """

    def remove(self, names: Sequence[str]) -> None:
        """Take files away, and the folder if it is empty then.

        Raises:
            OSError: that is not possible now.
        """

    def undecided(self, name: str) -> set[str]:
        """Return deletions under way that may not have looked at the pins since: they may be of this checkpoint.

        Raises:
            OSError: that cannot be looked at.
        """


class FileShelf:
    """See ``Shelf``: in a file system.

    Args:
        hidden: the hidden folder of the run.
    """

    def __init__(self, hidden: Path) -> None:
        self._hidden = hidden.parents[1] if hidden.parent.name == NAMES else hidden
        self._top = self._hidden.parent
        self.place = self._hidden / PINS

    def name_of(self, place: Place) -> str:
        """See ``Shelf``. Two paths may lead there: the one that the job took, and the reader's."""
        name = name_below(self._top, place)
        if name is None and isinstance(place, Path):
            name = name_below(Path(os.path.realpath(self._top)), Path(os.path.realpath(place.parent), place.name))
        return name or ""

    def read(self) -> tuple[dict[str, bytes], list[str]]:
        """See ``Shelf``. A file that nobody may read holds nothing."""
        try:
            there = sorted(os.listdir(self.place))
        except FileNotFoundError:
            return {}, []
        found, folder = {}, f"{self.place}/"
        for name in there:
            if name.endswith(SUFFIX):
                with contextlib.suppress(FileNotFoundError, PermissionError), open(folder + name, "rb", 0) as file:
                    found[name] = file.read()
        return found, [name for name in there if not name.endswith(SUFFIX)]

    def write(self, name: str, data: bytes) -> None:
        """See ``Shelf``."""
        staged = self.place / f".{name}.{uuid.uuid4().hex[:8]}"
        try:
            staged.write_bytes(data)
        except FileNotFoundError:
            self.place.mkdir(exist_ok=True)  # not the folders above: without them there is no run
            with contextlib.suppress(OSError):  # whoever may write beside it may write in it
                self.place.chmod(stat.S_IMODE(self._hidden.stat().st_mode))
            staged.write_bytes(data)
        try:
            staged.chmod(0o644)
            os.rename(staged, self.place / name)
        except BaseException:
            with contextlib.suppress(OSError):
                staged.unlink()
            raise

    def renew(self, name: str, data: bytes) -> None:
        """See ``Shelf``. In place: a list that is made meanwhile has it in any file system, and so does a read."""
        with contextlib.suppress(FileNotFoundError), presence.opened(self.place / name, os.O_WRONLY) as fd:
            if os.fstat(fd).st_size == len(data):
                os.pwrite(fd, data, 0)
                return
        self.write(name, data)

    def told(self, name: str) -> bytes:
        """See ``Shelf``."""
        try:
            return (self.place / name).read_bytes()
        except FileNotFoundError:
            return b""

    def remove(self, names: Sequence[str]) -> None:
        """See ``Shelf``."""
        for name in names:
            (self.place / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others have theirs in it
            self.place.rmdir()

    def undecided(self, name: str) -> set[str]:
        """See ``Shelf``. Whoever deletes makes an empty folder in the trash, looks at the pins, and renames into it."""
        trashes = [self._hidden / "trash", self._hidden / NAMES / name / "trash"]
        bins = [one for trash in trashes for one in presence.entries_in(trash)]
        empty = set()
        for one in bins:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if not os.listdir(one):
                    empty.add(str(one))
        return empty


class ObjectShelf:
    """See ``Shelf``: in an object store.

    Args:
        run: the address of the run.
    """

    def __init__(self, run: ObjectPath) -> None:
        self._run = run
        self._bucket = run.bucket
        self.place: ObjectPath = run / HIDDEN / PINS
        self._bucket = run.bucket

    def name_of(self, place: Place) -> str:
        """See ``Shelf``."""
        return name_below(self._run, place) or ""

    def read(self) -> tuple[dict[str, bytes], list[str]]:
        """See ``Shelf``."""
        there = [entry.key.rpartition("/")[2] for entry in self._bucket.entries(self.place.key)]
        names = [name for name in there if name.endswith(SUFFIX)]
        found = {name: data for name, data in zip(names, in_parallel(self.told, names), strict=True) if data}
        return found, [name for name in there if not name.endswith(SUFFIX)]

    def write(self, name: str, data: bytes) -> None:
        """See ``Shelf``."""
        self._bucket.overwrite((self.place / name).key, data)

    def renew(self, name: str, data: bytes) -> None:
        """See ``Shelf``."""
        self.write(name, data)

    def told(self, name: str) -> bytes:
        """See ``Shelf``."""
        try:
            return self._bucket.read((self.place / name).key)[0]
        except FileNotFoundError:
            return b""

    def remove(self, names: Sequence[str]) -> None:
        """See ``Shelf``."""
        if names:
            self._bucket.delete([(self.place / name).key for name in names])

    def undecided(self, name: str) -> set[str]:
        """See ``Shelf``. Whoever deletes says so in the head, looks at the pins, and deletes the manifest or takes it back."""
        head = read_head(self._run)
        leaving = head is not None and name in head.trash
        return {name} if leaving and is_object_there(self._run / name / MANIFEST_NAME) else set()


def shelf_of(checkpoint: Place, *, ours: bool) -> Shelf | None:
    """Where a reader's pin of a checkpoint goes; None where no job of ours has ever worked: nobody would heed it.

    Args:
        checkpoint: which one.
        ours: whether it is of a run of ours whose hidden folder lies in the run, and may have to be made again: a job that
            ends takes away what is empty.

    Raises:
        OSError: that cannot be looked at, or made.
    """
    if not isinstance(checkpoint, Path):
        return ObjectShelf(checkpoint.parent)
    for above in (checkpoint.parent, *(checkpoint.absolute().parents[1:_ABOVE])):
        for hidden in (above / HIDDEN, above / HIDDEN_TOO):
            if presence.is_directory(hidden):
                return FileShelf(hidden)
    if not ours:
        return None
    (checkpoint.parent / HIDDEN).mkdir(exist_ok=True)
    return FileShelf(checkpoint.parent / HIDDEN)


def shelves_of(run: Place, hidden: Sequence[Path]) -> list[Shelf]:
    """Where readers of a directory may have their pins.

    Args:
        run: the directory.
        hidden: in a file system its hidden folders.
    """
    return [FileShelf(one) for one in hidden] if isinstance(run, Path) else [ObjectShelf(run)]


def told_of(data: bytes) -> list[dict[str, object]]:
    """Parse what the side that deletes has told a reader; nothing where it is torn."""
    try:
        said = json.loads(data)
        return [one for one in said if isinstance(one, dict)] if isinstance(said, list) else []
    except (ValueError, RecursionError, SafeCheckpointError):
        return []


def to_tell(before: Sequence[Mapping[str, object]], more: Sequence[Mapping[str, object]]) -> bytes:
    """Return the content of the file by which a reader is told what it missed."""
    names = {str(one.get("name")) for one in before}
    return json.dumps([*before, *(one for one in more if str(one.get("name")) not in names)][-_MOST_TOLD:]).encode()
