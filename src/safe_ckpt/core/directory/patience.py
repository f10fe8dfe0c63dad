"""Waiting for what is not seen yet: caches of network file systems lag behind, and a missing file may come back."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from safe_ckpt.config import Timeouts
from safe_ckpt.core.directory.shared import await_visible
from safe_ckpt.core.storage.presence import is_gone

_LONGEST_S = 30.0
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.5


class Patience:
    """A bounded time, shared by everything that is waited for in one step.

    Args:
        timeouts: half of ``barrier_s``, for the other ranks wait for this one meanwhile; 30 s at most.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._deadline = time.monotonic() + min(_LONGEST_S, timeouts.barrier_s / 2)

    @property
    def left_s(self) -> float:
        """What is left of it."""
        return max(0.0, self._deadline - time.monotonic())

    def until_there(self, file: Path) -> bool:
        """Wait until ``file`` is there. Returns False when time is up and its directory does not name it either.

        Raises:
            OSError: it is not known: the directory cannot be listed, or names what cannot be opened.
        """
        return await_visible(file, self.left_s) or not is_gone(file)

    def until_sized(self, file: Path, size_bytes: int, look: Callable[[], None]) -> int:
        """Wait until ``file`` is there with this size. Returns the size that it has in the end, -1 when it is not there.

        Args:
            file: which one.
            size_bytes: what it should have.
            look: called while waiting; raises to give up.

        Raises:
            OSError: it is not known.
        """
        pause_s = _FIRST_PAUSE_S
        while (size := _size_of(file)) != size_bytes and self.left_s:
            look()
            time.sleep(min(pause_s, self.left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            for folder in (file.parent.parent, file.parent):
                with contextlib.suppress(
                    OSError
                ):  # listing makes a network file system look again; the size is asked for
                    os.listdir(folder)
        return size if size >= 0 or is_gone(file) else _size_of(file)


def _size_of(file: Path) -> int:
    try:
        # Opened, for that is when a network file system asks the server what has become of the file.
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return -1
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)
