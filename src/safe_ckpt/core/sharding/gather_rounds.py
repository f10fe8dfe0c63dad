"""The signals of one streamed gather: when the next round begins, and why there will be none.

A round begins when every rank has reported that it is ready; the writing rank is ready when it has room. So the ranks wait
here, in the store, for a rank that left or whose storage is slow. No rank enters a collective that another will not join. Used
on the thread that gathers; issues no collectives.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from safe_ckpt.core.coordination.mailbox import Mailbox
from safe_ckpt.core.coordination.store import KeyTimeout
from safe_ckpt.core.coordination.wire import from_wire, to_wire
from safe_ckpt.errors import PeerLostError, RendezvousTimeout

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

    Attributes:
        alone: whether there is no other rank.
    """

    def __init__(self, coordinator: Coordinator, op_id: str, *, timeout_s: float, late_s: float) -> None:
        self._coordinator = coordinator
        self.alone = coordinator.size == 1
        self._store_client = coordinator.store_client("gather")
        self._mailbox = Mailbox(self._store_client, f"gather/{op_id}", range(coordinator.size))
        self._read = f"gather/{op_id}/read"
        self._timeout_s = timeout_s
        self._late_s = late_s
        self._next = 0
        self._begun = self._done = 0
        self._reported = False
        self._looked = time.monotonic()
        if coordinator.rank == 0 and coordinator.stale:
            stale, coordinator.stale = coordinator.stale, []
            self._store_client.delete(stale, phase="gather")
            coordinator.receipts.drop(*stale)
        self._needed = [0] if coordinator.rank else list(range(1, coordinator.size))

    def enter(self, phase: str) -> None:
        """Wait until every rank is here for the next round.

        Raises:
            SafeCheckpointError: what made another rank leave.
            RendezvousTimeout: some ranks did not come; names them.
            PeerLostError: a rank died or stopped.
        """
        if self.alone:
            return
        number, rank = self._next, self._coordinator.rank
        over = [number - 2] if rank == 0 and number > 1 else []  # all have passed that one
        self._mailbox.post(rank, number + 1, phase=phase, turn=number, drop=over)
        self._next = number + 1
        wait_s = self._late_s if rank == 0 else self._timeout_s + self._late_s
        try:
            reason = self._mailbox.wait(phase=phase, wait_s=wait_s, check=self._check_peers, turn=number)
        except KeyTimeout:
            posted = self._mailbox.messages(phase=phase)
            missing = tuple(rank for rank in range(self._coordinator.size) if posted.get(rank, 0) <= number)
            raise RendezvousTimeout(phase=phase, seconds=wait_s, missing=missing) from None
        self._receive(reason)
        self._begun = number + 1

    def look(self) -> None:
        """Called again and again within a round. Raises as ``enter`` does when it will not end."""
        if self.alone or time.monotonic() < self._looked + _LOOK_S:
            return
        self._looked = time.monotonic()
        self._check_peers()
        reason = self._mailbox.peek(phase="gather", turn=self._next) or {}
        # One that left behind this round took part in it: it will end.
        if reason.get("done", 0) < self._next:
            self._receive(reason)

    def passed(self) -> None:
        """The round is over for this rank."""
        self._done = self._next

    def leave(self, error: BaseException, where: str) -> None:
        """Report to the other ranks why there will be no further round with this rank."""
        rank = self._coordinator.rank
        if isinstance(error, GeneratorExit):
            reason = f"rank {rank} left the gather at {where}: its loop ended early or raised"
            error = PeerLostError(phase="gather", ranks=(rank,), reason=reason)
        if self._reported:
            return
        if rank == 0:
            # The store ends with rank 0, which stays until the others have read why there is no further round.
            self._coordinator.receipts.expect(self._read, self._coordinator.size - 1 - _lost_with(error, rank))
        wire = to_wire(error, rank=rank, phase=f"gather: {where}")
        # Also in the round that this rank waited for: where it begins all the same, the others look for the next one within.
        turns = range(self._begun, self._next + 1)
        self._mailbox.wake({"error": wire, "done": self._done}, phase="gather", turns=turns)

    def close(self) -> None:
        """Give the connection back. Rank 0 notes which keys are left; the next gather, to which all come, drops them."""
        self._store_client.close()
        if self._coordinator.rank == 0 and not self.alone:
            turns = range(max(0, self._next - 2), self._next + 1)
            self._coordinator.stale += [self._read, *self._mailbox.keys(turns)]

    def _check_peers(self) -> None:
        self._coordinator.check(self._needed)

    def _receive(self, reason: Mapping[str, Any]) -> None:
        if "error" not in reason:
            return
        self._reported = True
        error = from_wire(reason["error"])
        if self._coordinator.rank == 0:
            self._coordinator.receipts.expect(self._read, self._coordinator.size - 1 - max(1, _lost_with(error, 0)))
        else:
            self._store_client.acknowledge(self._read, phase="gather")
        raise error


def _lost_with(error: BaseException, rank: int) -> int:
    """How many other ranks will not read the report."""
    return len(set(getattr(error, "ranks", getattr(error, "missing", ()))) - {rank})
