"""What happened, as frozen facts. The core emits them; hooks decide what to do with them.

Every hook is called on the thread on which the event happened, which may be a background thread, on the rank on which it
happened. A hook that raises is logged and dropped: observing never fails a save.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Event:
    """What all events have: when (seconds since the epoch) and on which rank."""

    rank: int
    at: float = field(default_factory=time.time)

    @property
    def kind(self) -> str:
        """The event's name in lower case, as in ``events.jsonl``."""
        return type(self).__name__.lower()


@dataclass(frozen=True, kw_only=True)
class Snapshotted(Event):
    """The copy is complete and the caller may go on. ``stall_s`` is how long the call held the caller."""

    name: str
    step: int
    size_bytes: int
    stall_s: float


@dataclass(frozen=True, kw_only=True)
class Written(Event):
    """This rank's files are durable in the staging directory."""

    name: str
    step: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Committed(Event):
    """The checkpoint has its final name. ``seconds`` counts from the call to ``save``."""

    name: str
    step: int
    path: str
    sequence: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """The save failed on every rank; nothing was committed."""

    name: str
    step: int
    error: str


@dataclass(frozen=True, kw_only=True)
class Respawned(Event):
    """The writer process was replaced and the same snapshot is written again."""

    pid: int
    ended: str


@dataclass(frozen=True, kw_only=True)
class StopRequested(Event):
    """A signal on rank ``by_rank``: every rank saves and stops after this step.

    ``forecast_s`` is when a save begun now should be done, going by how long the last one took and by what is in flight; 0
    when there was none. Above ``left_s`` it will hardly be done; it is tried all the same, since that endangers nothing.
    """

    signal: str
    by_rank: int
    left_s: float
    forecast_s: float


@dataclass(frozen=True, kw_only=True)
class Removed(Event):
    """A checkpoint was deleted after its successor was committed."""

    path: str


@dataclass(frozen=True, kw_only=True)
class Quarantined(Event):
    """A checkpoint whose bytes are wrong was moved away, not deleted."""

    path: str
    moved_to: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """A checkpoint was verified on all ranks and chosen."""

    path: str
    step: int
    seconds: float
    rejected: int


@dataclass(frozen=True, kw_only=True)
class TimeoutsRaised(Event):
    """Collectives of ``groups`` (each with what it was before) may take ``seconds`` from now on."""

    groups: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TimeoutsRestored(Event):
    """The timeouts of ``groups`` are what they were before."""

    groups: tuple[str, ...]


class Hook(Protocol):
    """Anything that wants to know."""

    def __call__(self, event: Event) -> None:
        """Take one event. Called on the thread on which it happened."""


class LoggingHook:
    """Commits and removals at DEBUG, what a person should act on at WARNING."""

    _warn = (Failed, Respawned, Quarantined, StopRequested)

    def __call__(self, event: Event) -> None:
        """Log the event."""
        level = logging.WARNING if isinstance(event, self._warn) else logging.DEBUG
        logger.log(level, "%s %s", event.kind, _facts(event))


class JsonlHook:
    """Appends one JSON object per line to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Append the event."""
        line = json.dumps({"event": event.kind, **_facts(event)}) + "\n"
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(line)


class Emitter:
    """Hands events to hooks and keeps their failures away from the save."""

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self._hooks = list(hooks)

    def add(self, hook: Hook) -> None:
        """One more that wants to know."""
        self._hooks.append(hook)

    def remove(self, hook: Hook) -> None:
        """This one need not know any more."""
        if hook in self._hooks:
            self._hooks.remove(hook)

    def __call__(self, event: Event) -> None:
        """Hand the event to every hook."""
        for hook in list(self._hooks):
            try:
                hook(event)
            except Exception:
                logger.warning("hook %r failed and is dropped", hook, exc_info=True)
                self._hooks.remove(hook)


def _facts(event: Event) -> dict[str, Any]:
    return dataclasses.asdict(event)
