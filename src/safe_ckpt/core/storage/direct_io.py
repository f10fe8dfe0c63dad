"""Large aligned writes past the page cache, where the file system takes them. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.errors import SafeCheckpointError

if TYPE_CHECKING:
    from safe_ckpt.config import WriterConfig

logger = logging.getLogger(__name__)
PAGE = 4096
_without_direct: dict[int, str] = {}
_learning = threading.RLock()  # several files are copied at a time


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """How to write. See ``WriterConfig``.

    Attributes:
        direct: past the page cache, where the file system takes it.
        chunk_bytes: how much at a time.
        flush_every_bytes: how often what is in the page cache is sent to the disk.
        replace: whether a file that is there already makes place; else that is an error.
        storage: how object stores are reached; None where no file goes to one.
    """

    direct: bool
    chunk_bytes: int
    flush_every_bytes: int
    replace: bool = True
    storage: StorageOptions | None = None

    @classmethod
    def of(cls, config: WriterConfig, storage: StorageOptions | None = None) -> WriteOptions:
        """From what the user has set."""
        return cls(
            direct=config.direct_io == "auto",
            chunk_bytes=config.chunk_bytes,
            flush_every_bytes=config.flush_every_bytes,
            storage=storage,
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WriteOptions:
        """From what ``dataclasses.asdict`` made of it."""
        storage = data["storage"]
        if storage is not None:
            storage = StorageOptions(**{**storage, "options": tuple(storage["options"])})
        return cls(**{**data, "storage": storage})


class ProgressReporter(Protocol):
    """Receives the progress of the writing, for a watchdog."""

    def begin(self, file_index: int) -> None:
        """A file of the job begins."""

    def moved(self, count: int) -> None:
        """So many bytes were hashed or written."""

    def entered(self, phase: str) -> None:
        """A phase began: ``"write"``, ``"fsync"`` or ``"upload"``."""

    def waiting(self) -> None:
        """There is nothing to write yet; called again and again. Raises to give up."""


class Unwatched:
    """A ``ProgressReporter`` without a watchdog."""

    def begin(self, file_index: int) -> None:
        """Nothing."""

    def moved(self, count: int) -> None:
        """Nothing."""

    def entered(self, phase: str) -> None:
        """Nothing."""

    def waiting(self) -> None:
        """Nothing."""


_Written = TypeVar("_Written")


def once_more_after_eio(write: Callable[[], _Written]) -> _Written:
    """Call ``write``, which writes whole new files, and once more if the disk reports an I/O error.

    After a failed fsync the kernel may have dropped the pages and call them clean: a second fsync of the same file would
    succeed and mean nothing (https://lwn.net/Articles/752063/). So once more from memory, into a new one.
    """
    try:
        return write()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
    return write()


def refused_direct() -> dict[int, str]:
    """The file systems, as ``st_dev``, that took O_DIRECT at an open and refused it at a write; and a file on each."""
    return dict(_without_direct)


def write_without_direct(device: int, path: str) -> None:
    """Open no more files on this file system with O_DIRECT in this process. Logged once."""
    with _learning:
        known = device in _without_direct
        _without_direct.setdefault(device, path)
    if not known:
        logger.info("the file system of %s refuses direct writes: it is written to through the page cache", path)


def create_file(path: str, direct: bool, *, replace: bool = True) -> tuple[int, bool]:
    """Create a new, empty file for writing. Returns its descriptor, and whether it goes past the page cache."""
    if direct and _without_direct:
        direct = os.stat(os.path.dirname(path) or ".").st_dev not in _without_direct
    # A new inode every time: a writer that was killed in an uninterruptible write may still finish that write later.
    if replace:
        _clear(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if direct and hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666), True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            # Some file systems create the entry before they refuse the flag.
            _clear(path)
    return os.open(path, flags, 0o666), False


def _clear(path: str) -> None:
    """Delete the file of that name. Some servers call a missing file busy; if it is there, the open that follows fails."""
    try:
        os.unlink(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EBUSY):
            raise


def fill_new_file(
    path: str, options: WriteOptions, progress: ProgressReporter, fill: Callable[[int, bool], int]
) -> int:
    """Create a file, have ``fill`` write it, and make its bytes durable. Returns how many they are.

    Args:
        path: where.
        options: how.
        progress: called at the fsync.
        fill: gets the descriptor and whether it goes past the page cache; returns how many bytes it wrote.

    Raises:
        OSError: as the operating system says, with the path.
    """
    try:
        fd, direct = create_file(path, options.direct, replace=options.replace)
        try:
            size = fill(fd, direct)
            progress.entered("fsync")
            os.fsync(fd)
            on_disk = os.fstat(fd).st_size
        finally:
            os.close(fd)
    except SafeCheckpointError:
        raise  # an error of the content, not of the disk, although some of them are OSErrors
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    if on_disk != size:
        raise OSError(errno.EIO, f"{size} bytes were written but the file has {on_disk}", path)
    return size


def write_rest(fd: int, rest: bytes, offset: int, progress: ProgressReporter, *, direct: bool) -> None:
    """Write the end of a file, which need not be a whole number of pages."""
    if not rest:
        return
    padded = -(-len(rest) // PAGE) * PAGE if direct else len(rest)
    with mmap.mmap(-1, padded) as scratch:  # page-aligned, as direct I/O needs it
        scratch[: len(rest)] = rest
        with memoryview(scratch) as view:
            write_all(fd, view, offset, progress, direct=direct)
    if padded != len(rest):
        os.ftruncate(fd, offset + len(rest))


def write_all(fd: int, data: memoryview, offset: int, progress: ProgressReporter, *, direct: bool) -> bool:
    """Write all of ``data``, however many calls that takes. Returns whether the file is still written to directly.

    Raises:
        OSError: as the operating system says, and when a write makes no progress.
    """
    done = 0
    while done < len(data):
        try:
            with data[done:] as rest:
                written = os.pwrite(fd, rest, offset + done)
        except OSError as error:
            if not direct or error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            _stop_direct(fd)
            direct = False
            continue
        if direct:
            written -= written % PAGE  # direct I/O goes on only from an aligned offset
            if written == 0:  # a short write of less than a page: the rest of this file goes through the page cache
                _take_flag(fd)
                direct = False
                continue
        if written == 0:
            raise OSError(errno.EIO, "a write made no progress")
        done += written
        progress.moved(written)
    return direct


def _stop_direct(fd: int) -> None:
    """Go on through the page cache: this file system took O_DIRECT when the file was opened and does not write so."""
    _take_flag(fd)
    path = "a file"
    with contextlib.suppress(OSError):
        path = os.readlink(f"/proc/self/fd/{fd}")
    write_without_direct(os.fstat(fd).st_dev, path)


def _take_flag(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
