"""From a file to memory, hashed on the way: several reads ahead of the hash, past the page cache where that can be.

Verification costs next to nothing this way: it runs while the disk works, and nothing is read twice.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

from safe_ckpt.core.storage.direct_io import PAGE
from safe_ckpt.core.storage.presence import ShortReadError

_CHUNK = 8 << 20
_AHEAD = 4  # reads under way at a time
_DIRECT_FROM = 1 << 20  # below this the page cache is as good


def read_whole(file: Path, length: int) -> tuple[mmap.mmap, str]:
    """Read the first ``length`` bytes of a file into memory of their own.

    Returns:
        Memory of at least ``length`` bytes that nobody else looks at, zeros behind the end; and the bytes' xxh3-128.

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
        for start, end in read_ahead(file, length, view):
            with view[start:end] as piece:
                digest.update(piece)
    return memory, digest.hexdigest()


def digest_of(file: Path, length: int, *, cached: bool = False) -> str:
    """xxh3-128 of the first ``length`` bytes, keeping no more than a few pieces in memory.

    Args:
        file: which one.
        length: how much of it.
        cached: through the page cache, for a file that is read once more in a moment.

    Raises:
        OSError: it could not be read.
    """
    digest = xxhash.xxh3_128()
    room = min(length, (_AHEAD + 1) * _CHUNK)
    with mmap.mmap(-1, max(1, -(-room // PAGE)) * PAGE) as memory, memoryview(memory) as view:
        for start, end in read_ahead(file, length, view, cached=cached):
            with view[start:end] as piece:
                digest.update(piece)
    return digest.hexdigest()


def read_ahead(file: Path, length: int, memory: memoryview, *, cached: bool = False) -> Iterator[tuple[int, int]]:
    """Read a file piece by piece, in order, several pieces ahead. Yields where in ``memory`` each piece lies.

    With less memory than ``length`` it is used over and over: a piece is valid until the next one is asked for.
    """
    source = _Source(file, direct=length >= _DIRECT_FROM and not cached)
    slots = len(memory) // _CHUNK if len(memory) < length else 0
    pending: list[tuple[int, int, Future[int]]] = []
    starts = iter(range(0, length, _CHUNK))

    def ask(pool: ThreadPoolExecutor) -> None:
        at = next(starts, None)
        if at is not None:
            place = at if not slots else (at // _CHUNK) % slots * _CHUNK
            size = min(_CHUNK, length - at)
            pending.append((place, size, pool.submit(source.read, memory, place, at, size)))

    try:
        with ThreadPoolExecutor(_AHEAD, thread_name_prefix="safe_ckpt-read") as pool:
            for _ in range(_AHEAD):
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


def drop_cache(path: Path) -> None:
    """Have a file, or all files of a directory, read from the disk the next time. Opening asks a server what they are now."""
    for file in [path] if path.is_file() else [child for child in path.rglob("*") if child.is_file()]:
        with contextlib.suppress(OSError):
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


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
        while done < size:  # what direct reading left over, or all of it
            with memory[place + done : place + size] as room:
                count = os.preadv(self._plain, [room], offset + done)
            if not count:
                break
            done += count
        if done < size and os.fstat(self._plain).st_size > offset + done:
            # A network file system's cache, or one that fails: that is no shorter file, and says nothing of its bytes.
            raise ShortReadError(self._name, offset + done)
        return done

    def close(self) -> None:
        """Give the descriptors back."""
        for fd in (self._plain, self._direct):
            if fd >= 0:
                os.close(fd)
