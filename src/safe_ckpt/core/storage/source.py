"""Where the files of a checkpoint lie, in a file system or in an object store, and what can be told of them without reading."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path

from safe_ckpt.core.storage import presence
from safe_ckpt.core.storage.inside import really_inside
from safe_ckpt.core.storage.objects.place import ObjectPath, Place


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


def is_directory(place: Place) -> bool:
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
