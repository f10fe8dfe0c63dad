"""The word of a pin, which of them count, and what they keep: pure decisions.

A reader changes its pin all the time, as a job does with its lease. Whoever deletes measures by its own clock for how long a
pin has not changed. After ``ttl_s`` of silence it counts no more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from safe_ckpt.text import clean

_LONGEST_S = 24 * 3600.0
_MOST_NAMES = 10_000
_BEATS = 10**9


@dataclass(frozen=True, kw_only=True)
class Pin:
    """The word of one reader: which checkpoints it holds.

    Attributes:
        reader: unique to it; its file is named after it.
        title: what the reader calls itself, for messages.
        host: where it runs.
        pid: its process there.
        since: when it began, ISO 8601.
        ttl_s: for how long it counts after its last change.
        holds: the checkpoint that it reads; "" for none. Names are relative to what the hidden folder lies in.
        wants: those that it takes later, the oldest first.
        seen: the last place in the order of commits that it has looked at: what comes behind is kept, too. None for nothing.
        every: it will want each n-th of those behind.
        limit: how many are kept behind its place at most.
        healthy: it wants none with bad numbers.
        beat: counts its changes.
    """

    reader: str
    title: str
    host: str
    pid: int
    since: str
    ttl_s: float
    holds: str = ""
    wants: tuple[str, ...] = ()
    seen: int | None = None
    every: int = 1
    limit: int = 0
    healthy: bool = True
    beat: int = 0

    def __str__(self) -> str:
        return f"{clean(self.title)} (process {self.pid} on {clean(self.host)})"

    def next(self, **changes: Any) -> Pin:
        """The pin with changes, and another sign of life."""
        return replace(self, beat=self.beat + 1, **changes)

    def to_bytes(self) -> bytes:
        """The content of its file. Of two that differ in their signs of life alone it is equally long."""
        return (json.dumps({**asdict(self), "beat": f"{self.beat % _BEATS:09d}"}) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Pin | None:
        """From a file; None where it is torn, or none of ours. What a later version says besides is passed over."""
        try:
            facts: dict[str, Any] = {key: value for key, value in json.loads(data).items() if key in _FIELDS}
            wants = tuple(facts.get("wants", ())[-_MOST_NAMES:])
            pin = cls(**{**facts, "wants": wants, "beat": int(facts.get("beat", 0))})
            texts = (pin.reader, pin.title, pin.host, pin.since, pin.holds, *pin.wants)
            numbers = (pin.pid, pin.every, pin.limit, pin.beat, 0 if pin.seen is None else pin.seen)
            right = all(isinstance(text, str) for text in texts) and all(isinstance(one, int) for one in numbers)
            return pin if right and pin.every > 0 and 0 < float(pin.ttl_s) <= _LONGEST_S else None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            return None


_FIELDS = frozenset(Pin.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class Due:
    """A checkpoint that the rules of retention do not keep.

    Attributes:
        name: as pins have it.
        sequence: its place in the order of commits; -1 where that is not known.
        marked: whether it has bad numbers.
    """

    name: str
    sequence: int = -1
    marked: bool = False


@dataclass(frozen=True, kw_only=True)
class Ruling:
    """The decision about those that are due.

    Attributes:
        kept: by name, for whom.
        missed: by reader, those that it would have taken, and that are too many: it is told.
    """

    kept: Mapping[str, str] = field(default_factory=dict)
    missed: Mapping[str, tuple[Due, ...]] = field(default_factory=dict)


def ruling_on(pins: Iterable[Pin], due: Sequence[Due]) -> Ruling:
    """Return which of ``due`` must stay, for which reader, and what readers miss because their limit is reached."""
    kept: dict[str, str] = {}
    missed: dict[str, tuple[Due, ...]] = {}
    newest_first = sorted(due, key=lambda one: one.sequence, reverse=True)
    for pin in pins:
        left, lost = float(pin.limit), []
        for one in newest_first:
            wanted = one.name in pin.wants
            unseen = pin.seen is not None and one.sequence > pin.seen and not (one.marked and pin.healthy)
            if one.name == pin.holds:
                kept.setdefault(one.name, f"reader {pin} holds it")
            elif wanted or unseen:
                left -= 1 if wanted else 1 / pin.every  # of those behind, it will want each n-th
                if left > -1e-9:
                    kept.setdefault(one.name, f"reader {pin} has not come to it yet")
                else:
                    lost.append(one)
        if lost:
            missed[pin.reader] = tuple(reversed(lost))
    return Ruling(kept=kept, missed={reader: lost for reader, lost in missed.items() if lost})


class Silence:
    """For how long each pin has been silent, by the clock of whoever looks."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[bytes, float]] = {}

    def over(self, found: Mapping[str, tuple[bytes, float]], now: float) -> set[str]:
        """Return the names of those that count no more.

        Args:
            found: all that are there, by name: their bytes, and their time to live.
            now: on the clock of the observer, which does not jump.
        """
        self._heard = {
            name: before if (before := self._heard.get(name)) is not None and before[0] == data else (data, now)
            for name, (data, _) in found.items()
        }
        return {name for name, (_, ttl_s) in found.items() if now - self._heard[name][1] > ttl_s}


def silent_after(pin: Pin | None) -> float:
    """For how long a pin counts after its last change; one that cannot be read as long as any other."""
    return pin.ttl_s if pin is not None and math.isfinite(pin.ttl_s) else DEFAULT_TTL_S


DEFAULT_TTL_S = 60.0
