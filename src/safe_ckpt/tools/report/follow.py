"""The history of a run in progress: each look reads only what was appended since the last one."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from safe_ckpt.tools.report import event_log
from safe_ckpt.tools.report.history import History, HistoryBuilder

_MOST_APPENDED_BYTES = 8 << 20  # beyond that the last events are read from the end
_MOST_TAIL_BYTES = 1 << 16
_FINGERPRINT_BYTES = 256

_State = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """How far the newest file was read: to the byte ``end``, the end of a line; ``last`` are the bytes before it."""

    file: tuple[int, int]
    end: int
    last: bytes


class Follower:
    """Follows the events of a directory. One thread calls it.

    Args:
        directory: as ``event_log.find_events`` takes it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._state: _State | None = None
        self._place: _Place | None = None
        self._builder = HistoryBuilder(event_log.Recording(events=()))
        self._history: History | None = None

    def look(self) -> History | None:
        """The present history; None while nothing is recorded. The same object as long as nothing changed.

        A line that is not finished yet is left for the next look. Past twice ``event_log.MOST_EVENTS`` the last ones are read
        anew, so that memory stays bounded.

        Raises:
            OSError: the events are there and cannot be read.
        """
        files = event_log.find_events(self.directory)
        state = _state_of(files)
        if state == self._state:
            return self._history
        if not state:
            self._place, self._history = None, None
        else:
            if not self._read_more(files, state):
                self._start_over(files, state)
            self._history = self._builder.history()
        self._state = state
        return self._history

    def _read_more(self, files: tuple[Path, ...], state: _State) -> bool:
        """Whether the newest file was only appended to; then the history has what was appended."""
        place = self._place
        if place is None or self._state is None or not state or state[1:] != self._state[1:]:
            return False
        file, size = state[0][:2], state[0][2]
        if file != place.file or not place.end <= size <= place.end + _MOST_APPENDED_BYTES:
            return False
        try:
            with files[0].open("rb") as stream:
                if not _fits(stream, place):
                    return False
                appended = os.pread(stream.fileno(), size - place.end, place.end)
        except FileNotFoundError:  # rotated away in this moment
            return False
        whole = appended[: appended.rfind(b"\n") + 1]
        lines = [line for line in whole.split(b"\n") if line.strip()]
        events = [event for line in lines if (event := event_log.parse(line)) is not None]
        if self._history is None or self._history.events + len(events) > 2 * event_log.MOST_EVENTS:
            return False
        self._builder.receive(events, skipped=len(lines) - len(events))
        self._place = replace(place, end=place.end + len(whole), last=(place.last + whole)[-_FINGERPRINT_BYTES:])
        return True

    def _start_over(self, files: tuple[Path, ...], state: _State) -> None:
        self._place = _end_of(files[0], state[0][:2], state[0][2])
        ends = {self._place.file: self._place.end} if self._place is not None else {}
        self._builder = HistoryBuilder(event_log.read_events(files, ends=ends))


def _fits(stream: BinaryIO, place: _Place) -> bool:
    """Whether it is the same file: the number of an inode is used again, and a file may be cut and grow anew."""
    status = os.fstat(stream.fileno())
    if (status.st_dev, status.st_ino) != place.file or not place.last.endswith(b"\n"):
        return False
    return os.pread(stream.fileno(), len(place.last), place.end - len(place.last)) == place.last


def _end_of(path: Path, file: tuple[int, int], size: int) -> _Place | None:
    """The end of the last whole line within the first ``size`` bytes; None when it is another file by now."""
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if (status.st_dev, status.st_ino) != file:
                return None
            start = max(0, size - _MOST_TAIL_BYTES)
            tail = os.pread(stream.fileno(), size - start, start)
    except FileNotFoundError:
        return None
    whole = tail[: tail.rfind(b"\n") + 1] or (tail if start else b"")
    return _Place(file=file, end=start + len(whole), last=whole[-_FINGERPRINT_BYTES:])


def _state_of(files: tuple[Path, ...]) -> _State:
    state = []
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # rotated away in this moment
            status = path.stat()
            state.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(state)
