"""Joins the events of one save, for hooks that want it whole."""

from __future__ import annotations

from dataclasses import dataclass

from safe_ckpt import events


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save that is over, as one rank saw it.

    Attributes:
        snapshotted: None where this rank copied nothing.
        written: None where this rank wrote nothing.
        outcome: what became of it.
    """

    snapshotted: events.Snapshotted | None
    written: events.Written | None
    outcome: events.Committed | events.Failed

    @property
    def started_at(self) -> float:
        """When ``save`` was called, in seconds since the epoch."""
        return self.outcome.at - self.outcome.seconds

    @property
    def bytes_per_s(self) -> float | None:
        """How fast this rank wrote; None where it wrote nothing."""
        if self.written is None or self.written.seconds <= 0:
            return None
        return self.written.size_bytes / self.written.seconds


class Saves:
    """Takes events one by one. Several saves may be under way at a time; each is known by its name."""

    def __init__(self) -> None:
        self._snapshotted: dict[str, events.Snapshotted] = {}
        self._written: dict[str, events.Written] = {}

    def take(self, event: events.Event) -> Save | None:
        """Returns the save that this event ends, if it ends one."""
        if isinstance(event, events.Snapshotted):
            self._snapshotted[event.name] = event
        elif isinstance(event, events.Written):
            self._written[event.name] = event
        elif isinstance(event, events.Agreed | events.Committed | events.Failed):
            # With Agreed they are of a save of that name that never ended.
            snapshotted, written = self._snapshotted.pop(event.name, None), self._written.pop(event.name, None)
            if not isinstance(event, events.Agreed):
                return Save(snapshotted=snapshotted, written=written, outcome=event)
        return None
