"""Joins the events of one save, for hooks that want it whole."""

from __future__ import annotations

import threading
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
    def bytes_per_s(self) -> float | None:
        """The rate at which this rank wrote; None where it wrote nothing."""
        if self.written is None or self.written.seconds <= 0:
            return None
        return self.written.size_bytes / self.written.seconds

    @property
    def only_renamed(self) -> bool:
        """Whether it was committed and wrote nothing: a checkpoint that is there already got a second name."""
        return isinstance(self.outcome, events.Committed) and not self.outcome.size_bytes


class SaveHook:
    """Takes events on any thread. Several saves may be under way at a time; each is known by its name."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._snapshotted: dict[str, events.Snapshotted] = {}
        self._written: dict[str, events.Written] = {}

    def __call__(self, event: events.Event) -> None:
        """Take one event."""
        with self._lock:
            save = self._ended_by(event)
        # Without the lock: an exporter may hang, and holds up no other event.
        if save is None:
            self.on_event(event)
        else:
            self.on_save(save)

    def on_save(self, save: Save) -> None:
        """A save is over. Called on the thread of the event."""
        raise NotImplementedError

    def on_event(self, event: events.Event) -> None:
        """Take any event that ends no save. Called on the thread of the event."""

    def _ended_by(self, event: events.Event) -> Save | None:
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
