"""Shared memory that holds one snapshot. It is laid out as the files will be, so writing it needs no second copy.

An anonymous memory file (``memfd``): it has no name, so a killed job leaves nothing behind, and direct I/O works from it. Its
pages are allocated by system calls and not by the first access: a lack of memory is an error, not a SIGBUS or a kill by the
out-of-memory killer. Its first page says how far it is filled, so that writing can begin before copying ends.

A buffer that nobody had time to make ready is ``fresh``: the first snapshot goes into it by ``write``, which allocates and
copies in one pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from safe_ckpt.core.cuda import Cuda
from safe_ckpt.core.staging import host_memory
from safe_ckpt.core.staging.progress import FIRST_BYTE, write_mark
from safe_ckpt.errors import NotEnoughSpaceError

_libc = ctypes.CDLL(None, use_errno=True)
_ids = itertools.count(1)
GRANULE = 2 << 20
_SMALL_GRANULE = 64 << 10
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; the mmap module does not name it
_POPULATE_STEP = 8 << 20
_FILL_STEP = 1 << 20
_SHMEM_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class SharedBuffer:
    """One growing block of shared memory, used by one save at a time.

    Attributes:
        id: tells shared buffers of this process apart.
        size: bytes that it holds now.
        fresh: some of its pages may not be allocated yet, or not be mapped.
        short: there was not enough memory for what it was to hold; it should not be used again.
    """

    def __init__(self) -> None:
        self.id = next(_ids)
        self.size = 0
        self.fresh = False
        self.short = False
        self._fd = os.memfd_create("safe_ckpt", os.MFD_CLOEXEC)
        self._mapped: tuple[mmap.mmap, torch.Tensor] | None = None
        self._growing = threading.RLock()  # pre-faulting ahead of a save happens on another thread than the save
        self._marking = threading.Lock()
        self._unpin: Callable[[], None] | None = None
        self._unpinnable = False
        self._closing = False

    def reserve(self, size: int, *, ready: bool = True, unless: Callable[[], bool] = lambda: False) -> None:
        """Make room for ``size`` bytes; what was in it may be lost. Never shrinks.

        Args:
            size: bytes.
            ready: whether all of it is to be allocated and mapped before this returns; else it may stay ``fresh``.
            unless: asked again and again meanwhile; once it says so this returns, and the buffer stays ``fresh``.

        Raises:
            NotEnoughSpaceError: this machine has not that much memory left.
        """
        with self._growing:
            before = self._mapped, self.size, self.fresh
            with self._short_of(size - self.size):
                try:
                    if size > self.size:
                        self._grow(size)
                    if self.fresh and (ready or _huge_on_advice()):
                        self._populate(0 if before[2] else before[1], unless)
                except BaseException:
                    # Give back what was allocated: training goes on.
                    self._mapped, self.size, self.fresh = before
                    os.ftruncate(self._fd, self.size)
                    raise

    def write(self, offset: int, address: int, length: int) -> None:
        """Copy memory into a fresh buffer. Without the interpreter lock; on any thread, several at a time.

        Args:
            offset: in the buffer.
            address: of the memory.
            length: bytes.

        Raises:
            NotEnoughSpaceError: this machine has not that much memory left.
        """
        with self._short_of(self.size), memoryview((ctypes.c_char * length).from_address(address)) as source:
            _write_all(self._fd, source, offset)

    def allocate(self, offset: int, length: int) -> None:
        """Allocate a part of a fresh buffer, if it is not; what is there stays. On any thread.

        Raises:
            NotEnoughSpaceError: this machine has not that much memory left.
        """
        with self._short_of(self.size):
            os.posix_fallocate(self._fd, offset, min(length, self.size - offset))

    def put(self, offset: int, data: bytes) -> None:
        """Fill in what is not a tensor.

        Raises:
            NotEnoughSpaceError: this machine has not that much memory left.
        """
        if self.fresh:
            with self._short_of(self.size):
                _write_all(self._fd, memoryview(data), offset)
        else:
            self.memory[offset : offset + len(data)] = data

    @property
    def memory(self) -> mmap.mmap:
        """The mapped memory."""
        return self._open()[0]

    @property
    def bytes(self) -> torch.Tensor:
        """The mapped memory as a tensor of shape ``(size,)`` and type ``uint8``."""
        return self._open()[1]

    def _open(self) -> tuple[mmap.mmap, torch.Tensor]:
        if self._mapped is None:
            self.reserve(1)
        if self._mapped is None:
            raise ValueError("the shared buffer was closed")
        return self._mapped

    def mark(self, end: int) -> None:
        """Say that everything before ``end`` is in place and will not change."""
        # The lock is for its memory barrier: the bytes must be seen by the writer process before the mark is.
        with self._marking:
            write_mark(self.memory, end)

    def pin(self, device: torch.device, cuda: Cuda) -> bool:
        """Register the memory with CUDA, so that copies from a device run beside the computing. Returns whether it is.

        With CUDA this was read, not run: no machine with it was at hand.

        Args:
            device: on which the calling thread is to stand meanwhile; the memory is pinned for all.
            cuda: the devices.
        """
        with self._growing:
            if self._unpin is None and self._mapped is not None and not self._unpinnable:
                self._unpin = cuda.register(self.bytes.data_ptr(), self.size, device)
                self._unpinnable = self._unpin is None
            return self._unpin is not None

    def fileno(self) -> int:
        """The file descriptor, for the writer process."""
        return self._fd

    def close(self) -> None:
        """Free the memory once no tensor uses it any more."""
        self._closing = True
        with self._growing:
            self._release_pinned()
            self._mapped = None
            self.size = 0
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _grow(self, size: int) -> None:
        granule = GRANULE if size > GRANULE // 2 else _SMALL_GRANULE
        size = -(-size // granule) * granule
        free = host_memory.available_bytes()
        if free is not None and size - self.size > free:
            raise _does_not_fit(size - self.size, free)
        self._release_pinned()
        os.ftruncate(self._fd, size)
        mapped = mmap.mmap(self._fd, size)
        with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages for shared memory
            mapped.madvise(mmap.MADV_HUGEPAGE)
        # The old mapping may still be looked at by tensors; it goes when they do.
        self._mapped = mapped, torch.frombuffer(mapped, dtype=torch.uint8)
        self.size, self.fresh = size, True
        os.posix_fallocate(self._fd, 0, FIRST_BYTE)

    def _populate(self, filled: int, unless: Callable[[], bool]) -> None:
        # Through the file first: faults hold the lock of the process's address space while the machine looks for memory,
        # and whatever training allocates meanwhile waits for it (on a virtual machine, seconds per GiB). Where huge pages
        # are given on advice, only faults get them.
        by_faults, address = _huge_on_advice(), self.bytes.data_ptr()
        if not by_faults and not self._fill(filled, unless):
            return
        for at in range(0, self.size, _POPULATE_STEP):
            self._refuse_if_closing()
            if unless():
                return
            if not _map(address + at, min(_POPULATE_STEP, self.size - at)):
                # An older kernel: the first copy maps what is allocated now.
                if by_faults and not self._fill(filled, unless):
                    return
                break
        self.fresh = False

    def _fill(self, start: int, unless: Callable[[], bool]) -> bool:
        """Allocate what lies behind ``start``. Returns whether that is done."""
        for at in range(start, self.size, _FILL_STEP):
            self._refuse_if_closing()
            if unless():
                return False
            os.posix_fallocate(self._fd, at, min(_FILL_STEP, self.size - at))
        return True

    @contextlib.contextmanager
    def _short_of(self, needed: int) -> Iterator[None]:
        try:
            yield
        except NotEnoughSpaceError:
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            self.short = True
            raise _does_not_fit(needed, host_memory.available_bytes() or 0) from error

    def _refuse_if_closing(self) -> None:
        if self._closing:
            raise OSError(errno.ECANCELED, "the shared buffer was closed")

    def _release_pinned(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None


def _huge_on_advice() -> bool:
    try:
        return "[advise]" in _SHMEM_PAGES.read_text(encoding="utf-8")
    except OSError:
        return False


def _write_all(fd: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        with data[done:] as rest:
            done += os.pwrite(fd, rest, at + done)


def _map(start: int, length: int) -> bool:
    """Map pages, which allocates what is not; the first copy would pay for it otherwise. Returns whether the kernel can."""
    if not _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _POPULATE_WRITE):
        return True
    if ctypes.get_errno() in (errno.ENOMEM, errno.EFAULT):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return False


def _does_not_fit(needed: int, free: int) -> NotEnoughSpaceError:
    return NotEnoughSpaceError(
        path="host memory",
        message="The snapshot does not fit: save less at a time, set max_host_bytes, or give the job more memory.",
        needed_bytes=needed,
        free_bytes=free,
        phase="snapshot",
    )
