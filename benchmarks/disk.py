"""What the disk itself can do, and the calls that make sure of where bytes are."""

import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

CHUNK = 8 << 20


def sync_tree(folder: Path) -> None:
    """Fsync every file and directory below a folder, itself and its parent included: what durable means here."""
    for top, _, files in os.walk(folder):
        for name in files:
            _sync(os.path.join(top, name))
        _sync(top)
    _sync(folder.parent)


def sync_file(path: Path) -> None:
    """Fsync a file and the directory in which it has its name."""
    _sync(path)
    _sync(path.parent)


def _sync(path: str | os.PathLike[str]) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def evict(paths: Iterable[Path]) -> None:
    """Drop files from the page cache, so that the next read comes from the disk."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages would stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def first_touch_seconds(size: int) -> float:
    """How long the kernel takes to hand out fresh memory: what every page cache and every new buffer pays for.

    On a virtual machine it can be seconds per GiB, and differ from one minute to the next.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    begun = time.perf_counter()
    memory = mmap.mmap(-1, size, flags=flags)
    taken = time.perf_counter() - begun
    memory.close()
    return taken


def faulted_memory(size: int) -> mmap.mmap:
    """Page-aligned memory that has been written to, with bytes that no storage can shrink to nothing."""
    # Private: shared memory is what the memory rows count.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    noise = os.urandom(min(size, CHUNK))
    for at in range(0, size, len(noise)):
        memory[at : min(at + len(noise), size)] = noise[: min(len(noise), size - at)]
    return memory


def write_direct(path: Path, memory: mmap.mmap, size: int | None = None) -> None:
    """Write ``size`` bytes, a multiple of 4096, past the page cache in large pieces, then fsync.

    They are those of ``memory``, again and again where that is smaller.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
    whole = len(memory) if size is None else size
    try:
        with memoryview(memory) as view:
            at = 0
            while at < whole:
                start = at % len(memory)
                with view[start : min(start + CHUNK, start + whole - at)] as piece:
                    at += os.pwrite(fd, piece, at)
        os.fsync(fd)
    finally:
        os.close(fd)


def rounded_to_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
