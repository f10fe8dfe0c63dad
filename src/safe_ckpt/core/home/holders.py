"""Who holds a directory, a name in it or what is around it; and holding all of that at once, to delete there.

A job holds the whole directory, or the checkpoints that it names one by one, each with a lock of its own. A command that
deletes takes them all: first the directory's, then those of all names in it, then that of each name that it deletes. A job
takes one of them before it writes, so one of the two sees the other.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.home.file_lock import LEASE_S, fate_of, read_lock, take_away
from safe_ckpt.core.home.home import HIDDEN, HIDDEN_TOO, NAMES
from safe_ckpt.core.home.lease import Fate, Lease, fate_of_process
from safe_ckpt.core.home.objects import lock as object_lock
from safe_ckpt.core.home.standing import still_has_its_name
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.presence import entries_in, is_directory, is_seen
from safe_ckpt.core.storage.source import in_files, in_store
from safe_ckpt.errors import DirectoryInUseError, SafeCheckpointError

logger = logging.getLogger(__name__)
_CHECKPOINTS = "checkpoints"  # of Accelerate's automatic naming, whose hidden folder lies beside it


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a directory.

    Attributes:
        host: where; "" where the lock file names nobody: a job writes it at this moment, or was killed before it did.
        pid: which process there; 0 where the lock file names nobody.
        started_at: since when, ISO 8601; "?" where that is not recorded.
        alive: False when it is gone, so that the next job takes the lock over at once; None when that is not known from
            here.
        lease_s: how long a holder that cannot be asked may show no sign of life before the next job takes over.
    """

    host: str
    pid: int
    started_at: str
    alive: bool | None
    lease_s: float


def holder_of(hidden: Path | None) -> Holder | None:
    """Who holds the directory; None when nobody does. Only read: the lock stays as it is.

    Args:
        hidden: where the lock lives; None where there never was one.

    Raises:
        OSError: the lock file is there and could not be read.
    """
    data = read_lock(hidden) if hidden is not None else None
    if hidden is None or data is None:
        return None
    lease = Lease.from_bytes(data)
    if lease is None:
        return Holder(host="", pid=0, started_at="?", alive=None, lease_s=LEASE_S)
    return _holder(lease, fate_of(lease, hidden))


def _holder(lease: Lease, fate: Fate) -> Holder:
    alive = {"alive": True, "dead": False, "unknown": None}[fate]
    return Holder(host=lease.host, pid=lease.pid, started_at=lease.started_at, alive=alive, lease_s=lease.lease_s)


@dataclass(frozen=True, kw_only=True)
class Held:
    """One lock.

    Attributes:
        place: the directory, or the checkpoint in it, that is held.
        lock: the hidden folder in which the lock lies.
        holder: by which job.
    """

    place: Place
    lock: Place
    holder: Holder

    def take_away(self, *, unfenced: bool = False) -> None:
        """Take the lock away from its holder. A job that is alive notices before its next commit, and fails.

        Args:
            unfenced: the store keeps no conditions.

        Raises:
            OSError: it could not be removed, or the store gave no answer.
        """
        if isinstance(self.lock, Path):
            take_away(self.lock, lambda _: True)
        else:
            object_lock.take_directory_away(in_store(self.place), unfenced=unfenced)


def hidden_folders(directory: Path) -> list[Path]:
    """Where the locks and unfinished saves of ``directory`` lie: in it, and for Accelerate's ``checkpoints`` beside it."""
    places = [directory / HIDDEN, directory / HIDDEN_TOO]
    resolved = directory.resolve()
    if resolved.name == _CHECKPOINTS:
        places.append(resolved.parent / HIDDEN)
    return [place for place in places if place.is_dir()]


def runs_below(place: Place) -> list[str]:
    """The names of folders in a directory that a job holds, or held, for itself. One that cannot be looked at is left out."""
    folders: list[Path] = []
    if isinstance(place, Path):
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            folders = [Path(entry.path) for entry in entries if entry.is_dir()]
    return sorted(one.name for one in folders if is_seen(one / HIDDEN) or is_seen(one / HIDDEN_TOO))


def locks_of(directory: Path) -> list[Path]:
    """The hidden folders whose locks keep others out of ``directory``, or of a name in it; its own come first."""
    found, resolved = hidden_folders(directory), directory.resolve()
    beside = resolved.parent / HIDDEN / NAMES / resolved.name
    names: list[Path] = []
    for hidden in found:
        if hidden.parent.resolve() == resolved and is_directory(hidden / NAMES):
            names += sorted(one for one in entries_in(hidden / NAMES) if one.is_dir() and not one.is_symlink())
    return [*found, *names, *([beside] if beside.is_dir() and not beside.is_symlink() else [])]


def holders(*directories: Place) -> list[Held]:
    """Who holds these directories, or a name in one: those that may be alive come first. Only read.

    Args:
        directories: names of one directory.

    Raises:
        OSError: a lock is there and could not be read, or the store gave no answer.
    """
    found: dict[object, Held] = {}
    for directory in directories:
        if isinstance(directory, Path):
            for lock in locks_of(directory):
                if (holder := holder_of(lock)) is not None:
                    place = lock.parents[2] / lock.name if lock.parent.name == NAMES else directories[-1]
                    found[lock.resolve()] = Held(place=place, lock=lock, holder=holder)
        elif (lease := object_lock.owner_of(directory)) is not None:
            holder = _holder(lease, fate_of_process(lease))
            found[directory] = Held(place=directory, lock=directory / HIDDEN, holder=holder)
    return sorted(found.values(), key=lambda one: one.holder.alive is False)


class WholeHome(Protocol):
    """A directory of checkpoints that is held with every name in it, from ``open`` to ``close``, to delete there."""

    def open(self) -> None:
        """Take every lock, and sweep what killed jobs left.

        Raises:
            DirectoryInUseError: a live job holds it, or a part of it.
            DirectoryError: the storage refuses.
        """

    def close(self) -> None:
        """Give all of it back."""

    def delete(self, infos: Sequence[CheckpointInfo]) -> list[Place]:
        """Delete those that are still these very saves, and that no job holds. Returns those that are gone.

        Raises:
            DirectoryInUseError: a job took the directory over.
        """

    def discard(self, places: Iterable[Place]) -> Sequence[Place]:
        """Delete what is no checkpoint of a job's. Returns those that are gone."""


def whole_at(place: Place, *, lease_s: float, unfenced: bool = False) -> WholeHome:
    """The whole of a directory. See ``home_at`` for the arguments."""
    if isinstance(place, Path):
        return WholeDirectory(place, lease_s=lease_s)
    from safe_ckpt.core.home.objects.home import ObjectHome

    return ObjectHome(place, lease_s=lease_s, unfenced=unfenced)


class WholeDirectory:
    """See ``WholeHome``: in a file system.

    Args:
        path: the directory.
        lease_s: see ``CheckpointConfig``.
    """

    def __init__(self, path: Path, *, lease_s: float) -> None:
        self._path = path
        self._lease_s = lease_s
        self._held: list[FileHome] = []

    def open(self) -> None:
        """Take every lock, and sweep what killed jobs left.

        Raises:
            DirectoryInUseError: a live job holds the directory, a name in it, or a directory above that reaches down to here.
            DirectoryError: the file system refuses.
        """
        try:
            hidden = hidden_folders(self._path)
            if not hidden:
                self._refuse_held_above()
            places = [*(hidden or [self._path / HIDDEN]), *locks_of(self._path)]
            for place in dict.fromkeys(places):
                self._held.append(self._taken(place))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give all of them back."""
        while self._held:
            self._held.pop().close()

    def delete(self, infos: Sequence[CheckpointInfo]) -> list[Place]:
        """See ``WholeHome``."""
        return [info.path for info in infos if self._delete(info)]

    def _delete(self, info: CheckpointInfo) -> bool:
        path = info.file_path
        with contextlib.ExitStack() as stack:
            try:
                name = self._path / HIDDEN / NAMES / path.name
                is_named = path.parent == self._path and (self._path / HIDDEN).is_dir()
                if is_named and all(name != one.hidden for one in self._held):
                    stack.callback(self._taken(name, patience_s=0.0).close)
                refuse_held_below(path)
            except SafeCheckpointError as error:
                logger.warning("%s is not deleted: %s", path, error)
                return False
            return still_has_its_name(info) and bool(self._held[0].discard([path]))

    def discard(self, places: Iterable[Place]) -> Sequence[Place]:
        """See ``WholeHome``."""
        return self._held[0].discard(places)

    def _taken(self, hidden: Path, patience_s: float | None = None) -> FileHome:
        beside = self._path.resolve().parent / HIDDEN / NAMES
        path = self._path.parent if hidden.parent == beside else self._path
        home = FileHome(path, lease_s=self._lease_s, hidden=hidden)
        home.open(patience_s)
        return home

    def _refuse_held_above(self) -> None:
        """A job of Lightning's may save below the directory that it holds, down to folders that others hold themselves.

        It may have come by a link, and so may the path that is given here: both ways up count.
        """
        for path in dict.fromkeys((self._path.absolute(), self._path.resolve())):
            above = next((above for above in path.parents if (above / HIDDEN).is_dir()), None)
            if above is not None:
                _refuse(above, above / HIDDEN)


def refuse_held_below(path: Place) -> None:
    """Raise if a job that may be alive keeps checkpoints of its own in this one, or writes weights into it.

    No job opens a checkpoint in a store as a run of its own.

    Raises:
        DirectoryInUseError: it does.
        OSError: a lock is there and could not be read.
    """
    for folder, below, _ in os.walk(path) if isinstance(path, Path) and not path.is_symlink() else ():
        for hidden in locks_of(Path(folder)) if {HIDDEN, HIDDEN_TOO} & set(below) else ():
            if path in hidden.parents:
                _refuse(in_files(path), hidden)


def _refuse(path: Path, hidden: Path) -> None:
    holder = holder_of(hidden)
    if holder is not None and holder.alive is not False:
        message = "it is alive: stop it first" if holder.alive else "whether it is alive is unknown: stop it first"
        raise DirectoryInUseError(
            path=str(path), message=message, host=holder.host or "?", pid=holder.pid, started_at=holder.started_at
        )
