"""Which ranks are alive, and which make progress. Every rank increments a key; a count that stops means a lost rank.

Rank 0 watches all others, the others watch rank 0. If both run on one machine, the state of the process counts as well: a busy
one (holding the interpreter lock for a minute, say) is late, not lost. A rank whose count moves again is alive again. So when
a network comes back, only what was in flight has failed.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from safe_ckpt.core.coordination.store import KeyTimeout, KeyValues, StoreClient, read_present
from safe_ckpt.errors import PeerLostError
from safe_ckpt.machine import machine_id, process_state

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_SHORTEST_ANSWER_S = 0.5
_LONGEST_ANSWER_S = 5.0
_MARGIN_S = 2.0
_PHASE = "heartbeat"
_MOST_LEFT = 32


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Where a rank runs."""

    host: str
    pid: int


class _Beat(NamedTuple):
    """One sign of life of a rank.

    Attributes:
        number: goes up.
        progress: changes as long as bytes move.
        at: the number of its newest call.
        left: the calls that it has given up lately.
    """

    number: int
    progress: int
    at: int
    left: Sequence[int]


class Heartbeat:
    """Beats for this rank and watches others, on a thread of its own.

    Args:
        store_client: a connection of its own.
        rank: this rank.
        peers: the ranks to watch and where they run; a rank alone has none, and beats for nobody.
        stall_s: how long a count may stand still.
        interval_s: the time between two beats.
        progress: a number that changes as long as this rank's bytes move; sent along.

    Attributes:
        at: the number of this rank's newest call; sent along.
    """

    def __init__(
        self,
        store_client: StoreClient,
        *,
        rank: int,
        peers: Mapping[int, Peer],
        stall_s: float,
        interval_s: float,
        progress: Callable[[], int],
    ) -> None:
        self._store_client = store_client
        self._rank = rank
        self._peers = dict(peers)
        self._interval_s = interval_s
        self._progress = progress
        self._here = machine_id()
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._lost: dict[int, str] = {}
        self._ended: set[int] = set()
        self._answered_at = self._awake = time.monotonic()
        self._left: deque[int] = deque(maxlen=_MOST_LEFT)
        self.at = -1
        self._stop = threading.Event()
        self.observe(stall_s, interval_s)
        self._thread = threading.Thread(target=self._run, name="safe_ckpt-beat", daemon=True)
        if peers:
            self._thread.start()

    def check(self, needed: Iterable[int], phase: str = "") -> None:
        """Raise if one of ``needed`` is lost now.

        Args:
            needed: ranks.
            phase: what they are needed for, for the error.

        Raises:
            PeerLostError: naming them.
        """
        lost = dict(self._lost)
        gone = [rank for rank in needed if rank in lost]
        if gone:
            reason = "; ".join(sorted({lost[rank] for rank in gone}))
            raise PeerLostError(phase=phase or "waiting for the other ranks", ranks=tuple(gone), reason=reason)

    def observe(self, stall_s: float, interval_s: float) -> None:
        """Set how long a count may stand still, and the time between two beats."""
        self._stall_s, self._interval_s = stall_s, interval_s
        # A connection that went silent is replaced long before the host behind it counts as lost.
        self._store_client.answer_s = min(_LONGEST_ANSWER_S, max(_SHORTEST_ANSWER_S, stall_s / 4))

    def host_is_alive(self) -> bool:
        """Whether the store's host shows signs of life."""
        return 0 not in self._lost

    def leave(self, call: int) -> None:
        """Leave the call of that number. Rank 0 learns of it from the next beat that arrives."""
        self._left.append(call)

    def have_left(self, call: int) -> tuple[int, ...]:
        """On rank 0: the ranks that gave up the call of that number, and whatever it began."""
        return tuple(rank for rank, beat in self._beats().items() if call in beat.left)

    def are_past(self, call: int) -> tuple[int, ...]:
        """On rank 0: the ranks for which the call of that number is over."""
        return tuple(rank for rank, beat in self._beats().items() if beat.at > call or call in beat.left)

    def are_before(self, call: int) -> tuple[int, ...]:
        """The watched ranks that are alive and have not begun the call of that number."""
        return tuple(rank for rank, beat in self._beats().items() if beat.at < call and rank not in self._lost)

    def progress(self) -> int:
        """The sum of what the watched ranks sent along."""
        return sum(beat.progress for beat in self._beats().values())

    def _beats(self) -> dict[int, _Beat]:
        return {rank: _Beat(*json.loads(value)) for rank, (value, _) in dict(self._seen).items() if value}

    def lost(self) -> int:
        """How many ranks are lost."""
        return len(self._lost)

    def all_gone(self) -> bool:
        """Whether all watched ranks are lost."""
        return all(rank in self._lost for rank in self._peers)

    def close(self) -> None:
        """Stop beating; the others will see that this rank has left."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        self._store_client.close()

    def _run(self) -> None:
        count = 0
        while True:
            count += 1
            self._forgive()
            try:
                # Rank 0 adds the progress of the others, because they watch rank 0 alone.
                progress = self._progress() + (self.progress() if self._rank == 0 else 0)
                beat = json.dumps(_Beat(number=count, progress=progress, at=self.at, left=list(self._left)))
                self._call(lambda store: store.set(f"beat/{self._rank}", beat))  # noqa: B023 - called at once
                if self._stop.is_set():
                    return  # the end may have given up joining this thread, and closed the connection: no new one
                self._look()
            except (PeerLostError, KeyTimeout) as error:
                self._judge_silence(str(error))
            except Exception:  # without this thread the other ranks would treat this one as lost
                logger.exception("a heartbeat failed")
            if self._stop.wait(self._interval_s):
                return

    def _forgive(self) -> None:
        """Do not count time in which this process itself was stopped (SIGSTOP, a suspended machine)."""
        before, self._awake = self._awake, time.monotonic()
        absent_s = self._awake - before
        if absent_s > self._stall_s / 2:
            self._answered_at += absent_s
            self._seen = {rank: (value, since + absent_s) for rank, (value, since) in self._seen.items()}

    def _call(self, operation: Callable[[KeyValues], _T]) -> _T:
        answer = self._store_client.call(operation, phase=_PHASE, check=self._judge_silence)
        self._answered_at = time.monotonic()
        return answer

    def _judge_silence(self, reason: str = "") -> None:
        """On another rank: note that the store's host is lost if it is silent for too long. Called while waiting for it."""
        self._forgive()
        silent_s = time.monotonic() - self._answered_at
        if self._rank != 0 and not self._stop.is_set() and silent_s >= self._limit_s:
            self._lose(0, f"no sign of life for {silent_s:.1f} s{f': {reason}' if reason else ''}")

    @property
    def _limit_s(self) -> float:
        # After an outage that is shorter than stall_s a new connection takes a moment.
        return self._stall_s + min(_MARGIN_S, self._stall_s)

    def _lose(self, rank: int, reason: str) -> None:
        if rank not in self._lost:
            logger.debug("rank %d is lost: %s", rank, reason)  # at the end of a run this is nothing special
        self._lost[rank] = reason

    def _look(self) -> None:
        watched = {rank: f"beat/{rank}" for rank in self._peers if rank not in self._ended}
        values = self._call(lambda store: read_present(store, list(watched.values())))
        now = time.monotonic()
        for rank, key in watched.items():
            value = values.get(key, b"")
            before, since = self._seen.get(rank, (b"", now))
            # A late count proves nothing while the kernel reports the process as runnable or in I/O.
            peer = self._peers[rank]
            state = process_state(peer.pid) if peer.host == self._here else "?"
            if state in ("", "Z", "X"):
                self._ended.add(rank)
                self._lose(rank, f"process {peer.pid} has ended")
            elif value != before or rank not in self._seen:
                self._seen[rank] = (value, now)
                if self._lost.pop(rank, None) is not None:
                    logger.info("rank %d is back", rank)
            elif now - since >= self._limit_s and state not in ("R", "S", "D"):
                self._lose(rank, f"no sign of life for {now - since:.1f} s")
