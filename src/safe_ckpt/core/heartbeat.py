"""Who is still there, and whose bytes move. Every rank counts up a key; a count that stands still means a lost rank.

Rank 0 watches all others, the others watch rank 0. Where both run on one machine the process is looked at as well: one that
is busy (holding the interpreter lock for a minute, say) is late, not lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safe_ckpt.core import ranks
from safe_ckpt.core.channel import Channel, KeyTimeout
from safe_ckpt.core.ranks import Store
from safe_ckpt.errors import PeerLostError

if TYPE_CHECKING:
    from safe_ckpt.core.meeting import Machine


class Heartbeat:
    """Beats for this rank and watches others, on a thread of its own.

    Args:
        channel: a connection of its own.
        rank: this rank.
        machines: the ranks to watch and where they run.
        stall_s: how long a count may stand still.
        interval_s: the time between two beats.
        progress: a number that changes as long as this rank's bytes move; sent along.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        rank: int,
        machines: Mapping[int, Machine],
        stall_s: float,
        interval_s: float,
        progress: Callable[[], int],
    ) -> None:
        self._channel = channel
        self._rank = rank
        self._machines = dict(machines)
        self._stall_s = stall_s
        self._interval_s = interval_s
        self._progress = progress
        self._here = ranks.machine_id()
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._lost: dict[int, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="safe_ckpt-beat", daemon=True)
        self._thread.start()

    def check(self, needed: Iterable[int] | None = None) -> None:
        """Raise if one of ``needed`` (all watched ranks when None) is lost.

        Raises:
            PeerLostError: naming them.
        """
        lost = dict(self._lost)
        gone = [rank for rank in (lost if needed is None else needed) if rank in lost]
        if gone:
            reason = "; ".join(sorted({lost[rank] for rank in gone}))
            raise PeerLostError(phase="waiting for the other ranks", ranks=tuple(gone), reason=reason)

    def observe(self, stall_s: float, interval_s: float) -> None:
        """From now on this is how long a count may stand still, and the time between two beats."""
        self._stall_s, self._interval_s = stall_s, interval_s
        self._channel.answer_s = stall_s

    def progress(self) -> int:
        """The sum of what the watched ranks sent along."""
        # A value is "count progress"; what has not arrived yet is no progress.
        return sum(int(value.split()[1]) for value, _ in list(self._seen.values()) if value)

    def lost(self) -> int:
        """How many ranks are lost."""
        return len(self._lost)

    def all_gone(self) -> bool:
        """Whether nobody is left to wait for."""
        return all(rank in self._lost for rank in self._machines)

    def close(self) -> None:
        """Stop beating; the others will see that this rank has left."""
        self._stop.set()
        self._thread.join(timeout=2.0)
        self._channel.close()

    def _run(self) -> None:
        count = 0
        while True:
            count += 1
            try:
                self._beat(count)
                self._look()
            except (PeerLostError, KeyTimeout) as error:
                if self._rank != 0 and not self._stop.is_set():
                    self._lost[0] = str(error)
            if self._stop.wait(self._interval_s):
                return

    def _beat(self, count: int) -> None:
        # Rank 0 passes on what it hears: the others watch it alone.
        progress = self._progress() + (self.progress() if self._rank == 0 else 0)
        self._channel.call(lambda store: store.set(f"beat/{self._rank}", f"{count} {progress}"), phase="heartbeat")

    def _look(self) -> None:
        watched = [rank for rank in self._machines if rank not in self._lost]
        values = self._channel.call(lambda store: _read(store, watched), phase="heartbeat")
        now = time.monotonic()
        for rank, value in values.items():
            before, since = self._seen.get(rank, (b"", now))
            state = self._state(rank)
            if state in ("", "Z", "X"):
                self._lost[rank] = f"process {self._machines[rank].pid} has ended"
            elif value != before or rank not in self._seen:
                self._seen[rank] = (value, now)
            elif now - since >= self._stall_s and state not in ("R", "S", "D"):
                self._lost[rank] = f"no sign of life for {now - since:.1f} s"

    def _state(self, rank: int) -> str:
        # A late count proves nothing about a process that the kernel calls runnable or in I/O.
        machine = self._machines[rank]
        return process_state(machine.pid) if machine.host == self._here else "?"


def _read(store: Store, watched: list[int]) -> dict[int, bytes]:
    keys = {rank: f"beat/{rank}" for rank in watched}
    if not keys:
        return {}
    if store.check(list(keys.values())):
        return dict(zip(keys, store.multi_get(list(keys.values())), strict=True))
    return {rank: bytes(store.get(key)) if store.check([key]) else b"" for rank, key in keys.items()}


def process_state(pid: int) -> str:
    """The kernel's one-letter state of a process on this machine, "" when it is gone or cannot be told."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat[stat.rfind(")") + 2 :][:1]
