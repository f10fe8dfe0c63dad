"""Reads ``events.jsonl`` and its rotated predecessors. Whatever is in the files, memory is bounded and nothing raises.

The files are read from their ends, so that the last events of gigabytes take no longer than those of a small file.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from safe_ckpt.core.formats.manifest import MANIFEST_NAME
from safe_ckpt.core.home.home import HIDDEN
from safe_ckpt.core.storage import presence
from safe_ckpt.text import clean

MOST_EVENTS = 20_000
"""So many events are read at most, the last ones."""
EVENTS = "events.jsonl"
_ROTATED = re.compile(re.escape(EVENTS) + r"\.([1-9][0-9]{0,8})")
_ELSEWHERE = "_safe_ckpt"  # the name of the hidden folder in Transformers' output directory
_ACCELERATE = "checkpoints"  # Accelerate's automatic naming: the hidden folder lies beside it
_BLOCK_BYTES = 1 << 18
_MOST_LINE_BYTES = 1 << 16
_TOO_LONG = b"\xff"  # no JSON: a line that ends so is skipped
_YEARS_S = (1e9, 4.1e9)  # 2001 to 2099: any other time stamp is invalid
_MOST_COUNT = 1 << 62
_MOST_NUMBER = 1e15


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One line: what happened, when (seconds since the epoch) and on which rank. The getters never raise."""

    kind: str
    at: float
    rank: int
    facts: Mapping[str, object]

    def number(self, key: str) -> float | None:
        """A finite number that is not negative; None if it is anything else."""
        return _number(self.facts.get(key))

    def count(self, key: str) -> int | None:
        """A whole number of a sane size; None if it is anything else."""
        value = self.facts.get(key)
        return value if type(value) is int and abs(value) < _MOST_COUNT else None

    def text(self, key: str) -> str:
        """One harmless line of text; "" if it is anything else."""
        value = self.facts.get(key)
        return clean(value) if isinstance(value, str) else ""

    def sequence(self, key: str) -> tuple[str, ...]:
        """A list of short texts; empty if it is anything else."""
        value = self.facts.get(key)
        return tuple(clean(name) for name in value if isinstance(name, str)) if isinstance(value, list) else ()

    def texts(self, key: str) -> dict[str, str]:
        """A mapping of short texts; empty if it is anything else."""
        value = self.facts.get(key)
        pairs = list(value.items())[:50] if isinstance(value, dict) else []
        return {clean(name, 50): clean(str(text), 50) for name, text in pairs if isinstance(text, str | int)}


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The events that were read.

    Attributes:
        events: oldest first.
        skipped: lines that are no events: torn, damaged or foreign.
        earlier: there are older events that were not read.
    """

    events: tuple[Recorded, ...] = field(repr=False)
    skipped: int = 0
    earlier: bool = False


def find_events(directory: Path) -> tuple[Path, ...]:
    """The files of events that belong to ``directory``, newest first; empty when there are none. Only names are read.

    They lie in its hidden folder, for Transformers in ``_safe_ckpt``, and for Accelerate's ``checkpoints`` beside it, as for
    a checkpoint itself. Where several of these have events, those that were written last are taken.

    Raises:
        OSError: none were found, and a place could not be read.
    """
    places = [directory / HIDDEN, directory / _ELSEWHERE]
    if directory.name in (HIDDEN, _ELSEWHERE):
        places.append(directory)
    if directory.name == _ACCELERATE or presence.is_file(directory / MANIFEST_NAME):
        places.append(directory.absolute().parent / HIDDEN)
    series, refused = [], []
    for place in places:
        try:
            files = _series(place)
        except OSError as error:
            refused.append(error)
        else:
            series += [files] if files else []
    if refused and not series:
        raise refused[0]
    return max(series, key=lambda files: _changed(files[0]), default=())


def _series(place: Path) -> tuple[Path, ...]:
    try:
        names = os.listdir(place)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    numbers = sorted(int(match[1]) for name in names if (match := _ROTATED.fullmatch(name)))
    series = [place / name for name in (EVENTS, *(f"{EVENTS}.{number}" for number in numbers))]
    return tuple(path for path in series if presence.is_file(path))


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def read_events(files: tuple[Path, ...], most: int = MOST_EVENTS) -> Recording:
    """The last ``most`` events of ``files``, which come newest first.

    A file that was rotated away meanwhile is not read twice. A last line that has no end yet is still being written: it is
    neither read nor counted.

    Raises:
        OSError: a file is there and cannot be read.
    """
    events: list[Recorded] = []
    skipped = 0
    for line in _lines(files):
        if len(events) == most:
            return Recording(events=tuple(reversed(events)), skipped=skipped, earlier=True)
        if (event := parse(line)) is not None:
            events.append(event)
        else:
            skipped += 1
    return Recording(events=tuple(reversed(events)), skipped=skipped)


def parse(line: bytes) -> Recorded | None:
    """One line; None if it is no event."""
    try:
        facts = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(facts, dict):
        return None
    kind, at, rank = facts.get("event"), _number(facts.get("at")), facts.get("rank", 0)
    if not isinstance(kind, str) or at is None or not _YEARS_S[0] < at < _YEARS_S[1]:
        return None
    return Recorded(kind=kind, at=at, rank=rank if type(rank) is int else 0, facts=facts)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < _MOST_NUMBER and math.isfinite(value) else None


def _lines(files: tuple[Path, ...]) -> Iterator[bytes]:
    seen = set()
    for path in files:
        try:
            stream = path.open("rb")
        except FileNotFoundError:  # it was rotated away
            continue
        with stream:
            status = os.fstat(stream.fileno())
            if (file := (status.st_dev, status.st_ino)) not in seen:
                seen.add(file)
                yield from (line for line in _backward(stream) if line.strip())


def _backward(stream: BinaryIO) -> Iterator[bytes]:
    """The whole lines of a file, last first. A line that is too long is replaced by a mark."""
    end, rest = stream.seek(0, os.SEEK_END), b""
    unfinished = True
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        stream.seek(start)
        rest, *whole = (stream.read(end - start) + rest).split(b"\n")
        if whole and unfinished:
            whole.pop()
            unfinished = False
        yield from reversed(whole)
        if len(rest) > _MOST_LINE_BYTES:
            rest = _TOO_LONG
        end = start
    if not unfinished:
        yield rest
