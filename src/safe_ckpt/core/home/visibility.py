"""Waiting, for a bounded time, until a file of another rank is seen: caches of network file systems lag behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from safe_ckpt.config import Timeouts
from safe_ckpt.core.home.home import Candidate
from safe_ckpt.core.storage import presence

_LONGEST_S = 30.0
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.5


class Patience:
    """A bounded time, shared by everything that is waited for in one step.

    Args:
        timeouts: half of ``barrier_s``, for the other ranks wait for this one meanwhile; 30 s at most.
        longest_s: less than those 30 s.
    """

    def __init__(self, timeouts: Timeouts, longest_s: float = _LONGEST_S) -> None:
        self._deadline = time.monotonic() + min(longest_s, timeouts.barrier_s / 2)

    @property
    def left_s(self) -> float:
        """The seconds that are left of it."""
        return max(0.0, self._deadline - time.monotonic())

    def until_there(self, file: Path) -> bool:
        """Wait until ``file`` is there. Returns False when time is up and its directory does not name it either.

        Raises:
            OSError: it is not known: the directory cannot be listed, or names what cannot be opened.
        """
        return await_visible(file, self.left_s) or not presence.is_gone(file)

    def until_sized(self, file: Path, size_bytes: int, look: Callable[[], None]) -> int:
        """Wait until ``file`` is there with this size. Returns the size that it has in the end, -1 when it is not there.

        Args:
            file: which one.
            size_bytes: what it should have.
            look: called while waiting; raises to give up.

        Raises:
            OSError: it is not known.
        """
        size = -1

        def is_sized() -> bool:
            nonlocal size
            size = _size_of(file)  # each look costs a request to the server of a network file system
            return size == size_bytes

        _await(is_sized, file, self.left_s, look)
        return size if size >= 0 or presence.is_gone(file) else _size_of(file)


def await_visible(path: Path, timeout_s: float) -> bool:
    """Wait until this rank sees ``path``. Returns False when it does not within ``timeout_s``."""
    return _await(lambda: presence.is_seen(path), path, timeout_s)


def _await(done: Callable[[], bool], path: Path, timeout_s: float, look: Callable[[], None] = lambda: None) -> bool:
    """Wait until ``done``, which looks at ``path``. Returns False when that takes longer than ``timeout_s``."""
    deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while not done():
        if time.monotonic() >= deadline:
            return False
        look()
        time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        # Network file systems cache what a directory holds; listing the parent makes them look again.
        for folder in (path.parent.parent, path.parent):
            with contextlib.suppress(OSError):
                os.listdir(folder)
    return True


def _size_of(file: Path) -> int:
    try:
        # Opened, for that is when a network file system asks the server what has become of the file.
        with presence.opened(file, os.O_RDONLY | os.O_NONBLOCK) as fd:
            return os.fstat(fd).st_size
    except (FileNotFoundError, NotADirectoryError):
        return -1


def list_patiently(list_candidates: Callable[[], Sequence[Candidate]], timeouts: Timeouts) -> Sequence[Candidate]:
    """The candidates, listed again for a bounded time as long as something of ours seems to be missing. On rank 0.

    Raises:
        OSError: something cannot be looked at, or its directory names what cannot be opened.
    """
    patience = Patience(timeouts)
    while True:
        over = not patience.left_s
        candidates = list_candidates()
        missed = _missed(candidates)
        if not missed:
            return candidates
        if over or not patience.until_there(missed[0]):
            break
    for candidate in candidates:
        if candidate.missing in missed and not candidate.foreign:
            presence.is_gone(candidate.missing)  # raises if that is unknown
    return candidates


def _missed(candidates: Sequence[Candidate]) -> list[Path]:
    """Files that may be missing: also the manifest of what looks like another tool's and has a higher number than ours."""
    ours = [c.number for c in candidates if c.manifest is not None]
    return [
        c.missing
        for c in candidates
        if c.missing is not None and (not c.foreign or (ours and not c.problem and c.step > max(ours)))
    ]
