"""Pieces that a new file has in common with the file before it: btrfs and XFS let both have the same blocks of the disk.

The process that wrote a file remembers the hash of every piece of it. When it writes the next one it compares the pieces at the
same places, and shares those that are equal instead of writing them. The old file must be the very one that was written, by
inode, size and mtime, with the ctime that it had after its commit: nobody who edits a file can set that back. What a disk does
to its blocks by itself is not noticed before the next verification. Standard library and xxhash only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from safe_ckpt.core.storage.direct_io import PAGE, ProgressReporter, WriteOptions, write_all
from safe_ckpt.core.storage.presence import opened

PIECE_BYTES = 256 << 10
LEAST_BYTES = 1 << 20
FICLONE, _FICLONERANGE = 0x40049409, 0x4020940D  # linux/fs.h
_UNABLE = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.ENOSYS, errno.EISDIR, errno.ENOENT)
_HASH_BYTES = 16
_MOST_FILES = 64


@dataclass(frozen=True, kw_only=True)
class _Written:
    """A file that this process wrote.

    Attributes:
        size: bytes.
        mtime_ns: of its last change.
        hashes: of its whole pieces, in a row.
    """

    size: int
    mtime_ns: int
    hashes: bytes


_written: OrderedDict[tuple[int, int], _Written] = OrderedDict()
_able: dict[int, bool] = {}  # by the number of a file system
_learning = threading.RLock()


class SharedPieces:
    """The pieces of one file while it is written. Never raises: what cannot be shared is written.

    Args:
        path: of the file.
        length: how many bytes it will have.
        earlier: path and ctime of the file before it; empty if there is none yet.
        options: how to write.

    Attributes:
        shared_bytes: how much was shared.
    """

    def __init__(self, path: str, length: int, earlier: Sequence[Any], options: WriteOptions) -> None:
        self.shared_bytes = 0
        self._path = path
        self._source = -1
        self._replaces: tuple[int, int] | None = None
        self._hashes = bytearray()
        self._before = b""
        self._able = length >= LEAST_BYTES and options.chunk_bytes % PIECE_BYTES == 0
        with contextlib.suppress(OSError):
            self._able = self._able and _can_share(os.path.dirname(path) or ".")
            if self._able and earlier:
                self._open(*earlier)

    def _open(self, earlier: str, ctime_ns: int) -> None:
        with opened(earlier, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            now = os.fstat(fd)
            known = _written.get((now.st_dev, now.st_ino))
            same = known is not None and (known.size, known.mtime_ns) == (now.st_size, now.st_mtime_ns)
            if known is not None and same and now.st_ctime_ns == ctime_ns:
                self._source, self._before = os.dup(fd), known.hashes
                self._replaces = now.st_dev, now.st_ino

    def put(self, fd: int, data: memoryview, offset: int, progress: ProgressReporter, direct: bool) -> bool:
        """Share what the file before has at the same place, and write the rest. As ``write_all``."""
        for begin, end, same in self._runs(data, offset):
            if same and self._share(fd, offset + begin, end - begin):
                progress.moved(end - begin)
                continue
            direct = write_all(fd, data[begin:end], offset + begin, progress, direct=direct)
        return direct

    def _runs(self, data: memoryview, offset: int) -> Iterator[tuple[int, int, bool]]:
        """Parts of ``data``, which goes to ``offset``: begin, end, and whether the file before has the same there."""
        if not self._able:
            yield 0, len(data), False
            return
        begin, same = 0, False
        for at in range(0, len(data), PIECE_BYTES):
            equal = False
            if at + PIECE_BYTES <= len(data):
                with data[at : at + PIECE_BYTES] as piece:
                    found = xxhash.xxh3_128_digest(piece)
                place = (offset + at) // PIECE_BYTES * _HASH_BYTES
                equal = self._source >= 0 and self._before[place : place + _HASH_BYTES] == found
                self._hashes += found
            if equal != same and at > begin:
                yield begin, at, same
                begin = at
            same = equal
        yield begin, len(data), same

    def _share(self, fd: int, offset: int, length: int) -> bool:
        """Let the new file have the blocks of the one before. Returns whether it has; else they are to be written."""
        if length % PAGE or offset % PAGE:
            return False
        try:
            fcntl.ioctl(fd, _FICLONERANGE, struct.pack("<qQQQ", self._source, offset, length, offset))
        except OSError:
            return False
        self.shared_bytes += length
        return True

    def remember(self) -> None:
        """The new file is durable: the next one may share its blocks, and no other one those of the file before."""
        if not self._able:
            return
        with contextlib.suppress(OSError):
            now = os.stat(self._path)
            with _learning:
                if self._replaces is not None:
                    _written.pop(self._replaces, None)
                key = now.st_dev, now.st_ino
                _written[key] = _Written(size=now.st_size, mtime_ns=now.st_mtime_ns, hashes=bytes(self._hashes))
                _written.move_to_end(key)
                while len(_written) > _MOST_FILES:
                    _written.popitem(last=False)

    def close(self) -> None:
        """Give the descriptor back."""
        fd, self._source = self._source, -1
        if fd >= 0:
            os.close(fd)


def _can_share(folder: str) -> bool:
    """Whether files in this folder can have the same blocks. Tried once for a file system, with two files without names."""
    device = os.stat(folder).st_dev
    if device in _able:
        return _able[device]
    try:
        _try(folder)
    except OSError as error:
        if error.errno in _UNABLE:  # another one may be gone the next time
            _able[device] = False
        return False
    _able[device] = True
    return True


def _try(folder: str) -> None:
    flags = os.O_RDWR | os.O_TMPFILE
    with opened(folder, flags, 0o600) as one, opened(folder, flags, 0o600) as other:
        os.write(one, bytes(PAGE))
        fcntl.ioctl(other, FICLONE, one)
