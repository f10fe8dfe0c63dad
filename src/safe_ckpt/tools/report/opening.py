"""The opening of every view of a run: what a restart would take now, and what crashes and saves have cost so far."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safe_ckpt.ledger import words
from safe_ckpt.ledger.account import Account, account
from safe_ckpt.ledger.history import History
from safe_ckpt.tools.report import restart
from safe_ckpt.tools.report.restart import Restart

_LOOKS_AGAIN_S = 10.0  # also when nothing was recorded: a file may be damaged or deleted, and a run may fall silent


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The headline and the ledger.

    Attributes:
        restart: what a restart would take; None where the directory cannot be read.
        told: the ledger.
    """

    restart: Restart | None
    told: Account

    @property
    def well(self) -> bool:
        """Whether the headline is good news."""
        return self.restart is not None and self.restart.well

    def headline(self, now: float) -> list[str]:
        """Say what a restart would take at ``now``, seconds since the epoch, and what it would pass over."""
        if self.restart is None:
            return []
        return [restart.sentence(self.restart, now), *(f"not {one}" for one in self.restart.passed_over)]

    def ledger(self, losses: int) -> list[str]:
        """The ledger in sentences, with so many of the last crashes."""
        return [*words.summed_up(self.told), *map(words.of_loss, self.told.losses[-losses:])]

    def as_data(self) -> dict[str, Any]:
        """The same, JSON-able."""
        there = None if self.restart is None else dataclasses.asdict(self.restart)
        return {"restart": there, "ledger": dataclasses.asdict(self.told)}


def opening_of(directory: Path, history: History, now: float) -> Opening:
    """The head of a view of ``directory`` at ``now``, seconds since the epoch. No payload is read."""
    return Opening(restart=restart.look_at_restart(directory), told=account(history, now))


class Openings:
    """The heads of a view that is drawn again and again: each is made when something was recorded, or is some seconds old.

    Args:
        directory: see ``opening_of``.
        clock: seconds, monotonic.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._clock = directory, clock
        self._made: tuple[History, float, Opening] | None = None

    def look(self, history: History | None, now: float) -> Opening | None:
        """The head for a history, of which the same object says the same; None where nothing is recorded."""
        if history is None:
            return None
        made = self._made
        if made is None or made[0] is not history or self._clock() - made[1] >= _LOOKS_AGAIN_S:
            made = self._made = (history, self._clock(), opening_of(self._directory, history, now))
        return made[2]
