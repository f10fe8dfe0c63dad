"""Who holds a directory, a name in it or what is around it; and holding all of that at once, to delete there.

A job holds the whole directory, or the checkpoints that it names one by one, each with a lock of its own. A command that
deletes takes them all: first the directory's, then those of all names in it, then that of each name that it deletes. A job
takes one of them before it writes, so one of the two sees the other.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path

from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.core.home.file_home import Workspace
from safe_ckpt.core.home.file_lock import LEASE_S
from safe_ckpt.core.home.home import HIDDEN, HIDDEN_TOO, NAMES
from safe_ckpt.core.home.lease import Lease, fate_of, read_lock, take_away
from safe_ckpt.core.home.standing import still_has_its_name
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
    alive = {"alive": True, "dead": False, "unknown": None}[fate_of(lease, hidden)]
    return Holder(host=lease.host, pid=lease.pid, started_at=lease.started_at, alive=alive, lease_s=lease.lease_s)


def remove_lock(hidden: Path) -> None:
    """Take the lock away from its holder. A job that is alive notices before its next commit, and fails.

    Args:
        hidden: where the lock lives.

    Raises:
        OSError: it could not be removed.
    """
    take_away(hidden, lambda _: True)


def hidden_folders(directory: Path) -> list[Path]:
    """Where the locks and unfinished saves of ``directory`` lie: in it, and for Accelerate's ``checkpoints`` beside it."""
    places = [directory / HIDDEN, directory / HIDDEN_TOO]
    resolved = directory.resolve()
    if resolved.name == _CHECKPOINTS:
        places.append(resolved.parent / HIDDEN)
    return [place for place in places if place.is_dir()]


def locks_of(directory: Path) -> list[Path]:
    """The hidden folders whose locks keep others out of ``directory``, or of a name in it; its own come first."""
    found, resolved = hidden_folders(directory), directory.resolve()
    beside = resolved.parent / HIDDEN / NAMES / resolved.name
    names = [name for hidden in found if hidden.parent.resolve() == resolved for name in _names_in(hidden)]
    return [*found, *names, *([beside] if beside.is_dir() and not beside.is_symlink() else [])]


def holders(directory: Path) -> dict[Path, Holder]:
    """Who holds the directory, or a name in it, by the hidden folder in which the lock lies. Only read.

    Raises:
        OSError: a lock is there and could not be read.
    """
    return {place: holder for place in locks_of(directory) if (holder := holder_of(place)) is not None}


def _names_in(hidden: Path) -> list[Path]:
    try:
        return sorted(path for path in (hidden / NAMES).iterdir() if path.is_dir() and not path.is_symlink())
    except (FileNotFoundError, NotADirectoryError):
        return []


class WholeDirectory:
    """A directory of checkpoints that is held with every name in it, from ``open`` to ``close``.

    Args:
        path: the directory.
        lease_s: see ``CheckpointConfig``.
    """

    def __init__(self, path: Path, *, lease_s: float) -> None:
        self._path = path
        self._lease_s = lease_s
        self._held: list[Workspace] = []

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

    def delete(self, info: CheckpointInfo) -> bool:
        """Delete a checkpoint if it is still this save, and no job holds its name. Returns whether it is gone.

        Raises:
            DirectoryInUseError: a job took the directory over.
        """
        path = info.file_path
        with contextlib.ExitStack() as stack:
            try:
                name = self._path / HIDDEN / NAMES / path.name
                is_named = path.parent == self._path and (self._path / HIDDEN).is_dir()
                if is_named and all(name != one.hidden for one in self._held):
                    stack.callback(self._taken(name, patience_s=0.0).close)
                self._refuse_held_below(path)
            except SafeCheckpointError as error:
                logger.warning("%s is not deleted: %s", path, error)
                return False
            return still_has_its_name(info) and bool(self._held[0].discard([path]))

    def discard(self, path: Path) -> bool:
        """Delete what is no checkpoint of a job's. Returns whether it is gone."""
        return bool(self._held[0].discard([path]))

    def _taken(self, hidden: Path, patience_s: float | None = None) -> Workspace:
        beside = self._path.resolve().parent / HIDDEN / NAMES
        path = self._path.parent if hidden.parent == beside else self._path
        workspace = Workspace(path, lease_s=self._lease_s, hidden=hidden)
        workspace.open(patience_s)
        return workspace

    def _refuse_held_above(self) -> None:
        """A job of Lightning's may save below the directory that it holds, down to folders that others hold themselves.

        It may have come by a link, and so may the path that is given here: both ways up count.
        """
        for path in dict.fromkeys((self._path.absolute(), self._path.resolve())):
            above = next((above for above in path.parents if (above / HIDDEN).is_dir()), None)
            if above is not None:
                _refuse(above, above / HIDDEN)

    @staticmethod
    def _refuse_held_below(path: Path) -> None:
        """A job may keep checkpoints of its own in this one, or write weights into it."""
        for hidden in locks_of(path) if path.is_dir() and not path.is_symlink() else ():
            if path in hidden.parents:
                _refuse(path, hidden)


def _refuse(path: Path, hidden: Path) -> None:
    holder = holder_of(hidden)
    if holder is not None and holder.alive is not False:
        message = "it is alive: stop it first" if holder.alive else "whether it is alive is unknown: stop it first"
        raise DirectoryInUseError(
            path=str(path), message=message, host=holder.host or "?", pid=holder.pid, started_at=holder.started_at
        )
