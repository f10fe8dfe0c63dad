"""Shared memory that holds one snapshot. It is laid out as the files will be, so writing it needs no second copy.

An anonymous memory file (``memfd``): it has no name, so a killed job leaves nothing behind, and direct I/O works from it. Its
pages are allocated before they are written to: a lack of memory is an error, not a SIGBUS or a kill by the out-of-memory
killer. Its first page says how far it is filled, so that writing can begin before copying ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from safe_ckpt import machine as host_memory
from safe_ckpt.core.staging.device import Devices
from safe_ckpt.core.staging.progress import write_mark
from safe_ckpt.errors import NotEnoughSpaceError

_libc = ctypes.CDLL(None, use_errno=True)
_ids = itertools.count(1)
GRANULE = 2 << 20
_SMALL_GRANULE = 64 << 10
# MADV_POPULATE_READ and MADV_POPULATE_WRITE, Linux 5.14; the mmap module does not name them.
_POPULATE_READ, _POPULATE_WRITE = 22, 23
_POPULATE_STEP = 8 << 20
_TWO_THREADS_FROM = 64 << 20
_ZEROS = bytes(1 << 20)
_SHMEM_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class SharedBuffer:
    """One growing block of shared memory, used by one save at a time.

    Attributes:
        id: tells shared buffers of this process apart.
        size: bytes that are mapped now.
        filled_for: layouts, and offsets, of files whose unchanging bytes are in place; for whoever fills it.
        beside_bytes: what must be left besides when this grows: those who write what is in it need memory too.
    """

    def __init__(self) -> None:
        self.id = next(_ids)
        self.size = 0
        self.filled_for: frozenset[tuple[object, int]] = frozenset()
        self.beside_bytes = 0
        self._fd = os.memfd_create("safe_ckpt", os.MFD_CLOEXEC)
        self._mapped: tuple[mmap.mmap, torch.Tensor] | None = None
        self._growing = threading.RLock()  # pre-faulting ahead of a save happens on another thread than the save
        self._pinned: dict[
            str, Callable[[], None] | None
        ] = {}  # by device type, what takes it back; None where it was refused
        self._closing = False

    def reserve(self, size: int, *, waiting: bool = False) -> None:
        """Make room for ``size`` bytes, all of it allocated and mapped; what was in it may be lost. Never shrinks.

        Args:
            size: bytes.
            waiting: training waits for this: two threads do it, in the quickest way. Else nobody is to notice.

        Raises:
            NotEnoughSpaceError: this machine has not that much memory left.
        """
        with self._growing:
            if size <= self.size:
                return
            size = rounded(size)
            free = host_memory.available_bytes()
            if free is not None and size - self.size + self.beside_bytes > free:
                raise _does_not_fit(size - self.size, free, self.beside_bytes)
            self._release_pinned()
            try:
                fresh = self._allocate(size, waiting=waiting)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                    raise
                raise _no_address_left(size) or _does_not_fit(size - self.size, free or 0) from error
            # The old mapping may still be looked at by tensors; it goes when they do.
            self._mapped = fresh, torch.frombuffer(fresh, dtype=torch.uint8)
            self.size, self.filled_for = size, frozenset()

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
        with self._growing:
            write_mark(self.memory, end)

    def pin(self, device: torch.device, devices: Devices) -> bool:
        """Register the memory with a device, so that copies from it run beside the computing. Returns whether it is.

        Args:
            device: on which the calling thread is to stand meanwhile; the memory is pinned for all of its type.
            devices: the devices.
        """
        with self._growing:
            if self._mapped is None:
                return False
            if device.type not in self._pinned:
                self._pinned[device.type] = devices.register(self.bytes.data_ptr(), self.size, device)
            return self._pinned[device.type] is not None

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

    def _allocate(self, size: int, *, waiting: bool) -> mmap.mmap:
        os.ftruncate(self._fd, size)
        try:
            fresh = mmap.mmap(self._fd, size)
            with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages for shared memory
                fresh.madvise(mmap.MADV_HUGEPAGE)
            self._populate(torch.frombuffer(fresh, dtype=torch.uint8).data_ptr(), size, waiting=waiting)
        except BaseException:
            os.ftruncate(self._fd, self.size)  # give back what was allocated: training goes on
            raise
        return fresh

    def _populate(self, address: int, size: int, *, waiting: bool) -> None:
        # Faults hold the lock of the process's address space while the machine looks for memory, and whatever training
        # allocates meanwhile waits for it (on a virtual machine, seconds per GiB). Where training waits anyway they are the
        # quickest way, and where huge pages are given on advice, only faults get them. Else through the file first.
        if waiting or _huge_on_advice():
            by_two = waiting and size >= _TWO_THREADS_FROM
            if not (self._map_by_two(address, size) if by_two else self._map_all(address, size, _POPULATE_WRITE)):
                self._fill(size)
            return
        self._fill(size)
        self._map_all(address, size, _POPULATE_READ)  # maps several pages with each fault, and they can be written to

    def _map_by_two(self, address: int, size: int) -> bool:
        middle = size // 2 // _POPULATE_STEP * _POPULATE_STEP
        stop = threading.Event()
        found: list[bool | OSError] = []

        def other() -> None:
            try:
                found.append(self._map_all(address + middle, size - middle, _POPULATE_WRITE, stop))
            except OSError as error:
                found.append(error)
                stop.set()

        # No pool of threads: its lock may be held by what a signal's handler has interrupted, and the handler may save.
        thread = threading.Thread(target=other, name="safe_ckpt-map", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system gives no more threads
            return self._map_all(address, size, _POPULATE_WRITE)
        try:
            mapped = self._map_all(address, middle, _POPULATE_WRITE, stop)
            thread.join()
        finally:
            stop.set()  # it must not go on in memory that is given back
            while thread.is_alive():
                thread.join()
        for result in found:
            if isinstance(result, OSError):
                raise result
        return mapped and found == [True]  # it may also have ended without a word

    def _map_all(self, address: int, size: int, advice: int, stop: threading.Event | None = None) -> bool:
        """Returns False with an older kernel, and when it was stopped: the first copy maps what is allocated then."""
        for at in range(0, size, _POPULATE_STEP):
            self._refuse_if_closing()
            if (stop is not None and stop.is_set()) or not _map(address + at, min(_POPULATE_STEP, size - at), advice):
                return False
        return True

    def _fill(self, size: int) -> None:
        for begin in range(self.size, size, len(_ZEROS)):
            self._refuse_if_closing()
            # Zeros, so that it is allocated. Without the interpreter lock.
            fd, at, end = self._fd, begin, min(begin + len(_ZEROS), size)
            while at < end:
                at += os.pwrite(fd, _ZEROS[: end - at], at)

    def _refuse_if_closing(self) -> None:
        if self._closing:
            raise OSError(errno.ECANCELED, "the shared buffer was closed")

    def _release_pinned(self) -> None:
        pinned, self._pinned = (
            self._pinned,
            {name: None for name, take_back in self._pinned.items() if take_back is None},
        )
        for take_back in pinned.values():
            if take_back is not None:
                take_back()


def rounded(size: int) -> int:
    """Return how much is taken for ``size`` bytes."""
    granule = GRANULE if size > GRANULE // 2 else _SMALL_GRANULE
    return -(-size // granule) * granule


def _huge_on_advice() -> bool:
    try:
        return "[advise]" in _SHMEM_PAGES.read_text(encoding="utf-8")
    except OSError:
        return False


def _map(start: int, length: int, advice: int) -> bool:
    """Map pages, which allocates what is not; the first copy would pay for it otherwise. Returns whether the kernel can."""
    if not _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice):
        return True
    if ctypes.get_errno() in (errno.ENOMEM, errno.EFAULT):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return False


def _no_address_left(size: int) -> NotEnoughSpaceError | None:
    left = host_memory.address_space_left()
    if left is None or size <= left:
        return None
    message = (
        "The address space of this process is limited (ulimit -v, RLIMIT_AS), however much memory is free: raise that "
        "limit, save less at a time, or set max_host_bytes."
    )
    return NotEnoughSpaceError(
        path="address space", message=message, needed_bytes=size, free_bytes=left, phase="snapshot"
    )


def _does_not_fit(needed: int, free: int, beside: int = 0) -> NotEnoughSpaceError:
    what = f"The snapshot, and {beside} bytes for writing it, do not fit" if beside else "The snapshot does not fit"
    return NotEnoughSpaceError(
        path="host memory",
        message=f"{what}: save less at a time, set max_host_bytes, or give the job more memory.",
        needed_bytes=needed + beside,
        free_bytes=free,
        phase="snapshot",
    )
