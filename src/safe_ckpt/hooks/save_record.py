"""Joins what was told of one save, for hooks that want it whole."""

from __future__ import annotations

from dataclasses import dataclass

from safe_ckpt import events

_PARTS = (events.Agreed, events.Snapshotted, events.Written)


@dataclass(frozen=True, kw_only=True)
class Save:
    """One save that is over, as one rank saw it.

    Attributes:
        agreed: None where it failed before.
        snapshotted: None where this rank copied nothing.
        written: None where this rank wrote nothing.
        outcome: what became of it.
    """

    agreed: events.Agreed | None
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
    """Takes events one by one. Saves may be under way side by side; each is known by its name."""

    def __init__(self) -> None:
        self._open: dict[str, dict[str, events.Event]] = {}

    def take(self, event: events.Event) -> Save | None:
        """Returns the save that this event ends, if it ends one."""
        if isinstance(event, _PARTS):
            if isinstance(event, events.Agreed):
                self._open.pop(event.name, None)  # of one that never ended
            self._open.setdefault(event.name, {})[event.kind] = event
        if not isinstance(event, events.Committed | events.Failed):
            return None
        parts = self._open.pop(event.name, {})
        agreed, snapshotted, written = (parts.get(kind.__name__.lower()) for kind in _PARTS)
        return Save(
            agreed=agreed if isinstance(agreed, events.Agreed) else None,
            snapshotted=snapshotted if isinstance(snapshotted, events.Snapshotted) else None,
            written=written if isinstance(written, events.Written) else None,
            outcome=event,
        )
