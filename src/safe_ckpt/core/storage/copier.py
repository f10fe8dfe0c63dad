"""Copying files: cloned where the file system can, else read and written in large pieces, and hashed either way.

A file that is in its place already, because another tool wrote it there, is hashed and made durable.

Used by the writer process, and by the parent when it has to copy itself. Standard library and xxhash only. Several files are
under way at a time, so that reading one goes on while another is written.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from safe_ckpt.core.storage.direct_io import (
    PAGE,
    ProgressReporter,
    WriteOptions,
    create_file,
    once_more_after_eio,
    write_all,
    write_rest,
)
from safe_ckpt.core.storage.durable import WrittenFile
from safe_ckpt.core.storage.presence import Stamp, opened
from safe_ckpt.core.storage.reader import read_all

_AT_A_TIME = 4
_CHUNK = 4 << 20
_OPEN = 256


@dataclass(frozen=True, kw_only=True)
class FileCopy:
    """One file to copy.

    Attributes:
        source: where its bytes are; "" for in ``path`` already.
        path: where they go: relative to the checkpoint in a request, absolute in a job.
        stamp: of the source when the copy was planned; of a file that is in its place ``everywhere``.
        known: the digest of a file that is in its place, where that is known: it is not read; "" for none.
    """

    source: str
    path: str
    stamp: Stamp
    known: str = ""

    @property
    def read(self) -> str:
        """The file that is read."""
        return self.source or self.path

    def to_json(self) -> dict[str, Any]:
        """Describe it as JSON-able data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FileCopy:
        """From what ``to_json`` returned."""
        return cls(**{**data, "stamp": Stamp(**data["stamp"])})


def first_changed(copies: Sequence[FileCopy]) -> str | None:
    """The first source that is not what it was when its copy was planned; None when all are."""
    for copy in copies:
        try:
            now = Stamp.of(os.stat(copy.read))
            if (now if copy.source else now.everywhere) != copy.stamp:
                return copy.read
        except FileNotFoundError:
            return copy.read
    return None


def copy_files(copies: Sequence[FileCopy], options: WriteOptions, progress: ProgressReporter) -> list[WrittenFile]:
    """Copy files and make their bytes durable; the directory entries are the caller's to fsync.

    Args:
        copies: what and where to. The directories exist.
        options: how to write.
        progress: called at every step, from several threads.

    Returns:
        What is on disk now, in the order of ``copies``.

    Raises:
        OSError: as the operating system says, with the path. The others end before this is raised.
    """
    results: list[WrittenFile] = []
    for start in range(0, len(copies), _OPEN):
        batch = copies[start : start + _OPEN]
        results += once_more_after_eio(lambda: _copy_batch(batch, options, progress))  # noqa: B023
    return results


def _copy_batch(copies: Sequence[FileCopy], options: WriteOptions, progress: ProgressReporter) -> list[WrittenFile]:
    batch = _Batch(options, progress, ahead=len(copies) < _AT_A_TIME)

    def one(copy: FileCopy) -> WrittenFile:
        try:
            return batch.copy(copy)
        except BaseException:
            batch.failed.set()
            raise

    try:
        with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="safe_ckpt-copy") as pool:
            under_way = [pool.submit(one, copy) for copy in copies]
        errors = [error for error in (future.exception() for future in under_way) if error is not None]
        if errors:
            # The others were told to stop, and say ECANCELED.
            raise next((one for one in errors if getattr(one, "errno", None) != errno.ECANCELED), errors[0])
        batch.sync()
        return [future.result() for future in under_way]
    finally:
        batch.close()


class _Batch:
    """Copies files, a thread each; they are synced together, for each sync alone would wait for the disk.

    Args:
        options: how to write.
        progress: called at every step.
        ahead: whether one piece of a file is read while the one before it is written: where there are so few files that
            threads would not overlap reading with writing by themselves.
    """

    def __init__(self, options: WriteOptions, progress: ProgressReporter, *, ahead: bool) -> None:
        self._ahead = ahead
        self._options = options
        self._progress = progress
        self._own = threading.local()
        self._readers = ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="safe_ckpt-read")
        self._written: list[tuple[int, FileCopy]] = []
        self.failed = threading.Event()

    def copy(self, copy: FileCopy) -> WrittenFile:
        """Copy one file. It is not durable before ``sync``."""
        self._progress.entered("write")
        try:
            if copy.source:
                fd, direct = create_file(copy.path, self._options.direct)
            else:
                fd, direct = os.open(copy.path, os.O_RDONLY | os.O_CLOEXEC), False
            self._written.append((fd, copy))
            digest = copy.known or self._pour(copy, fd if copy.source else -1, direct=direct)
        except OSError as error:
            raise OSError(error.errno, error.strerror, error.filename or copy.path) from error
        return WrittenFile(path=copy.path, size_bytes=copy.stamp.size_bytes, xxh3_128=digest)

    def sync(self) -> None:
        """Make durable what was copied."""
        for fd, copy in self._written:
            self._progress.entered("fsync")
            try:
                os.fsync(fd)
                size = os.fstat(fd).st_size
            except OSError as error:
                raise OSError(error.errno, error.strerror, copy.path) from error
            if size != copy.stamp.size_bytes:
                message = f"{copy.stamp.size_bytes} bytes were to be there and it has {size}"
                raise OSError(errno.EIO, message, copy.path)

    def close(self) -> None:
        """End the threads and give the descriptors back."""
        self._readers.shutdown()
        for fd, _ in self._written:
            os.close(fd)

    def _pour(self, copy: FileCopy, fd: int, *, direct: bool) -> str:
        """Read the source to its end, hash it, and write it unless the file system shares the blocks. Returns the digest.

        Args:
            copy: what to read.
            fd: where it goes; -1 for nowhere: it is there.
            direct: whether ``fd`` was opened for direct writing.
        """
        with opened(copy.read, os.O_RDONLY) as source:
            cloned, cached = fd < 0 or _clone(source, fd), _is_cached(source)
            os.posix_fadvise(source, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            digest = self._move(copy, source, -1 if cloned else fd, direct=direct)
            if not cached:  # it was not in the page cache before, and is not needed there now
                os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
        return digest

    def _move(self, copy: FileCopy, source: int, fd: int, *, direct: bool) -> str:
        """Read ``source``, hash it, and write it to ``fd``; -1 for not at all. Returns the digest."""
        length, at, unflushed = copy.stamp.size_bytes, 0, 0
        digest = xxhash.xxh3_128()
        here, there = self._buffers()

        def load(buffer: memoryview, start: int) -> int:
            # A short read in the middle would leave an offset that direct writing does not take.
            with buffer[: min(len(buffer), length - start)] as room:
                count = read_all(source, room, start)
            with buffer[:count] as piece:
                digest.update(piece)
            return count

        ahead: Future[int] | None = None
        try:
            while at < length:
                if self.failed.is_set():
                    raise OSError(errno.ECANCELED, "stopped", copy.path)
                count = ahead.result() if ahead is not None else load(here, at)
                if not count:
                    raise OSError(errno.EIO, f"the file ends after {at} of {length} bytes", copy.read)
                more = at + count < length
                ahead = self._readers.submit(load, there, at + count) if more and self._ahead else None
                if fd >= 0:
                    direct = self._write(fd, here[:count], at, direct=direct)
                    unflushed += count
                if fd >= 0 and not direct and unflushed >= self._options.flush_every_bytes:
                    os.fdatasync(fd)
                    unflushed = 0
                at += count
                here, there = there, here
                self._progress.moved(count)
        finally:
            if ahead is not None:
                ahead.exception()  # it reads from a descriptor that the caller is about to close
        return digest.hexdigest()

    def _write(self, fd: int, data: memoryview, at: int, *, direct: bool) -> bool:
        body = len(data) // PAGE * PAGE
        with data[:body] as pages:
            direct = write_all(fd, pages, at, self._progress, direct=direct)
        write_rest(fd, bytes(data[body:]), at + body, self._progress, direct=direct)
        return direct

    def _buffers(self) -> tuple[memoryview, memoryview]:
        if not hasattr(self._own, "buffers"):
            # Page-aligned, as direct writing needs it.
            self._own.buffers = (memoryview(mmap.mmap(-1, _CHUNK)), memoryview(mmap.mmap(-1, _CHUNK)))
        buffers: tuple[memoryview, memoryview] = self._own.buffers
        return buffers


_FICLONE = 0x40049409  # linux/fs.h


def _clone(source: int, target: int) -> bool:
    """Let the file system share the blocks (btrfs, XFS, and others). Returns whether it did."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def _is_cached(source: int) -> bool:
    """Whether the file's first page is in memory: then all of it probably is."""
    try:
        return bool(os.preadv(source, [bytearray(PAGE)], 0, getattr(os, "RWF_NOWAIT", 0)))
    except OSError:
        return False
