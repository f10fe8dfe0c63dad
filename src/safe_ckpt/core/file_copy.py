"""Files copied as they are: cloned where the file system can, else read and written in large pieces, and hashed either way.

Used by the writer process, and by the parent when it has to copy itself. Standard library and xxhash only. Several files are
under way at a time, so that reading one goes on while another is written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from safe_ckpt.core.reading import digest_of
from safe_ckpt.core.sink import (
    FileResult,
    Progress,
    SinkOptions,
    create_file,
    once_more_after_eio,
    write_all,
    write_rest,
)
from safe_ckpt.core.zip_format import PAGE

_AT_A_TIME = 4
_CHUNK = 4 << 20
_OPEN = 256
_RECORD = "copied."
_FICLONE = 0x40049409  # linux/fs.h


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """What changes when a file does. ``of`` reads it; two that are equal stand for the same bytes.

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


@dataclass(frozen=True, kw_only=True)
class FileCopy:
    """One file to copy.

    Attributes:
        source: where its bytes are.
        path: where they go: relative to the checkpoint in a request, absolute in a job.
        stamp: of the source when the copy was planned.
        kept: an earlier attempt's copy of the same bytes, on the same file system as ``path``; "" when there is none.
        kept_xxh3_128: that copy's digest; it is used only if it has it still.
    """

    source: str
    path: str
    stamp: Stamp
    kept: str = ""
    kept_xxh3_128: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FileCopy:
        """From what ``to_json`` returned."""
        return cls(**{**data, "stamp": Stamp(**data["stamp"])})


def copy_files(
    copies: Sequence[FileCopy], options: SinkOptions, progress: Progress, record: str = ""
) -> list[FileResult]:
    """Copy files and make their bytes durable; the directory entries are the caller's to fsync.

    Args:
        copies: what and where to. The directories exist.
        options: how to write.
        progress: told of every step, from several threads.
        record: a file that gets a line for every copy that is complete, so that a later attempt need not make it again; ""
            for none.

    Returns:
        What is on disk now, in the order of ``copies``.

    Raises:
        OSError: as the operating system says, with the path. The others end before this is raised.
    """
    with contextlib.closing(_Recorder(record)) as note:
        results: list[FileResult] = []
        for start in range(0, len(copies), _OPEN):
            batch = copies[start : start + _OPEN]
            results += once_more_after_eio(lambda: _copy_batch(batch, options, progress, note))  # noqa: B023
        return results


def _copy_batch(
    copies: Sequence[FileCopy], options: SinkOptions, progress: Progress, note: _Recorder
) -> list[FileResult]:
    batch = _Batch(options, progress)

    def one(copy: FileCopy) -> FileResult:
        try:
            found = _reused(copy) or batch.copy(copy)
            note.add(copy, found)
        except BaseException:
            batch.failed.set()
            raise
        return found

    try:
        with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="safe_ckpt-copy") as pool:
            under_way = [pool.submit(one, copy) for copy in copies]
        errors = [error for error in (future.exception() for future in under_way) if error is not None]
        if errors:
            raise next((error for error in errors if not _is_echo(error)), errors[0])
        batch.sync()
        return [future.result() for future in under_way]
    finally:
        batch.close()


def first_changed(copies: Sequence[FileCopy]) -> str | None:
    """The first source that is not what it was when its copy was planned; None when all are."""
    for copy in copies:
        try:
            if Stamp.of(os.stat(copy.source)) != copy.stamp:
                return copy.source
        except FileNotFoundError:
            return copy.source
    return None


def record_name(rank: int) -> str:
    """The name of the record of one rank's copies."""
    return f"{_RECORD}{rank:05d}.jsonl"


def records_in(folder: Path) -> list[Path]:
    """The records of all ranks in the staging directory of one save."""
    return sorted(folder.glob(f"{_RECORD}*.jsonl"))


def kept_copies(kept: Path) -> dict[tuple[str, Stamp], tuple[Path, str]]:
    """What earlier attempts copied, as far as it was written down; a line that was cut off is left out.

    Args:
        kept: holds a folder for each attempt.

    Returns:
        Source and stamp, of sources on this host -> the copy as it lies now, and its digest.
    """
    found = {}
    for record in sorted(kept.glob(f"*/{_RECORD}*.jsonl")):
        attempt = record.parent
        for line in record.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                data = json.loads(line)
                copy = FileCopy.from_json(data["copy"])
                below = copy.path.split(f"/{attempt.name}/", 1)[1]
                if data["host"] == socket.gethostname():
                    found[copy.source, copy.stamp] = (attempt / below, str(data["xxh3_128"]))
    return found


def _is_echo(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.ECANCELED


def _reused(copy: FileCopy) -> FileResult | None:
    """Take over an earlier attempt's copy if it is intact."""
    if not copy.kept:
        return None
    kept, size = Path(copy.kept), copy.stamp.size_bytes
    try:
        if kept.stat().st_size != size or digest_of(kept, size) != copy.kept_xxh3_128:
            return None
        fd = os.open(kept, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(kept, copy.path)
    except OSError:  # then it is copied once more
        return None
    return FileResult(path=copy.path, size_bytes=size, xxh3_128=copy.kept_xxh3_128)


class _Batch:
    """Copies files with one buffer per thread; they are synced together, for each sync alone would wait for the disk."""

    def __init__(self, options: SinkOptions, progress: Progress) -> None:
        self._options = options
        self._progress = progress
        self._own = threading.local()
        self._written: list[tuple[int, FileCopy]] = []
        self.failed = threading.Event()

    def copy(self, copy: FileCopy) -> FileResult:
        """Copy one file. It is not durable before ``sync``."""
        self._progress.entered("write")
        try:
            fd, direct = create_file(copy.path, self._options.direct)
            self._written.append((fd, copy))
            digest = self._pour(copy, fd, direct=direct)
        except OSError as error:
            raise OSError(error.errno, error.strerror, error.filename or copy.path) from error
        return FileResult(path=copy.path, size_bytes=copy.stamp.size_bytes, xxh3_128=digest)

    def sync(self) -> None:
        """Make durable what was copied."""
        for fd, copy in self._written:
            self._progress.entered("fsync")
            try:
                os.fsync(fd)
                found = os.fstat(fd).st_size
            except OSError as error:
                raise OSError(error.errno, error.strerror, copy.path) from error
            if found != copy.stamp.size_bytes:
                message = f"{copy.stamp.size_bytes} bytes were to be copied and the copy has {found}"
                raise OSError(errno.EIO, message, copy.path)

    def close(self) -> None:
        """Give the descriptors back."""
        for fd, _ in self._written:
            os.close(fd)

    def _pour(self, copy: FileCopy, fd: int, *, direct: bool) -> str:
        """Read the source to its end, hash it, and write it unless the file system shares the blocks. Returns the digest."""
        source = os.open(copy.source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            cloned, cached = _clone(source, fd), _is_cached(source)
            os.posix_fadvise(source, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            digest = self._move(copy, source, -1 if cloned else fd, direct=direct)
            if not cached:  # nobody had it in memory, and nobody needs it there now
                os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(source)
        return digest

    def _move(self, copy: FileCopy, source: int, fd: int, *, direct: bool) -> str:
        length, at, unflushed = copy.stamp.size_bytes, 0, 0
        digest = xxhash.xxh3_128()
        buffer = self._buffer()
        while at < length:
            if self.failed.is_set():
                raise OSError(errno.ECANCELED, "stopped", copy.path)
            count = _fill(source, buffer, min(len(buffer), length - at), at)
            if not count:
                raise OSError(errno.EIO, f"the file ends after {at} of {length} bytes", copy.source)
            with buffer[:count] as piece:
                digest.update(piece)
            if fd >= 0:
                body = count // PAGE * PAGE
                with buffer[:body] as pages:
                    write_all(fd, pages, at, self._progress, direct=direct)
                write_rest(fd, bytes(buffer[body:count]), at + body, self._progress, direct=direct)
                unflushed += count
                if not direct and unflushed >= self._options.flush_every_bytes:
                    os.fdatasync(fd)
                    unflushed = 0
            at += count
            os.posix_fadvise(source, at + _CHUNK, _CHUNK, os.POSIX_FADV_WILLNEED)  # is read while the next is written
            self._progress.moved(count)
        return digest.hexdigest()

    def _buffer(self) -> memoryview:
        if not hasattr(self._own, "buffer"):
            self._own.buffer = memoryview(mmap.mmap(-1, _CHUNK))  # page-aligned, as direct writing needs it
        found: memoryview = self._own.buffer
        return found


def _fill(source: int, buffer: memoryview, most: int, at: int) -> int:
    done = 0
    while done < most:  # a short read in the middle would leave an offset that direct writing does not take
        with buffer[done:most] as room:
            count = os.preadv(source, [room], at + done)
        if not count:
            break
        done += count
    return done


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


class _Recorder:
    """Appends a line for every copy. Losing one costs a copy that is made again, so nothing here is synced."""

    def __init__(self, path: str) -> None:
        self._turn = threading.Lock()
        self._file = open(path, "ab", buffering=0) if path else None  # noqa: SIM115 - closed by close()

    def add(self, copy: FileCopy, result: FileResult) -> None:
        if self._file is not None:
            data = {"copy": copy.to_json(), "xxh3_128": result.xxh3_128, "host": socket.gethostname()}
            line = json.dumps(data) + "\n"
            with self._turn:
                self._file.write(line.encode())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
