"""When to save: rank 0 decides from what saves and crashes have cost in this directory, and all ranks get one answer.

The ranks meet at looks that the meeting before has named, so that most looks cost a comparison. A meeting names the next one
well ahead of the moment at which a save is due, and at most half a minute ahead: steps may become slow.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from safe_ckpt import events
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.source import in_files
from safe_ckpt.errors import ConfigError
from safe_ckpt.ledger import event_log, interval
from safe_ckpt.ledger.account import Account, account
from safe_ckpt.ledger.history import build_history

if TYPE_CHECKING:
    from safe_ckpt.core.saving.engine import Engine

logger = logging.getLogger(__name__)
LEAST_S, MOST_S = 60.0, 3600.0
_USUAL_S = 86_400.0  # a crash a day, as long as there are none of the directory's own
_AHEAD_S = 30.0
_SHARE = 0.7
_MOST_FIGURES = 50


class Pace:
    """Says at each look whether a save is due. Every rank looks equally often, on the thread that trains.

    Args:
        engine: where the ranks meet.
        directory: has the record of earlier runs; None where there is none.
        least_s: no more often than this; the first save comes then, and shows what a save costs.
        most_s: no less often than this.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the bounds are no interval.
    """

    def __init__(
        self,
        engine: Engine,
        directory: Place | None,
        *,
        least_s: float = LEAST_S,
        most_s: float = MOST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= least_s <= most_s:
            raise ConfigError(key="due", message=f"0 <= least_s <= most_s does not hold of {least_s} and {most_s}")
        self._engine, self._directory, self._clock = engine, directory, clock
        self._least_s, self._most_s = least_s, most_s
        self._looks = 0
        self._next = 1
        self._begun = self._saved = self._met = clock()
        self._met_at = 0
        self._stalls: list[float] = []
        self._durable_s: list[float] = []
        self._before: Account | None = None
        self._trained_s = 0.0
        if engine.rank == 0:
            engine.emit.add(self._listen)

    def due(self) -> bool:
        """Whether to save now; the same on all ranks.

        Raises:
            RendezvousTimeout: some ranks did not look.
            PeerLostError: a rank died or stopped.
        """
        self._looks += 1
        if self._looks < self._next:
            return False
        due, looks = self._engine.agree("due", decide=lambda _: self._decide())
        self._next = self._looks + int(looks)
        return bool(due)

    def every_s(self) -> float:
        """The interval as of now. On rank 0."""
        if self._before is None:
            self._before = self._read()
        before, stalls = self._before, self._stalls
        cost_s = statistics.median(stalls) if stalls else before.cost_s
        if cost_s is None:
            return self._least_s
        trained_s = (before.between_s or 0.0) * len(before.losses) if before.losses else before.wall_s.least
        return interval.advised(
            cost_s,
            trained_s + self._clock() - self._begun,
            len(before.losses),
            least_s=max(self._least_s, *self._durable_s, 0.0),
            most_s=self._most_s,
            usual_s=_USUAL_S,
        )

    def _decide(self) -> tuple[bool, int]:
        now = self._clock()
        each_s = (now - self._met) / (self._looks - self._met_at)
        self._met, self._met_at = now, self._looks
        left_s = self._saved + self.every_s() - now
        if left_s <= 0:
            self._saved = now
            return True, 1
        return False, max(1, int(min(_SHARE * left_s, _AHEAD_S) / each_s)) if each_s > 0 else 1

    def _listen(self, event: events.Event) -> None:
        if isinstance(event, events.Snapshotted):
            self._stalls = [*self._stalls, event.stall_s][-_MOST_FIGURES:]
        elif isinstance(event, events.Committed) and not event.weights_only:
            self._durable_s = [*self._durable_s, event.seconds][-_MOST_FIGURES:]

    def _read(self) -> Account:
        """The ledger of the runs before. What cannot be read is not known."""
        try:
            files = event_log.find_events(in_files(self._directory)) if self._directory is not None else ()
            return account(build_history(event_log.read_events(files))) if files else Account()
        except TypeError:  # it is in an object store, which has no record
            return Account()
        except OSError as error:
            logger.warning(
                "%s: earlier runs are not known, and do not count for the interval: %s", self._directory, error
            )
            return Account()


def pace_of(engine: Engine, directory: Place, *, least_s: float = LEAST_S, most_s: float = MOST_S) -> Pace:
    """The pace of saves to a directory; one in an object store has no record."""
    return Pace(engine, directory, least_s=least_s, most_s=most_s)
