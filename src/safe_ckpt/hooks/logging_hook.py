"""Events in the log of the program."""

from __future__ import annotations

import logging

from safe_ckpt import events

logger = logging.getLogger(__name__)


class LoggingHook:
    """What a person should act on at WARNING, everything else at DEBUG."""

    _warn = (events.Failed, events.Respawned, events.Quarantined, events.StopRequested)

    def __call__(self, event: events.Event) -> None:
        """Log the event."""
        said = isinstance(event, self._warn) or (isinstance(event, events.Unhealthy) and event.rank == 0)
        level = logging.WARNING if said else logging.DEBUG
        if logger.isEnabledFor(level):
            facts = event.facts()
            logger.log(level, "%s %s", facts.pop("event"), facts)
