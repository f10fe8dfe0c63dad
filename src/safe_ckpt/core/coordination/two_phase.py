"""The keys of one save's background phases: prepared, wrote, verdict.

Only rank 0 concludes. A rank that fails reports its error at once, so nobody sits out a timeout to learn of it. Used on the
background thread alone; no collectives.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from safe_ckpt.core.coordination.sealed_store import KeyValues
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
        writers: the ranks that have something to write.
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
        rank = self._coordinator.rank

        def arrive(store: KeyValues) -> None:
            store.set(f"{self._prefix}/wrote/{rank}", json.dumps(value))
            if store.add(f"{self._prefix}/count", 1) >= len(self._writers) or "error" in value:
                store.set(f"{self._prefix}/wake", "")

        self._store_client.call(arrive, phase="write")

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
                self._get("wake", "write", left_s, needed)
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
        self._coordinator.reads[f"{self._prefix}/read"] = (self._coordinator.size - 1, self._call)
        self._set("verdict", verdict)
        self._set("prepared", {})
        if "error" in verdict:
            self._set("wake", {})  # what still waits for reports, on a connection that was left, ends

    def verdict(self, timeout_s: float) -> Any:
        """The other ranks: wait for what came of it, and acknowledge that it was read.

        Raises:
            KeyTimeout: rank 0 did not conclude in time.
            PeerLostError: rank 0 died or stopped.
        """
        found = self._get("verdict", "commit", timeout_s)
        self._store_client.acknowledge(f"{self._prefix}/read", phase="commit")
        return found

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
        name = "wake" if self._coordinator.rank == 0 else "verdict"
        if not self._store_client.call(lambda store: store.check([f"{self._prefix}/{name}"]), phase="write"):
            return None
        found = self._reported().values() if name == "wake" else [self._get(name, "write", 1.0)]
        return next((from_wire(value["error"]) for value in found if "error" in value), None)

    def forget(self) -> bool:
        """Rank 0: drop the keys if every rank has read the verdict. Returns whether they are gone."""
        key = f"{self._prefix}/read"
        read = self._store_client.call(lambda store: store.add(key, 0), phase="commit")
        if read + len(self._coordinator.have_left(self._call)) < self._coordinator.size - 1:
            return False
        names = ["prepared", "verdict", "count", "wake", "read", *(f"wrote/{rank}" for rank in self._writers)]
        keys = [f"{self._prefix}/{name}" for name in names]
        self._store_client.call(lambda store: [store.delete_key(key) for key in keys], phase="commit")
        self._coordinator.reads.pop(key, None)
        return True

    def _reported(self) -> dict[int, Any]:
        def reported(store: KeyValues) -> dict[int, Any]:
            keys = {rank: f"{self._prefix}/wrote/{rank}" for rank in self._writers}
            if store.check(list(keys.values())):
                return {rank: json.loads(v) for rank, v in zip(keys, store.multi_get(list(keys.values())), strict=True)}
            return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}

        return self._store_client.call(reported, phase="write")

    def _set(self, name: str, value: Mapping[str, Any]) -> None:
        self._store_client.call(lambda store: store.set(f"{self._prefix}/{name}", json.dumps(value)), phase=name)

    def _get(self, name: str, phase: str, timeout_s: float, needed: Sequence[int] = (0,)) -> Any:
        def check() -> None:
            self._check()
            self._check_peers(needed)

        value = self._store_client.get(f"{self._prefix}/{name}", phase=phase, wait_s=timeout_s, check=check)
        return json.loads(value) if value else {}
