"""From a signal on any rank to one agreed decision to stop, at the same step on every rank.

Ranks see a signal at different steps. So rank 0 decides, and every rank asks once per step: at the n-th call all get the same
answer. Most calls cost a comparison. About twice a second a decision is due. It was published one interval earlier, so that
no rank waits for it. Rank 0 chooses the number of steps in an interval and sends it with the decision.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.coordination.store import KeyValues
from safe_ckpt.errors import ConfigError, RendezvousTimeout

if TYPE_CHECKING:
    from safe_ckpt.core.coordination.coordinator import Coordinator
    from safe_ckpt.core.coordination.store import Pending

logger = logging.getLogger(__name__)

_AIM_S = 0.5
_MOST_STEPS = 100  # steps may become slow at any time: the next decision must not be far
_TIDY_EVERY = 64
_PHASE = "stop_requested"
_NO: dict[str, Any] = {"signal": None, "rank": 0, "every": 1}


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The decision to stop.

    Attributes:
        signal: the name of the signal.
        rank: a rank that got it.
        until: when the grace ends, on this rank's monotonic clock.
    """

    signal: str
    rank: int
    until: float


class Preemption:
    """Watches signals on this rank and decides together with the others. Used on the thread that trains.

    Args:
        coordinator: where the ranks meet.
        config: has the names of the signals, the grace after a signal, and how long to wait for a rank that does not ask.
        unwrap: turns the handler that is there before into the one that is run besides.
    """

    def __init__(self, coordinator: Coordinator, config: CheckpointConfig, unwrap: Callable[[Any], Any]) -> None:
        self._coordinator = coordinator
        self._grace_s = config.signal_grace_s
        self._barrier_s = config.timeouts.barrier_s
        self._got: tuple[str, float] | None = None
        self._reported = False
        self._asked = 0
        self._due = 1
        self._number = 0
        self._every = 1
        self._tidied = 2
        self._since = time.monotonic()
        self._pending: Pending[dict[str, Any]] | None = None
        self._unwrap = unwrap
        self._previous: dict[int, Any] = {}
        self.stop: Stop | None = None
        if threading.current_thread() is not threading.main_thread():
            message = "signals can be watched only by what is opened on the main thread"
            raise ConfigError(key="save_on_signals", message=message)
        self._store_client = coordinator.store_client("stop")
        for name in config.save_on_signals:
            number = signal.Signals[name]
            self._previous[number] = signal.signal(number, self._on_signal)

    def requested(self) -> bool:
        """Whether to save and stop. Every rank asks equally often; at the n-th time all get the same answer.

        Raises:
            RendezvousTimeout: rank 0 has not asked as often as this rank.
            PeerLostError: rank 0 died or stopped.
        """
        if self.stop is not None:
            return True
        if self._coordinator.size == 1:
            if self._got is not None:
                self._decide(*self._got, rank=0)
            return self.stop is not None
        self._asked += 1
        return self._asked >= self._due and self._take_decision()

    def close(self) -> None:
        """Put the previous handlers back."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal and threading.current_thread() is threading.main_thread():
                signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._previous.clear()
        if self._coordinator.rank == 0 and self._coordinator.size > 1:
            # A thread that waits for the next decision need not wait for the end of the store.
            key = self._key(self._number + 2)
            self._store_client.begin(lambda store: store.set(key, json.dumps(_NO)), phase=_PHASE)
        self._store_client.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # This takes no lock, because another signal may interrupt it.
        previous, name, now = self._previous.get(number), signal.Signals(number).name, time.monotonic()
        if self._got is None:
            self._got = (name, now)
        elif self.stop is None and self._got[0] == name and now - self._got[1] > self._grace_s:
            # The program does not ask, and it must remain possible to terminate it.
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)
            signal.raise_signal(number)
            return
        handler = self._unwrap(previous)
        if callable(handler):
            handler(number, frame)

    def _take_decision(self) -> bool:
        decision = self._due_decision() if self._number else _NO
        if decision["signal"] is not None:
            self._decide(decision["signal"], time.monotonic() - decision["age_s"], rank=decision["rank"])
            return True
        self._number += 1
        self._due = self._asked + decision["every"]
        self._pending = self._ask()
        return False

    def _due_decision(self) -> dict[str, Any]:
        """The decision that was to lie ready by now. A failed attempt uses up none: the next call asks for the same one."""
        pending, self._pending = self._pending, None
        if pending is None:  # the attempt before this failed; rank 0 publishes what it decides now
            pending = self._ask()
        try:
            if not pending.ready(wait_s=self._barrier_s, check=lambda: self._coordinator.check([0])):
                raise RendezvousTimeout(phase=_PHASE, seconds=self._barrier_s, missing=(0,))
        except BaseException:
            pending.abandon()
            raise
        return pending.result()

    def _ask(self) -> Pending[dict[str, Any]]:
        return self._store_client.begin(self._lead() if self._coordinator.rank == 0 else self._follow, phase=_PHASE)

    def _lead(self) -> Callable[[KeyValues], dict[str, Any]]:
        """Rank 0: publish the decision that is due at the next check."""
        number, got, size = self._number + 1, self._got, self._coordinator.size
        self._pace()
        every = self._every

        def publish(store: KeyValues) -> dict[str, Any]:
            if store.check([self._key(number)]):  # an attempt before this one got so far: others may have read it
                published: dict[str, Any] = json.loads(store.get(self._key(number)))
                return published
            decision: dict[str, Any] = {**_NO, "every": every}
            if got is not None:
                decision.update(signal=got[0], rank=0, age_s=time.monotonic() - got[1])
            elif store.check(["stop/asked"]):
                decision.update(json.loads(store.get("stop/asked")))
            store.set(self._key(number), json.dumps(decision))
            self._coordinator.receipts.expect("stop/read", (number - 1) * (size - 1))
            if number % _TIDY_EVERY == 0:
                self._tidy(store)
            return decision

        return publish

    def _tidy(self, store: KeyValues) -> None:
        """Drop the decisions that every rank has read."""
        keys = [f"stop/at/{rank}" for rank in range(1, self._coordinator.size)]
        read = min(int(store.get(key)) if store.check([key]) else 0 for key in keys)
        for old in range(self._tidied, read):
            store.delete_key(self._key(old))
        self._tidied = max(self._tidied, read)

    def _follow(self, store: KeyValues) -> dict[str, Any]:
        """Another rank: hand in what it got, and fetch the decision that is due at the next check."""
        rank, number = self._coordinator.rank, self._number + 1
        if self._got is not None and not self._reported:
            name, at = self._got
            store.set("stop/asked", json.dumps({"signal": name, "rank": rank, "age_s": time.monotonic() - at}))
            self._reported = True
        if number % _TIDY_EVERY == 0:
            store.set(f"stop/at/{rank}", str(number))
        store.wait([self._key(number)], timedelta(days=7))
        decision: dict[str, Any] = json.loads(store.get(self._key(number)))
        store.add("stop/read", 1)
        return decision

    def _pace(self) -> None:
        now = time.monotonic()
        spent_s, self._since = now - self._since, now
        # Steps may become slow again (a validation epoch): grow by at most two, shrink at once.
        aim = int(self._every * _AIM_S / max(spent_s, 1e-9))
        self._every = max(1, min(aim, 2 * self._every, _MOST_STEPS))

    def _decide(self, name: str, at: float, *, rank: int) -> None:
        self.stop = Stop(signal=name, rank=rank, until=at + self._grace_s)
        logger.info("stopping after this step: rank %d got %s", rank, name)

    @staticmethod
    def _key(number: int) -> str:
        return f"stop/{number}"
