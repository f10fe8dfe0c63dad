"""Events in the log of the program."""

from __future__ import annotations

import logging

from safe_ckpt import events

logger = logging.getLogger(__name__)
_SENTENCES: dict[type[events.Event], str] = {
    events.Respawned: "{0.name}: the writer of rank {0.rank} (process {0.pid}) was replaced: {0.ended}",
    events.Quarantined: "{0.path} was moved to {0.moved_to}: {0.reason}",
    events.Unhealthy: "{0.path} is unhealthy: {0.what}{1}",
    events.StopRequested: (
        "{0.signal} on rank {0.by_rank}: every rank saves and stops after this step. {0.left_s:.0f} s are left, and a save "
        "should take {0.forecast_s:.1f} s"
    ),
}
"""Events to act on that nothing else tells of. An error that is logged or raised tells of a save that failed."""


class LoggingHook:
    """Logs a sentence at WARNING where a person should act, and everything else at DEBUG."""

    def __call__(self, event: events.Event) -> None:
        """Log the event."""
        sentence = _SENTENCES.get(type(event))
        if sentence is not None and (event.rank == 0 or not isinstance(event, events.Unhealthy)):
            by_name = isinstance(event, events.Unhealthy) and event.marked
            logger.warning("%s", sentence.format(event, "; it is resumed from by name alone" if by_name else ""))
        elif logger.isEnabledFor(logging.DEBUG):
            facts = event.facts()
            logger.debug("%s %s", facts.pop("event"), facts)
