"""Pieces that a new file has in common with the file before it: btrfs and XFS let both have the same blocks of the disk.

Nothing is trusted but hashes. The process that wrote a file remembers the hash of every piece of it. When it writes the next
one it compares the pieces at the same places, and shares those that are equal instead of writing them. The old file must be the
very one that was written, by inode, size and mtime. Standard library and xxhash only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from safe_ckpt.core.storage.direct_io import PAGE

PIECE_BYTES = 256 << 10
FICLONE, _FICLONERANGE = 0x40049409, 0x4020940D  # linux/fs.h
_MOST_FILES = 256


@dataclass(frozen=True, kw_only=True)
class _Written:
    """A file that this process wrote.

    Attributes:
        size: bytes.
        mtime_ns: of its last change.
        hashes: offset -> length and hash of a piece.
    """

    size: int
    mtime_ns: int
    hashes: dict[int, tuple[int, bytes]]


_written: OrderedDict[tuple[int, int], _Written] = OrderedDict()
_able: dict[int, bool] = {}  # by the number of a file system
_learning = threading.Lock()


class SharedPieces:
    """The pieces of one file while it is written.

    Args:
        path: of the new file.
        earlier: of the file before it; "" if there is none yet, None to write everything.

    Attributes:
        shared_bytes: how much was shared.
    """

    def __init__(self, path: str, earlier: str | None) -> None:
        self.shared_bytes = 0
        self._path = path
        self._source = -1
        self._hashes: dict[int, tuple[int, bytes]] = {}
        self._before: dict[int, tuple[int, bytes]] = {}
        self._able = earlier is not None and _can_share(os.path.dirname(path) or ".")
        if self._able and earlier:
            with contextlib.suppress(OSError):
                self._open(earlier)

    def _open(self, earlier: str) -> None:
        fd = os.open(earlier, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        now = os.fstat(fd)
        known = _written.get((now.st_dev, now.st_ino))
        if known is not None and (known.size, known.mtime_ns) == (now.st_size, now.st_mtime_ns):
            self._source, self._before = fd, known.hashes
        else:
            os.close(fd)

    def runs(self, data: memoryview, offset: int) -> Iterator[tuple[int, int, bool]]:
        """Parts of ``data``, which goes to ``offset``: begin, end, and whether the file before has the same there."""
        if not self._able:
            yield 0, len(data), False
            return
        begin, same = 0, False
        for at in range(0, len(data), PIECE_BYTES):
            with data[at : at + PIECE_BYTES] as piece:
                found = len(piece), xxhash.xxh3_128_digest(piece)
            self._hashes[offset + at] = found
            equal = self._source >= 0 and self._before.get(offset + at) == found
            if equal != same and at > begin:
                yield begin, at, same
                begin = at
            same = equal
        yield begin, len(data), same

    def share(self, fd: int, offset: int, length: int) -> bool:
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
        """The new file is durable: the next one may share its blocks."""
        if not self._able:
            return
        with contextlib.suppress(OSError):
            now = os.stat(self._path)
            with _learning:
                _written[now.st_dev, now.st_ino] = _Written(
                    size=now.st_size, mtime_ns=now.st_mtime_ns, hashes=self._hashes
                )
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
    if device not in _able:
        _able[device] = _try(folder)
    return _able[device]


def _try(folder: str) -> bool:
    flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
    fds: list[int] = []
    try:
        fds += [os.open(folder, flags, 0o600), os.open(folder, flags, 0o600)]
        os.write(fds[0], bytes(PAGE))
        fcntl.ioctl(fds[1], FICLONE, fds[0])
    except OSError:
        return False
    finally:
        for fd in fds:
            os.close(fd)
    return True
