"""Where the files of a checkpoint lie, in a file system or in an object store, and what can be told of them without reading."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from safe_ckpt.core.storage import presence
from safe_ckpt.core.storage.durable import freed_bytes
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.core.storage.objects.second_look import parse_twice
from safe_ckpt.core.storage.presence import really_inside

_T = TypeVar("_T")


class FileFacts(Protocol):
    """A file of a checkpoint, as its manifest has it."""

    @property
    def path(self) -> str:
        """Relative to the checkpoint."""

    @property
    def size_bytes(self) -> int:
        """How long it is."""


def in_files(place: Place) -> Path:
    """``place``, which lies in a file system.

    Raises:
        TypeError: it does not.
    """
    if not isinstance(place, Path):
        raise TypeError(f"{place} does not lie in a file system")
    return place


def in_store(place: Place) -> ObjectPath:
    """``place``, which lies in an object store.

    Raises:
        TypeError: it does not.
    """
    if not isinstance(place, ObjectPath):
        raise TypeError(f"{place} does not lie in an object store")
    return place


def by_storage(place: Place, files: Callable[[Path], _T], store: Callable[[ObjectPath], _T]) -> _T:
    """Return what ``files`` makes of a place in a file system, or ``store`` of one in an object store."""
    return files(place) if isinstance(place, Path) else store(place)


def files_in(places: Iterable[Place]) -> list[Path]:
    """Return those of ``places`` that lie in a file system."""
    return [place for place in places if isinstance(place, Path)]


def has_folder(place: Place) -> bool:
    """Whether a checkpoint there has files in a folder: always in a store.

    Raises:
        OSError: it cannot be looked at.
    """
    return not isinstance(place, Path) or presence.is_directory(place)


def file_in(folder: Place, name: str, *, links: bool = False) -> Place:
    """A file of a checkpoint. ``links``: a link to it will do, wherever it leads.

    Raises:
        HostileCheckpointError: a link leads out of the folder.
    """
    return really_inside(folder, name) if isinstance(folder, Path) and not links else folder / name


def size_of(file: Place, *, links: bool = True) -> int:
    """How many bytes it has; -1 if it is no regular file. ``links``: a link counts as what it leads to.

    Raises:
        FileNotFoundError: it is not there.
        OSError: it cannot be looked at, or the store gave no answer.
    """
    if isinstance(file, ObjectPath):
        return file.bucket.size_of(file.key)
    status = file.stat(follow_symlinks=links)
    return status.st_size if stat.S_ISREG(status.st_mode) else -1


def sizes_in(folder: Place, names: Iterable[str]) -> dict[str, int]:
    """The sizes of those of the files that are there; in a store by one request, and old answers are possible.

    Raises:
        OSError: one cannot be looked at, or the store gave no answer.
    """
    if isinstance(folder, ObjectPath):
        there = {entry.key: entry.size_bytes for entry in folder.bucket.entries(folder.key)}
        return {name: there[key] for name in names if (key := (folder / name).key) in there}
    found = {}
    for name in names:
        try:
            found[name] = size_of(folder / name)
        except (FileNotFoundError, NotADirectoryError):
            continue
    return found


def shared_bytes(folder: Place, entries: Iterable[FileFacts]) -> int:
    """How many bytes of these files other checkpoints have, too: files with further names."""
    total = 0
    if not isinstance(folder, Path):
        return total
    for entry in entries:
        with contextlib.suppress(OSError):  # it is missing, or a live job has just deleted the checkpoint
            total += entry.size_bytes if (folder / entry.path).stat().st_nlink > 1 else 0
    return total


def frees_bytes(places: Sequence[Place], sizes: Mapping[Place, int]) -> int:
    """Return how much room it gives to delete checkpoints. A shared file frees nothing as long as one name is left.

    Args:
        places: the checkpoints.
        sizes: how many bytes those have that are known.
    """
    return freed_bytes(files_in(places)) + sum(sizes.get(place, 0) for place in places if not isinstance(place, Path))


def place_named(text: str, beside: Place | None) -> Place:
    """Return the place that a path or an address names, in the same file system or bucket as ``beside``.

    Raises:
        ValueError: the address is of another bucket.
    """
    return beside.at(text) if isinstance(beside, ObjectPath) else Path(text)


def parsed(file: Place, parse: Callable[[bytes], _T], read: Callable[[Path], bytes]) -> _T:
    """Parse a small file. In a store it is read once more where that fails: an answer may be wrong once.

    Args:
        file: where it is.
        parse: makes something of its bytes.
        read: reads it in a file system.

    Raises:
        FileNotFoundError: it is not there.
        OSError: it could not be read.
    """
    return parse_twice(file, parse) if isinstance(file, ObjectPath) else parse(read(file))
