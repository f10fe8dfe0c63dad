"""Shared memory that holds one snapshot. It is laid out as the files will be, so writing it needs no second copy.

An anonymous memory file (``memfd``): it has no name, so nothing is left behind by a killed job, and direct I/O works from it.
Its pages are allocated before they are written to: where memory is short that is an error, not a SIGBUS, nor a visit of
the out-of-memory killer.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import tempfile

from safe_ckpt.core import host_memory
from safe_ckpt.errors import NotEnoughSpaceError

_ids = itertools.count(1)
GRANULE = 2 << 20


class Arena:
    """One growing block of shared memory.

    Attributes:
        id: tells arenas of this process apart.
        size: bytes that are mapped now.
    """

    def __init__(self) -> None:
        self.id = next(_ids)
        self.size = 0
        self._fd = _anonymous_file()
        self._map: mmap.mmap | None = None

    def reserve(self, size: int) -> None:
        """Make room for ``size`` bytes; what was in it may be lost. Never shrinks.

        Raises:
            NotEnoughSpaceError: this machine has not that much memory left.
        """
        if size <= self.size:
            return
        size = -(-size // GRANULE) * GRANULE
        free = host_memory.available_bytes()
        if free is not None and size - self.size > free:
            raise _does_not_fit(size - self.size, free)
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise _does_not_fit(size - self.size, free or 0) from error
        # The old mapping may still be looked at by tensors; it goes when they do.
        self._map = mmap.mmap(self._fd, size)
        self.size = size

    @property
    def memory(self) -> mmap.mmap:
        """The mapped memory."""
        if self._map is None:
            self.reserve(GRANULE)
        if self._map is None:
            raise ValueError("the arena was closed")
        return self._map

    def fileno(self) -> int:
        """The file descriptor, for the writer process."""
        return self._fd

    def close(self) -> None:
        """Free the memory once nobody looks at it any more."""
        self._map = None
        self.size = 0
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("safe_ckpt", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # unlinked at once: nothing to clean up either
        return os.dup(file.fileno())


def _does_not_fit(needed: int, free: int) -> NotEnoughSpaceError:
    return NotEnoughSpaceError(
        path="host memory",
        message="The snapshot does not fit: save less at a time, or give the job more memory.",
        needed_bytes=needed,
        free_bytes=free,
        phase="snapshot",
    )
