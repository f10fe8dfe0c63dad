"""From a file to memory, hashed on the way: several reads ahead of the hash, past the page cache where that can be.

Verification costs next to nothing this way: it runs while the disk works, and nothing is read twice.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from safe_ckpt.core.storage.direct_io import PAGE
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.core.storage.presence import ShortReadError, opened
from safe_ckpt.errors import CorruptCheckpointError

try:  # ISA-L takes 0.018 s per GiB, zlib 0.175 s (measured). There is no wheel of it for some processors.
    from isal.isal_zlib import crc32 as crc32  # noqa: PLC0414 - for the formats
except ImportError:  # pragma: no cover - the same numbers either way
    crc32 = zlib.crc32

_CHUNK = 8 << 20
_AHEAD = 4  # reads under way at a time
_DIRECT_FROM = 1 << 20  # below this the page cache is as good


ReadProgress = Callable[[int], None]
"""Called with the number of bytes that were read since the last call, on any thread."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Bytes ``start`` to ``end`` of a file, and the CRC-32 that they should have."""

    start: int
    end: int
    crc: int


def read_whole(file: Place, length: int, *, cached: bool = False) -> tuple[mmap.mmap, str]:
    """Read the first ``length`` bytes of a file into memory of their own.

    Args:
        file: which one.
        length: how much of it.
        cached: through the page cache, for a file that other processes of this host read at the same time.

    Returns:
        Memory of at least ``length`` bytes of its own, with zeros behind the end, and the bytes' xxh3-128.

    Raises:
        OSError: it could not be read. A file that is shorter gives another digest, not an error.
    """
    # Private: what is loaded may stay in use, as an optimizer's state does, and a forked process must not share it.
    # No huge pages asked for: what a virtual machine's host has taken back are large free blocks, and a first touch of those
    # costs more than many small ones (measured: 1.0 s against 0.6 s for 0.5 GiB).
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(1, -(-length // PAGE)) * PAGE, flags=private)
    digest = xxhash.xxh3_128()
    with memoryview(memory) as view:
        for start, end in read_ahead(file, length, view, cached=cached):
            with view[start:end] as piece:
                digest.update(piece)
    return memory, digest.hexdigest()


def digest_of(file: Place, length: int, *, cached: bool | None = False, progress: ReadProgress | None = None) -> str:
    """xxh3-128 of the first ``length`` bytes, keeping no more than a few pieces in memory.

    Args:
        file: which one.
        length: how much of it.
        cached: through the page cache, for a file that is read once more in a moment; None only if it is there already.
        progress: called with what was read.

    Raises:
        OSError: it could not be read. A file that is shorter gives another digest, not an error.
    """
    digest = xxhash.xxh3_128()
    for piece in _pieces(file, length, cached=cached):
        digest.update(piece)
        if progress is not None:
            progress(len(piece))
    return digest.hexdigest()


def wrong_spans(file: Path, size: int, spans: Sequence[Span], progress: ReadProgress | None = None) -> list[Span]:
    """Read a file once and compare the CRC-32 of spans within it. Returns those that differ.

    Args:
        file: which one.
        size: how many bytes of it.
        spans: what to check in it; in order, without overlap.
        progress: called with what was read.

    Raises:
        CorruptCheckpointError: the file is shorter.
        OSError: it could not be read; it is not treated as corrupt.
    """
    if spans and is_cached(file, size):
        return _cached_spans(file, size, spans, progress)
    checker = _Checker(file, spans, 0, progress)
    for piece in _pieces(file, size, cached=None):
        checker.take(piece)
    checker.end(size)
    return checker.wrong


def _pieces(file: Place, length: int, *, cached: bool | None) -> Iterator[memoryview]:
    """A file piece by piece; each is valid until the next one is asked for."""
    if cached is not False and isinstance(file, Path) and is_cached(file, length):
        yield from _one_by_one(file, 0, length)
        return
    chunk, ahead = _pace(file)
    room = min(length, (ahead + 1) * chunk)
    with mmap.mmap(-1, max(1, -(-room // PAGE)) * PAGE) as memory, memoryview(memory) as view:
        for start, end in read_ahead(file, length, view, cached=bool(cached)):
            with view[start:end] as piece:
                yield piece


def read_ahead(file: Place, length: int, memory: memoryview, *, cached: bool = False) -> Iterator[tuple[int, int]]:
    """Read a file piece by piece, in order, several pieces ahead. Yields where in ``memory`` each piece lies.

    With less memory than ``length`` it is used over and over: a piece is valid until the next one is asked for.
    """
    source: _Source | _ObjectSource
    chunk, ahead = _pace(file)
    if isinstance(file, ObjectPath):
        source = _ObjectSource(file)
    else:
        source = _Source(file, direct=length >= _DIRECT_FROM and not cached)
    slots = len(memory) // chunk if len(memory) < length else 0
    pending: list[tuple[int, int, Future[int]]] = []
    starts = iter(range(0, length, chunk))

    def ask(pool: ThreadPoolExecutor) -> None:
        at = next(starts, None)
        if at is not None:
            place = at if not slots else (at // chunk) % slots * chunk
            size = min(chunk, length - at)
            pending.append((place, size, pool.submit(source.read, memory, place, at, size)))

    try:
        with ThreadPoolExecutor(ahead, thread_name_prefix="safe_ckpt-read") as pool:
            for _ in range(ahead):
                ask(pool)
            while pending:
                place, size, future = pending.pop(0)
                count = future.result()
                yield place, place + count
                if count < size:
                    pool.shutdown(cancel_futures=True)
                    return  # the file ends here
                ask(pool)
    finally:
        source.close()


def read_all(fd: int, room: memoryview, at: int) -> int:
    """Fill ``room`` from there on, however many calls that takes. Returns how many bytes there were before the file ended."""
    done = 0
    while done < len(room):
        with room[done:] as rest:
            count = os.preadv(fd, [rest], at + done)
        if not count:
            break
        done += count
    return done


def _pace(file: Place) -> tuple[int, int]:
    """The size of one read, and how many are under way at a time."""
    if not isinstance(file, ObjectPath):
        return _CHUNK, _AHEAD
    options = file.options
    return -(-options.part_bytes // PAGE) * PAGE, options.parts_in_flight


def drop_cache(path: Path) -> None:
    """Have a file, or all files of a directory, read from the disk the next time. Opening asks a server what they are now."""
    for file in [path] if path.is_file() else [child for child in path.rglob("*") if child.is_file()]:
        with contextlib.suppress(OSError), opened(file, os.O_RDONLY) as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


class _ObjectSource:
    """An object, read by ranges."""

    def __init__(self, place: ObjectPath) -> None:
        self._place = place

    def read(self, memory: memoryview, place: int, at: int, size: int) -> int:
        """Bytes ``at`` to ``at + size`` to ``place`` in memory. Returns how many there were."""
        data = self._place.read_range(at, size)
        memory[place : place + len(data)] = data
        return len(data)

    def close(self) -> None:
        """Nothing is open."""


class _Source:
    def __init__(self, file: Path, *, direct: bool) -> None:
        self._name = str(file)
        self._plain = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self._direct = -1
        if direct and hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):  # a file system without it
                self._direct = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    def read(self, memory: memoryview, place: int, offset: int, size: int) -> int:
        """Fill a piece; returns how many bytes there were."""
        done = 0
        if self._direct >= 0:
            whole = min(-(-size // PAGE) * PAGE, len(memory) - place)
            try:
                with memory[place : place + whole] as room:
                    done = min(os.preadv(self._direct, [room], offset), size)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        with memory[place + done : place + size] as room:  # what direct reading left over, or all of it
            done += read_all(self._plain, room, offset + done)
        if done < size and os.fstat(self._plain).st_size > offset + done:
            # The file is not shorter: a network file system's cache is old, or the file system fails. That is no corruption.
            raise ShortReadError(self._name, offset + done)
        return done

    def close(self) -> None:
        """Give the descriptors back."""
        for fd in (self._plain, self._direct):
            if fd >= 0:
                os.close(fd)


_CACHED_ROOM = 512 << 10  # stays in the processor's own cache: 23 GB/s where 8 MiB, read by other threads, gave 8
_SHARED_FROM = 32 << 20
_SAMPLES = 16


def _cached_spans(file: Path, size: int, spans: Sequence[Span], progress: ReadProgress | None) -> list[Span]:
    """Checksums of spans have nothing to do with each other: of a large file in memory, each processor takes some."""
    workers = min(4, os.cpu_count() or 1) if size >= _SHARED_FROM else 1
    groups = _shares(spans, workers)
    with ThreadPoolExecutor(workers, thread_name_prefix="safe_ckpt-scan") as pool:
        wrong = list(pool.map(lambda group: _wrong_in(file, group, progress), groups))
    if progress is not None:
        progress(size - sum(group[-1].end - group[0].start for group in groups))
    return [span for some in wrong for span in some]


def _shares(spans: Sequence[Span], count: int) -> list[Sequence[Span]]:
    """Neighbouring spans in at most ``count`` groups of about the same number of bytes."""
    total, before = max(1, sum(span.end - span.start for span in spans)), 0
    groups: list[list[Span]] = [[] for _ in range(count)]
    for span in spans:
        groups[min(count - 1, before * count // total)].append(span)
        before += span.end - span.start
    return [group for group in groups if group]


def _wrong_in(file: Path, spans: Sequence[Span], progress: ReadProgress | None) -> list[Span]:
    start, end = spans[0].start, spans[-1].end
    checker = _Checker(file, spans, start, progress)
    for piece in _one_by_one(file, start, end):
        checker.take(piece)
    checker.end(end)
    return checker.wrong


def _one_by_one(file: Path, at: int, end: int) -> Iterator[memoryview]:
    """Read as ``read_ahead`` does, but a file in the page cache: there, handing pieces to a thread costs more than reading."""
    with (
        opened(file, os.O_RDONLY | os.O_NONBLOCK) as fd,
        mmap.mmap(-1, _CACHED_ROOM) as memory,
        memoryview(memory) as view,
    ):
        while at < end:
            with view[: min(_CACHED_ROOM, end - at)] as room:
                count = os.preadv(fd, [room], at)
            if not count:
                return
            at += count
            with view[:count] as piece:
                yield piece


class _Checker:
    """Takes a file's bytes from ``at`` on and compares the spans in them."""

    def __init__(self, file: Path, spans: Sequence[Span], at: int, progress: ReadProgress | None) -> None:
        self._file = file
        self._spans = spans
        self._at = at
        self._progress = progress
        self._index = 0
        self._crc = 0
        self.wrong: list[Span] = [span for span in spans if span.start == span.end and span.crc != 0]

    def take(self, piece: memoryview) -> None:
        """The next bytes of the file."""
        at, end = self._at, self._at + len(piece)
        self._at = end
        if self._progress is not None:
            self._progress(len(piece))
        while self._index < len(self._spans):
            span = self._spans[self._index]
            if span.start >= end:
                return
            with piece[max(span.start, at) - at : min(span.end, end) - at] as part:
                self._crc = crc32(part, self._crc)
            if span.end > end:
                return
            if self._crc != span.crc and span.end > span.start:
                self.wrong.append(span)
            self._index += 1
            self._crc = 0

    def end(self, end: int) -> None:
        """Check that all bytes up to ``end`` have come."""
        if self._at < end:
            raise CorruptCheckpointError(path=str(self._file), message=f"is cut off at byte {self._at} of {end}")


def is_cached(file: Path, size: int) -> bool:
    """Whether the kernel has the file in its page cache, going by samples: then reading past the cache would be slower."""
    flag = getattr(os, "RWF_NOWAIT", 0)
    if not flag or not size:
        return False
    with opened(file, os.O_RDONLY | os.O_NONBLOCK) as fd:
        try:
            room = bytearray(1)
            return all(os.preadv(fd, [room], size * sample // _SAMPLES, flag) == 1 for sample in range(_SAMPLES))
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            return False
