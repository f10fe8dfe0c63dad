"""The keys of one save's background phases: prepared, wrote, verdict.

Only rank 0 concludes. A rank that fails reports its error at once, so nobody sits out a timeout to learn of it. Used on the
background thread alone; no collectives.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from safe_ckpt.core.coordination.mailbox import Mailbox
from safe_ckpt.core.coordination.store import KeyTimeout, StoreClient
from safe_ckpt.errors import PeerLostError, RendezvousTimeout, SafeCheckpointError, from_wire

if TYPE_CHECKING:
    from safe_ckpt.core.coordination.coordinator import Coordinator
    from safe_ckpt.core.coordination.store import Check


class TwoPhaseCommit:
    """What the ranks tell each other about one save.

    Args:
        coordinator: where the ranks meet.
        store_client: the connection of the thread that this is used on.
        op_id: unique to this save.
        writers: the other ranks that have something to write; rank 0 keeps its own report.
        check: called while waiting; raises when the save is to be given up.
        call: the number of the call that it began with.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        store_client: StoreClient,
        op_id: str,
        writers: Sequence[int],
        check: Check,
        call: int,
    ) -> None:
        self._call = call
        self._coordinator = coordinator
        self._store_client = store_client
        self._check = check
        self._writers = tuple(writers)
        self._prefix = f"op/{op_id}"
        self._reports = Mailbox(store_client, f"{self._prefix}/wrote", writers)

    def prepared(self) -> None:
        """Rank 0: the pending directory exists."""
        self._set("prepared", {})

    def await_prepared(self, timeout_s: float) -> None:
        """Another writing rank: wait until the pending directory exists, or the save has failed.

        Raises:
            RendezvousTimeout: rank 0 did neither in time.
            PeerLostError: rank 0 died or stopped.
        """
        try:
            self._get("prepared", "prepare", timeout_s)
        except KeyTimeout:
            raise RendezvousTimeout(phase="prepare", seconds=timeout_s, missing=(0,)) from None

    def report(self, value: Mapping[str, Any]) -> None:
        """A writing rank: what it wrote, or ``{"error": ...}``."""
        self._reports.post(self._coordinator.rank, value, phase="write", wake="error" in value)

    def reports(self, timeout_s: float) -> dict[int, Any]:
        """Rank 0: what the writing ranks reported; fewer than all only when one of them reported an error.

        Raises:
            RendezvousTimeout: some did not report in time; names them.
            PeerLostError: one of them died or stopped before it reported.
        """
        deadline = time.monotonic() + timeout_s
        needed = list(self._writers)
        while True:
            left_s = max(0.001, deadline - time.monotonic())
            try:
                self._reports.wait(phase="write", wait_s=left_s, check=self._checked(needed))
                return self._reported()
            except KeyTimeout:
                missing = tuple(rank for rank in self._writers if rank not in self._reported())
                raise RendezvousTimeout(phase="write", seconds=timeout_s, missing=missing) from None
            except PeerLostError:
                # One that reported and died afterwards is not missed.
                reported = self._reported()
                needed = [rank for rank in self._writers if rank not in reported]
                self._check_peers(needed)

    def conclude(self, verdict: Mapping[str, Any]) -> None:
        """Rank 0: publish what came of it. ``prepared`` is set too, so that whoever waits there wakes up."""
        self._coordinator.receipts.expect(self._read, self._coordinator.size - 1, self._call)
        self._set("verdict", verdict)
        self._set("prepared", {})
        if "error" in verdict and self._writers:
            self._reports.wake({}, phase="write")  # what still waits for reports, on a connection that was left, ends

    def verdict(self, timeout_s: float) -> Any:
        """The other ranks: wait for what came of it, and acknowledge that it was read.

        Raises:
            KeyTimeout: rank 0 did not conclude in time.
            PeerLostError: rank 0 died or stopped.
        """
        verdict = self._get("verdict", "commit", timeout_s)
        self._store_client.acknowledge(self._read, phase="commit")
        return verdict

    def leave(self) -> None:
        """Another rank: it gives up, and could not say so."""
        self._coordinator.leave(self._call)

    def refuse_left(self) -> None:
        """Rank 0, before it commits: nobody may have been told that this save failed.

        Raises:
            PeerLostError: some ranks gave it up; names them.
        """
        self._refuse(self._coordinator.have_left(self._call))

    def _check_peers(self, needed: Sequence[int]) -> None:
        self._coordinator.check(needed)
        self._refuse(tuple(rank for rank in self._coordinator.have_left(self._call) if rank in needed))

    def _refuse(self, gone: tuple[int, ...]) -> None:
        if gone:
            raise PeerLostError(
                phase="write", ranks=gone, reason="it gave this save up while it could not reach rank 0"
            )

    def failed_elsewhere(self) -> SafeCheckpointError | None:
        """What another rank failed with, so that this one can stop working for a save that will not be."""
        if self._coordinator.rank == 0 and not self._writers:
            return None
        if self._coordinator.rank == 0:
            reports = self._reported().values() if self._reports.peek(phase="write") is not None else ()
            return next((from_wire(report["error"]) for report in reports if "error" in report), None)
        if not self._store_client.call(lambda store: store.check([f"{self._prefix}/verdict"]), phase="write"):
            return None
        verdict = self._get("verdict", "write", 1.0)
        return from_wire(verdict["error"]) if "error" in verdict else None

    def forget(self) -> bool:
        """Rank 0: drop the keys if every rank has read the verdict. Returns whether they are gone."""
        if self._coordinator.size == 1:
            return True
        read = self._store_client.call(lambda store: store.add(self._read, 0), phase="commit")
        if read + len(self._coordinator.have_left(self._call)) < self._coordinator.size - 1:
            return False
        keys = [f"{self._prefix}/prepared", f"{self._prefix}/verdict", self._read, *self._reports.keys()]
        self._store_client.delete(keys, phase="commit")
        self._coordinator.receipts.drop(self._read)
        return True

    @property
    def _read(self) -> str:
        return f"{self._prefix}/read"

    def _reported(self) -> dict[int, Any]:
        return self._reports.messages(phase="write")

    def _set(self, name: str, value: Mapping[str, Any]) -> None:
        if self._coordinator.size > 1:
            self._store_client.put(f"{self._prefix}/{name}", value, phase=name)

    def _get(self, name: str, phase: str, timeout_s: float) -> Any:
        check = self._checked([0])
        return self._store_client.get(f"{self._prefix}/{name}", phase=phase, wait_s=timeout_s, check=check)

    def _checked(self, needed: Sequence[int]) -> Check:
        def check() -> None:
            self._check()
            self._check_peers(needed)

        return check
