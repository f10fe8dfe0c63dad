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
        level = logging.WARNING if isinstance(event, self._warn) else logging.DEBUG
        if logger.isEnabledFor(level):
            facts = event.facts()
            logger.log(level, "%s %s", facts.pop("event"), facts)
