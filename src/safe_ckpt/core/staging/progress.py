"""A page that the writer process and its parent share: how far writing and copying are. Reading it can never block."""

from __future__ import annotations

import mmap
import os
import signal
import struct
from dataclasses import dataclass

_LAYOUT = struct.Struct("<QQII")
_MARK = struct.Struct("<Q")
FIRST_BYTE = 4096
"""Where the first file begins in a shared buffer; before it lies the mark: how far the shared buffer is filled."""
STACK_SIGNAL = signal.SIGUSR2
"""At this the writer process says where each of its threads is."""
PHASES = ("idle", "write", "fsync", "upload")
PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the writer is.

    Attributes:
        beats: goes up with every step of progress.
        moved_bytes: bytes hashed or written in this job.
        phase: what it is doing.
        file_index: which file of the job it is at.
    """

    beats: int
    moved_bytes: int
    phase: str
    file_index: int


class ProgressPage:
    """Both ends of the page. The writer process implements ``direct_io.ProgressReporter`` with it."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._beats = 0
        self._moved = 0
        self._phase = 0
        self._file = 0

    def begin(self, file_index: int) -> None:
        """A file of the job begins."""
        self._file = file_index
        if file_index == 0:
            self._moved = 0
        self._publish()

    def moved(self, count: int) -> None:
        """So many bytes were hashed or written."""
        self._moved += count
        self._publish()

    def entered(self, phase: str) -> None:
        """A phase began."""
        self._phase = PHASES.index(phase)
        self._publish()

    def waiting(self) -> None:
        """No progress, and nothing to tell."""

    def read(self) -> Progress:
        """The parent's look at it."""
        beats, moved, phase, file_index = _LAYOUT.unpack_from(self._map)
        return Progress(beats=beats, moved_bytes=moved, phase=PHASES[phase % len(PHASES)], file_index=file_index)

    def _publish(self) -> None:
        # Two threads of the writer may publish at once; a lost beat does no harm, the next one follows.
        self._beats += 1
        _LAYOUT.pack_into(self._map, 0, self._beats, self._moved, self._phase, self._file)


def write_mark(memory: mmap.mmap, end: int) -> None:
    """Everything before ``end`` in this shared buffer is in place."""
    _MARK.pack_into(memory, 0, end)


def read_mark(memory: memoryview) -> int:
    """How far a shared buffer is filled."""
    end: int = _MARK.unpack_from(memory)[0]
    return end


def new_page() -> int:
    """A fresh, zeroed, anonymous page. Returns its file descriptor."""
    fd = os.memfd_create("safe_ckpt-control", os.MFD_CLOEXEC)
    os.ftruncate(fd, PAGE_BYTES)
    return fd
