"""The signals of one streamed gather: when the next round begins, and why there will be none.

A round begins when every rank has said that it is there; the writing rank says so when it has room. So a rank that left, or
whose storage is slow, is waited for here, in the store, and no collective is entered that somebody will not join. Used on the
thread that gathers; issues no collectives.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from safe_ckpt.core.coordination.sealed_store import KeyValues
from safe_ckpt.core.coordination.store import KeyTimeout
from safe_ckpt.errors import PeerLostError, RendezvousTimeout, from_wire, to_wire

if TYPE_CHECKING:
    from safe_ckpt.core.coordination.coordinator import Coordinator

_LOOK_S = 0.25


class RoundBarrier:
    """One rank's side of it.

    Args:
        coordinator: where the ranks meet.
        op_id: unique to this gather.
        timeout_s: how long the writing rank may take between two rounds.
        late_s: how long the others may take, who have nothing to do meanwhile.
    """

    def __init__(self, coordinator: Coordinator, op_id: str, *, timeout_s: float, late_s: float) -> None:
        self._coordinator = coordinator
        self._store_client = coordinator.store_client("gather")
        self._prefix = f"gather/{op_id}"
        self._timeout_s = timeout_s
        self._late_s = late_s
        self._next = 0
        self._begun = self._done = 0
        self._told = False
        self._looked = time.monotonic()
        if coordinator.rank == 0 and coordinator.stale:
            stale, coordinator.stale = coordinator.stale, []
            self._drop(stale)
        self._needed = [0] if coordinator.rank else list(range(1, coordinator.size))

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self._coordinator.size == 1

    def enter(self, phase: str) -> None:
        """Wait until every rank is here for the next round.

        Raises:
            SafeCheckpointError: what made another rank leave.
            RendezvousTimeout: some ranks did not come; names them.
            PeerLostError: a rank died or stopped.
        """
        number, rank, size = self._next, self._coordinator.rank, self._coordinator.size

        def arrive(store: KeyValues) -> None:
            store.set(f"{self._prefix}/at/{rank}", str(number + 1))
            if store.add(self._count(number), 1) == size:
                store.set(self._go(number), "{}")
            if rank == 0 and number > 1:  # all have passed that one
                store.delete_key(self._go(number - 2))
                store.delete_key(self._count(number - 2))

        self._store_client.call(arrive, phase=phase)
        self._next = number + 1
        wait_s = self._late_s if rank == 0 else self._timeout_s + self._late_s
        try:
            value = self._store_client.get(self._go(number), phase=phase, wait_s=wait_s, check=self._check_peers)
        except KeyTimeout:
            raise RendezvousTimeout(phase=phase, seconds=wait_s, missing=self._missing(number)) from None
        self._hear(value)
        self._begun = number + 1

    def look(self) -> None:
        """Called again and again within a round. Raises as ``enter`` does when it will not end."""
        if time.monotonic() < self._looked + _LOOK_S:
            return
        self._looked = time.monotonic()
        self._check_peers()
        key = self._go(self._next)
        value = self._store_client.call(lambda store: store.get(key) if store.check([key]) else b"{}", phase="gather")
        # One that left behind this round took part in it: it will end.
        if json.loads(value).get("done", 0) < self._next:
            self._hear(value)

    def passed(self) -> None:
        """The round is over for this rank."""
        self._done = self._next

    def leave(self, error: BaseException, where: str) -> None:
        """Tell the others why there will be no further round with this rank."""
        rank = self._coordinator.rank
        if isinstance(error, GeneratorExit):
            reason = f"rank {rank} left the gather at {where}: its loop ended early or raised"
            error = PeerLostError(phase="gather", ranks=(rank,), reason=reason)
        if self._told:
            return
        if rank == 0:
            self._await_readers(self._coordinator.size - 1 - _lost_with(error, rank))
        wire = to_wire(error, rank=rank, phase=f"gather: {where}")
        # Also in the round that this rank waited for: where it begins all the same, the others look for the next one within.
        keys = [self._go(number) for number in range(self._begun, self._next + 1)]
        text = json.dumps({"error": wire, "done": self._done})

        def tell(store: KeyValues) -> None:
            for key in keys:
                store.set(key, text)

        self._store_client.call(tell, phase="gather")

    def close(self) -> None:
        """Give the connection back. Rank 0 notes which keys are left; the next gather, to which all come, drops them."""
        self._store_client.close()
        if self._coordinator.rank == 0 and not self.alone:
            rounds = range(max(0, self._next - 2), self._next + 1)
            self._coordinator.stale += [*map(self._go, rounds), *map(self._count, rounds), self._read]
            self._coordinator.stale += [f"{self._prefix}/at/{rank}" for rank in range(self._coordinator.size)]

    def _drop(self, keys: Sequence[str]) -> None:
        def drop(store: KeyValues) -> None:
            for key in keys:
                store.delete_key(key)

        self._store_client.call(drop, phase="gather")
        for key in keys:
            self._coordinator.reads.pop(key, None)

    def _count(self, number: int) -> str:
        return f"{self._prefix}/count/{number}"

    def _go(self, number: int) -> str:
        return f"{self._prefix}/go/{number}"

    def _check_peers(self) -> None:
        self._coordinator.check(self._needed)

    def _missing(self, number: int) -> tuple[int, ...]:
        def late(store: KeyValues) -> tuple[int, ...]:
            keys = {rank: f"{self._prefix}/at/{rank}" for rank in range(self._coordinator.size)}
            return tuple(r for r, key in keys.items() if not store.check([key]) or int(store.get(key)) <= number)

        return self._store_client.call(late, phase="gather")

    def _hear(self, value: bytes) -> None:
        told = json.loads(value)
        if "error" not in told:
            return
        self._told = True
        error = from_wire(told["error"])
        if self._coordinator.rank == 0:
            self._await_readers(self._coordinator.size - 1 - max(1, _lost_with(error, 0)))
        else:
            self._store_client.acknowledge(self._read, phase="gather")
        raise error

    def _await_readers(self, count: int) -> None:
        # The store goes with rank 0: it stays until the others have read why there is no further round.
        self._coordinator.reads[self._read] = (count, -1)

    @property
    def _read(self) -> str:
        return f"{self._prefix}/read"


def _lost_with(error: BaseException, rank: int) -> int:
    """How many other ranks will not read what is said of it."""
    return len(set(getattr(error, "ranks", getattr(error, "missing", ()))) - {rank})
