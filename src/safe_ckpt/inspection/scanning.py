"""One pass over a file: a digest of the whole, and the CRC-32 of spans within it."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from safe_ckpt.core.storage.checksum import crc32
from safe_ckpt.core.storage.reader import read_ahead
from safe_ckpt.errors import CorruptCheckpointError

_ROOM = 5 * (8 << 20)  # what read_ahead needs to be several pieces ahead
_CACHED_ROOM = 512 << 10  # stays in the processor's own cache: 23 GB/s where 8 MiB, read by other threads, gave 8
_SHARED_FROM = 32 << 20
_SAMPLES = 16
Progress = Callable[[int], None]
"""Called with the number of bytes that were read since the last call, on any thread."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Bytes ``start`` to ``end`` of a file, and the CRC-32 that they should have."""

    start: int
    end: int
    crc: int


def scan(
    file: Path, size: int, spans: Sequence[Span] = (), *, progress: Progress | None = None, whole: bool = False
) -> tuple[str, list[Span]]:
    """Read a file once.

    Args:
        file: which one.
        size: how many bytes of it.
        spans: what to check in it; in order, without overlap.
        progress: told what was read.
        whole: whether the digest is wanted.

    Returns:
        xxh3-128 of the first ``size`` bytes, "" if it is not wanted; and the spans that are not what they should be.

    Raises:
        CorruptCheckpointError: the file is shorter.
        OSError: it could not be read; that condemns nothing.
    """
    cached = is_cached(file, size)
    if cached and spans and not whole:
        return "", _scan_spans(file, size, spans, progress)
    digest, checker = xxhash.xxh3_128(), _Checker(spans)

    def take(piece: memoryview, at: int) -> None:
        if whole:
            digest.update(piece)
        checker.take(piece, at)

    room = max(1, min(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE, _CACHED_ROOM if cached else _ROOM))
    with mmap.mmap(-1, room) as memory, memoryview(memory) as view:
        pieces = _one_by_one(file, 0, size, view) if cached else read_ahead(file, size, view)
        _take_all(file, pieces, view, 0, size, take, progress)
    return digest.hexdigest() if whole else "", checker.bad


def _take_all(
    file: Path,
    pieces: Iterator[tuple[int, int]],
    memory: memoryview,
    at: int,
    end: int,
    take: Callable[[memoryview, int], None],
    progress: Progress | None,
) -> None:
    """Hand over bytes ``at`` to ``end`` of a file, each piece with where it begins."""
    for start, stop in pieces:
        with memory[start:stop] as piece:
            take(piece, at)
        at += stop - start
        if progress is not None:
            progress(stop - start)
    if at < end:
        raise CorruptCheckpointError(path=str(file), message=f"is cut off at byte {at} of {end}")


def _scan_spans(file: Path, size: int, spans: Sequence[Span], progress: Progress | None) -> list[Span]:
    """Checksums of spans have nothing to do with each other: of a large file in memory, each processor takes some."""
    workers = min(4, os.cpu_count() or 1) if size >= _SHARED_FROM else 1
    groups = _shares(spans, workers)
    if len(groups) == 1:
        bad = [_scan_group(file, groups[0], progress)]
    else:
        with ThreadPoolExecutor(workers, thread_name_prefix="safe_ckpt-scan") as pool:
            bad = list(pool.map(lambda group: _scan_group(file, group, progress), groups))
    if progress is not None:
        progress(size - sum(group[-1].end - group[0].start for group in groups))
    return [span for found in bad for span in found]


def _shares(spans: Sequence[Span], count: int) -> list[Sequence[Span]]:
    """Neighbouring spans in at most ``count`` groups of about the same number of bytes."""
    total, before = max(1, sum(span.end - span.start for span in spans)), 0
    groups: list[list[Span]] = [[] for _ in range(count)]
    for span in spans:
        groups[min(count - 1, before * count // total)].append(span)
        before += span.end - span.start
    return [group for group in groups if group]


def _scan_group(file: Path, spans: Sequence[Span], progress: Progress | None) -> list[Span]:
    checker, at, end = _Checker(spans), spans[0].start, spans[-1].end
    with mmap.mmap(-1, _CACHED_ROOM) as memory, memoryview(memory) as view:
        _take_all(file, _one_by_one(file, at, end, view), view, at, end, checker.take, progress)
    return checker.bad


def _one_by_one(file: Path, at: int, size: int, memory: memoryview) -> Iterator[tuple[int, int]]:
    """As ``read_ahead`` for what is in memory already, where handing pieces from thread to thread costs more than reading."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        while at < size:
            with memory[: min(len(memory), size - at)] as room:
                count = os.preadv(fd, [room], at)
            if not count:
                return
            at += count
            yield 0, count
    finally:
        os.close(fd)


class _Checker:
    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._index = 0
        self._crc = 0
        self.bad: list[Span] = [span for span in spans if span.start == span.end and span.crc != 0]

    def take(self, piece: memoryview, at: int) -> None:
        """The next bytes of the file, which begin at ``at``."""
        end = at + len(piece)
        while self._index < len(self._spans):
            span = self._spans[self._index]
            if span.start >= end:
                return
            with piece[max(span.start, at) - at : min(span.end, end) - at] as part:
                self._crc = crc32(part, self._crc)
            if span.end > end:
                return
            if self._crc != span.crc and span.end > span.start:
                self.bad.append(span)
            self._index += 1
            self._crc = 0


def is_cached(file: Path, size: int) -> bool:
    """Whether the kernel has the file in its page cache, going by samples: then reading past the cache would be slower."""
    flag = getattr(os, "RWF_NOWAIT", 0)
    if not flag or not size:
        return False
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        room = bytearray(1)
        return all(os.preadv(fd, [room], size * sample // _SAMPLES, flag) == 1 for sample in range(_SAMPLES))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        return False
    finally:
        os.close(fd)
