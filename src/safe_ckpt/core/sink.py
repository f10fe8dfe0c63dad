"""From memory to a durable file: large aligned writes, hashed on the way, then fsync.

Used by the writer process, and by the parent when it has to write itself. Standard library, xxhash and isal only. The
hashing runs one step ahead of the writing, on a thread of its own, because both release the interpreter lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import xxhash

from safe_ckpt.core import zip_format
from safe_ckpt.core.checksum import crc32
from safe_ckpt.core.zip_format import PAGE, Record

if TYPE_CHECKING:
    from safe_ckpt.config import WriterConfig

logger = logging.getLogger(__name__)
_NEXT_LOOK_S = 0.0005
_without_direct: dict[int, str] = {}
_learning = threading.Lock()  # several files are copied at a time
_HASH_BYTES = 1 << 20  # so that it stays in the cache from one hash to the next


@dataclass(frozen=True, kw_only=True)
class FileTask:
    """One file to write.

    Attributes:
        path: where; replaced if it exists.
        offset: where its image starts in the arena, a multiple of 4096.
        length: length of its image.
        records: for a zip archive, the records in the image in file order; None for a plain file.
        manifest_name: for a zip archive, the name of the manifest record that is appended.
        manifest: for a zip archive, the manifest; the hashes of the records are added to it.
    """

    path: str
    offset: int
    length: int
    records: tuple[Record, ...] | None = None
    manifest_name: str = ""
    manifest: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data."""
        data = dataclasses.asdict(self)
        if self.records is not None:
            data["records"] = [[r.name, r.header_offset, r.data_offset, r.size] for r in self.records]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FileTask:
        """From what ``to_json`` returned."""
        records = data["records"]
        if records is not None:
            names = ("name", "header_offset", "data_offset", "size")
            records = tuple(Record(**dict(zip(names, row, strict=True))) for row in records)
        return cls(**{**data, "records": records})


@dataclass(frozen=True, kw_only=True)
class FileResult:
    """What is on disk now. The digest is that of the whole file."""

    path: str
    size_bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class SinkOptions:
    """How to write. See ``WriterConfig``.

    Attributes:
        direct: past the page cache, where the file system takes it.
        chunk_bytes: how much at a time.
        flush_every_bytes: how often what is in the page cache is sent to the disk.
        replace: whether a file that is there already makes place; else that is an error.
    """

    direct: bool
    chunk_bytes: int
    flush_every_bytes: int
    replace: bool = True

    @classmethod
    def of(cls, config: WriterConfig) -> SinkOptions:
        """From what the user has set."""
        return cls(
            direct=config.direct_io == "auto",
            chunk_bytes=config.chunk_bytes,
            flush_every_bytes=config.flush_every_bytes,
        )


Ready = Callable[[], int]
"""How far the arena is filled: everything before this offset is in place."""


class Progress(Protocol):
    """Where the writing tells how far it is; a watchdog reads it."""

    def moved(self, count: int) -> None:
        """So many bytes were hashed or written."""

    def entered(self, phase: str) -> None:
        """A phase began: ``"write"`` or ``"fsync"``."""

    def waiting(self) -> None:
        """There is nothing to write yet; called again and again. Raises to give up."""


class Unwatched:
    """A ``Progress`` that nobody reads."""

    def moved(self, count: int) -> None:
        """Nothing."""

    def entered(self, phase: str) -> None:
        """Nothing."""

    def waiting(self) -> None:
        """Nothing."""


def write_file(
    task: FileTask, arena: memoryview, options: SinkOptions, progress: Progress, ready: Ready | None = None
) -> FileResult:
    """Write one file and make its bytes durable; the directory entry is the caller's to fsync.

    Args:
        task: what and where.
        arena: the memory that holds its image, or will.
        options: how.
        progress: told of every step; while there is nothing to write yet, of none.
        ready: tells how far the arena is filled; None when all of it is.

    Raises:
        OSError: as the operating system says, with the path.
    """
    return once_more_after_eio(lambda: _write_file(task, arena, options, progress, ready))


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


def _write_file(
    task: FileTask, arena: memoryview, options: SinkOptions, progress: Progress, ready: Ready | None
) -> FileResult:
    progress.entered("write")
    image = arena[task.offset : task.offset + task.length]
    hasher = _Hasher(task, image, options.chunk_bytes, progress, ready)
    try:
        fd, direct = create_file(task.path, options.direct, replace=options.replace)
        try:
            size = _write_image(fd, image, hasher, options, progress, direct=direct)
            progress.entered("fsync")
            os.fsync(fd)
            found = os.fstat(fd).st_size
        finally:
            os.close(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, task.path) from error
    finally:
        hasher.stop()
    if found != size:
        raise OSError(errno.EIO, f"{size} bytes were written but the file has {found}", task.path)
    return FileResult(path=task.path, size_bytes=size, xxh3_128=hasher.digest)


def sync_directory(path: str) -> None:
    """Make the entries of a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def refused_direct() -> dict[int, str]:
    """The file systems, as ``st_dev``, that took O_DIRECT at an open and refused it at a write; and a file on each."""
    return dict(_without_direct)


def write_without_direct(device: int, path: str) -> None:
    """From now on no file on this file system is opened with O_DIRECT in this process. Said once."""
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
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if direct and hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666), True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            # Some file systems create the entry before they refuse the flag.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    return os.open(path, flags, 0o666), False


def _write_image(
    fd: int, image: memoryview, hasher: _Hasher, options: SinkOptions, progress: Progress, *, direct: bool
) -> int:
    body = len(image) // PAGE * PAGE
    unflushed = 0
    for start in range(0, body, options.chunk_bytes):
        end = min(start + options.chunk_bytes, body)
        hasher.wait_for(end)
        direct = write_all(fd, image[start:end], start, progress, direct=direct)
        unflushed += end - start
        if not direct and unflushed >= options.flush_every_bytes:
            os.fdatasync(fd)
            unflushed = 0
    hasher.wait_for(len(image))
    rest = bytes(image[body:]) + hasher.tail
    write_rest(fd, rest, body, progress, direct=direct)
    return body + len(rest)


def write_rest(fd: int, rest: bytes, offset: int, progress: Progress, *, direct: bool) -> None:
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


def write_all(fd: int, data: memoryview, offset: int, progress: Progress, *, direct: bool) -> bool:
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
        if written == 0:
            raise OSError(errno.EIO, "a write made no progress")
        done += written
        progress.moved(written)
    return direct


def _stop_direct(fd: int) -> None:
    """Go on through the page cache: this file system took O_DIRECT when the file was opened and does not write so."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    path = "a file"
    with contextlib.suppress(OSError):
        path = os.readlink(f"/proc/self/fd/{fd}")
    write_without_direct(os.fstat(fd).st_dev, path)


def _started(run: Callable[[], None]) -> threading.Thread | None:
    """A thread that hashes while this one writes; None where none can begin any more."""
    thread = threading.Thread(target=run, name="safe_ckpt-hash", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the last save, written in this process while Python 3.12 shuts down: hashed first, then
        return None
    return thread


class _Hasher:
    """Hashes an image in file order, fills in the data descriptors, and makes the bytes that follow the image."""

    def __init__(
        self, task: FileTask, image: memoryview, chunk_bytes: int, progress: Progress, ready: Ready | None
    ) -> None:
        self._filled = ready
        self._task = task
        self._image = image
        self._chunk = chunk_bytes
        self._progress = progress
        self._whole = xxhash.xxh3_128()
        self._hashed = 0
        self._ready = 0
        self._failure: BaseException | None = None
        self._stopped = False
        self._turn = threading.Condition()
        self.tail = b""
        self.digest = ""
        self._thread: threading.Thread | None = None
        if len(image) > 2 * chunk_bytes:
            self._thread = _started(self._run)
        if self._thread is None:
            self._run()

    def wait_for(self, end: int) -> None:
        """Wait until everything before ``end`` has been hashed and will not change."""
        with self._turn:
            self._turn.wait_for(lambda: self._ready >= end or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop early; used when the writing failed."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            records = self._task.records
            if records is None:
                self._absorb(0, len(self._image), [self._whole.update])
                self._finish(b"")
            else:
                self._finish(self._hash_records(records))
        except BaseException as error:  # it belongs to the thread that writes
            with self._turn:
                self._failure = error
                self._turn.notify_all()

    def _hash_records(self, records: Sequence[Record]) -> bytes:
        crcs: dict[str, int] = {}
        hashes: dict[str, str] = {}
        for record in records:
            digest = RecordDigest()
            self._absorb(record.header_offset, record.data_offset, [self._whole.update])
            end = record.data_offset + record.size
            self._absorb(record.data_offset, end, [self._whole.update, digest.update])
            self._image[end : record.end] = zip_format.descriptor(digest.crc, record.size)
            self._absorb(end, record.end, [self._whole.update])
            crcs[record.name], hashes[record.name] = digest.crc, digest.hexdigest()
        return closing_of(self._task, len(self._image), crcs, hashes)

    def _absorb(self, start: int, end: int, sinks: Sequence[Callable[[memoryview], None]]) -> None:
        for at in range(start, end, _HASH_BYTES):
            if self._stopped:
                raise OSError(errno.ECANCELED, "stopped")
            self._await_bytes(min(at + _HASH_BYTES, end))
            piece = self._image[at : min(at + _HASH_BYTES, end)]
            for sink in sinks:
                sink(piece)
            self._hashed = at + len(piece)
            if self._hashed - self._ready >= self._chunk:  # thousands of small records must not cost a wake-up each
                self._progress.moved(self._hashed - self._ready)
                with self._turn:
                    self._ready = self._hashed
                    self._turn.notify_all()

    def _await_bytes(self, end: int) -> None:
        seen = -1
        while self._filled is not None and (now := self._filled()) < self._task.offset + end:
            if self._stopped:
                raise OSError(errno.ECANCELED, "stopped")
            if now != seen:  # a copy that goes on is progress, one that hangs is not
                seen = now
                self._progress.moved(0)
            self._progress.waiting()
            time.sleep(_NEXT_LOOK_S)

    def _finish(self, tail: bytes) -> None:
        self._whole.update(tail)
        comment = b""
        if self._task.records is not None:
            comment = zip_format.COMMENT_PREFIX + self._whole.hexdigest().encode()
            self._whole.update(comment)
        self.digest = self._whole.hexdigest()
        with self._turn:
            self.tail = tail + comment
            self._ready = len(self._image)
            self._turn.notify_all()


def closing_of(task: FileTask, length: int, crcs: dict[str, int], hashes: Mapping[str, str]) -> bytes:
    """What follows the ``length`` bytes of an archive's image: its manifest record and directory, up to the comment."""
    manifest = json.dumps({**(task.manifest or {}), "records": dict(hashes)}, separators=(",", ":")).encode()
    own = zip_format.place(task.manifest_name, len(manifest), length)
    crcs[own.name] = crc32(manifest)
    body = zip_format.local_header(own) + manifest + zip_format.descriptor(crcs[own.name], own.size)
    return body + zip_format.closing([*(task.records or ()), own], crcs, own.end)


class RecordDigest:
    """CRC-32 and xxh3-128 of one record."""

    def __init__(self) -> None:
        self.crc = 0
        self._hash = xxhash.xxh3_128()

    def update(self, piece: memoryview) -> None:
        """Take more bytes."""
        self.crc = crc32(piece, self.crc)
        self._hash.update(piece)

    def hexdigest(self) -> str:
        """The xxh3-128."""
        return self._hash.hexdigest()
