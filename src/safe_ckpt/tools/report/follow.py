"""The history of a run in progress: its last events are read again when something was recorded."""

from __future__ import annotations

import contextlib
from pathlib import Path

from safe_ckpt.ledger import event_log
from safe_ckpt.ledger.history import History, build_history

_State = tuple[tuple[int, int, int, int], ...]


class Follower:
    """Follows the events of a directory. One thread calls it.

    Args:
        directory: as ``event_log.find_events`` takes it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._state: _State | None = None
        self._history: History | None = None

    def look(self) -> History | None:
        """The present history; None while nothing is recorded. The same object as long as nothing changed.

        Raises:
            OSError: the events are there and cannot be read.
        """
        files = event_log.find_events(self.directory)
        state = _state_of(files)
        if state != self._state:
            self._history = build_history(event_log.read_events(files)) if state else None
            self._state = state
        return self._history


def _state_of(files: tuple[Path, ...]) -> _State:
    state = []
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # rotated away in this moment
            status = path.stat()
            state.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(state)
