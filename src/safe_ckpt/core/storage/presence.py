"""Looking at files: is something there, and still the same? Only "there is no such entry" means no; other errors are raised.

``pathlib`` treats some errors as "not there", and since Python 3.14 all of them. So a disk that fails for a moment would make a
good checkpoint vanish.

Here is also the one way from a name that was read to a path: of a manifest, an index, a pointer, a note, a head, of
``.metadata``. Whoever writes such a file chooses the names in it. Joined without a look, one leads anywhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.errors import HostileCheckpointError

_Place = TypeVar("_Place", Path, ObjectPath)
_ABSOLUTE = re.compile(r"[/\\]|[A-Za-z]:[/\\]")

_TAIL_BYTES = (1 << 16) + 22  # of a zip archive: the longest comment, and the end record before it
_END_RECORD = b"PK\5\6"


class ShortReadError(OSError):
    """A read ended before the file does: a network file system has another file in its cache, or fails. No damage."""

    def __init__(self, path: str, at: int) -> None:
        super().__init__(errno.EIO, f"a read ended at {at}, before the file does", path)


@contextlib.contextmanager
def opened(path: Path | str, flags: int, mode: int = 0o666, dir_fd: int | None = None) -> Iterator[int]:
    """The descriptor of a file, which is closed in the end; for the arguments see ``os.open``."""
    fd = os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def is_there(path: Path) -> bool:
    """Whether ``path`` exists, links followed.

    Raises:
        OSError: it could not be looked at.
    """
    return _mode(path) is not None


def is_seen(path: Path) -> bool:
    """Ask as ``is_there`` does; False where it cannot be looked at now: the file system may be unavailable for a moment."""
    try:
        return is_there(path)
    except OSError:
        return False


def is_file(path: Path) -> bool:
    """Whether ``path`` is a regular file, links followed; raises as ``is_there`` does."""
    return stat.S_ISREG(_mode(path) or 0)


def is_directory(path: Path) -> bool:
    """Whether ``path`` is a directory, links followed; raises as ``is_there`` does."""
    return stat.S_ISDIR(_mode(path) or 0)


def is_mounted(path: Path) -> bool:
    """Whether a file system is mounted at ``path``, or a folder of one, such as the volume of a container."""
    try:
        table = Path("/proc/self/mountinfo").read_bytes()
    except OSError:
        return os.path.ismount(path)
    place = re.sub(rb"[\\ \t\n]", lambda found: b"\\%03o" % ord(found[0]), os.fsencode(os.path.realpath(path)))
    return any(line.split(b" ")[4] == place for line in table.splitlines())


def is_gone(path: Path) -> bool:
    """Whether ``path``, which was not found, is not there: the folder above can be listed and does not name it.

    Raises:
        OSError: the folder cannot be listed, or names what cannot be opened.
    """
    for child in (path, *path.parents):
        try:
            names = os.listdir(child.parent)
        except (FileNotFoundError, NotADirectoryError):
            continue  # the folder itself is not there: the one above it has to say so
        if child.name not in names:
            return True
        try:
            child.lstat()
        except FileNotFoundError:
            message = "its directory names it, and it cannot be opened"
            raise OSError(errno.ESTALE, message, str(child)) from None
        return _mode(path) is None
    return True


def entries_in(folder: Path) -> list[Path]:
    """List the entries of a folder; none where it is missing.

    Raises:
        OSError: it cannot be listed, or is none.
    """
    try:
        return [folder / name for name in os.listdir(folder)]
    except FileNotFoundError:
        return []


def ends_as_archive(path: Path) -> bool:
    """Ask as ``zipfile.is_zipfile`` does, which treats every error as "no".

    Raises:
        OSError: it could not be read.
    """
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        stream.seek(max(0, size - _TAIL_BYTES))
        tail = stream.read(_TAIL_BYTES)
    if len(tail) < min(size, _TAIL_BYTES):
        raise ShortReadError(str(path), size - _TAIL_BYTES + len(tail))
    return _END_RECORD in tail


def _mode(path: Path) -> int | None:
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link in a circle leads nowhere
            return None
        raise


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """Facts of a file that change when it does. ``of`` reads them; two that are equal stand for the same bytes.

    A file's times are those of the kernel's last tick: a file that changed within ``racy_ns`` of being looked at may change
    once more without showing it.
    """

    size_bytes: int
    device: int
    inode: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """From what ``os.stat`` returned."""
        return cls(
            size_bytes=status.st_size,
            device=status.st_dev,
            inode=status.st_ino,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
        )

    @property
    def everywhere(self) -> Stamp:
        """The part that all hosts see alike of a file that they share: its size and when it was written."""
        return replace(self, device=0, inode=0, ctime_ns=0)


def can_be_held(place: Place) -> bool:
    """Whether the bytes of what lies there stay as long as it is open, whoever deletes its name. Not those of an object."""
    return isinstance(place, Path)


def stamp_at(place: Place) -> Stamp | None:
    """Return the stamp of a file; None where there is none: it is gone, or is an object."""
    try:
        return Stamp.of(os.stat(place)) if isinstance(place, Path) else None
    except OSError:
        return None


def hold(places: Iterable[Place], known: Stamp | None, size_bytes: int) -> int | None:
    """Open the first of these that was not touched since: as long as it is open its bytes cannot vanish.

    The ctime tells nothing: a further name changes that.

    Args:
        places: names of the file; some may be gone, or another file's by now.
        known: its stamp then; None where that is not known.
        size_bytes: how long it was when it was written.

    Returns:
        The descriptor; None if there is none.
    """
    if known is None or known.size_bytes != size_bytes:
        return None
    for place in places:
        try:
            with opened(str(place), os.O_RDONLY | os.O_NOFOLLOW) as fd:
                if _facts(Stamp.of(os.fstat(fd))) == _facts(known):
                    return os.dup(fd)
        except OSError:
            continue
    return None


def _facts(stamp: Stamp) -> tuple[int, ...]:
    return stamp.size_bytes, stamp.device, stamp.inode, stamp.mtime_ns


def checked_name(name: object, of: Place | str = "", file: str = "") -> str:
    """A name that was read, if it leads to something within the folder that it is read for.

    Args:
        name: relative, with forward slashes.
        of: the checkpoint or directory, for the error.
        file: where the name stands, for the error.

    Raises:
        HostileCheckpointError: it is absolute, empty, no text, has ``..`` or an empty part, or is no name for any file.
    """
    if isinstance(name, str) and "\0" not in name and not _ABSOLUTE.match(name):
        parts = name.split("/")
        if all(parts) and ".." not in re.split(r"[/\\]", name) and any(part != "." for part in parts):
            return name
    message = f"a name that is read from it leads out of it: {name!r:.200}"
    raise HostileCheckpointError(path=str(of), file=file, message=message)


def inside(folder: _Place, name: object, file: str = "") -> _Place:
    """The path of a name that was read, in ``folder``. Links on the way to it are not looked at.

    Raises:
        HostileCheckpointError: see ``checked_name``.
    """
    return folder / checked_name(name, folder, file)


def really_inside(folder: Path, name: object, file: str = "") -> Path:
    """Check as ``inside`` does, before a file is opened, linked or removed: no link on the way leads out of ``folder`` either.

    Raises:
        HostileCheckpointError: it leads out.
        OSError: it could not be looked at.
    """
    path = inside(folder, name, file)
    if path.parent == folder:
        return path
    home = os.path.realpath(folder)
    if os.path.commonpath([home, os.path.realpath(path.parent)]) != home:
        message = f"a name that is read from it leads out of it, through a link: {name!r:.200}"
        raise HostileCheckpointError(path=str(folder), file=file, message=message)
    return path
