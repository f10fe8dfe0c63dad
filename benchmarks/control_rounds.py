"""What every rank of ``control_plane.py`` plays: saves without files, and one that fails. Also what counts its requests."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from safe_ckpt.config import Network, Timeouts
from safe_ckpt.core.coordination import process_groups
from safe_ckpt.core.coordination.coordinator import Coordinator
from safe_ckpt.core.coordination.rendezvous import rendezvous
from safe_ckpt.core.coordination.rounds import Scatter, TwoPhaseCommit, to_wire
from safe_ckpt.core.coordination.store import StoreClient

LIMIT_S = 300.0
NAME = "control plane"
ANSWER = {"bytes": 1 << 30, "writes": True, "earlier": None}
_BEAT = "beat/"


@dataclass
class Tally:
    """What one rank asked of the store, on all of its connections.

    Attributes:
        calls: how often which method was called; a beat is left out.
        waited_s: seconds in ``wait``, which is where a rank waits for another.
        sent_bytes: what was written, a beat left out.
        hosted: the store that this process hosts, not counted.
    """

    calls: Counter[str] = field(default_factory=Counter)
    waited_s: float = 0.0
    sent_bytes: int = 0
    hosted: Any = None


class CountedStore:
    """A store that counts what is asked of it, but for heartbeats."""

    def __init__(self, store: Any, tally: Tally | None = None) -> None:
        self._store = store
        self.tally = tally or Tally()

    @property
    def calls(self) -> Counter[str]:
        """How often which method was called."""
        return self.tally.calls

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            if args and _is_beat(args[0]):
                return method(*args)
            self.tally.calls[name] += 1
            if name == "set":
                self.tally.sent_bytes += len(args[1])
            begun = time.monotonic()
            try:
                return method(*args)
            finally:
                self.tally.waited_s += time.monotonic() - begun if name == "wait" else 0.0

        return call


def _is_beat(keys: Any) -> bool:
    first = keys if isinstance(keys, str) else next(iter(keys), "")
    return first.startswith(_BEAT)


class LocalStoreClient(StoreClient):
    """Calls run on the caller's thread."""

    def __init__(self, store: Any) -> None:
        super().__init__(lambda: store, name="local", answer_s=0.0)
        self._store = store

    def call(self, operation: Callable[[Any], Any], **_: Any) -> Any:
        return operation(self._store)

    def begin(self, operation: Callable[[Any], Any], **_: Any) -> Any:
        operation(self._store)


def count_requests() -> Tally:
    """Count what this process asks of every store that it hosts, or connects to, from now on."""
    tally, host, connect = Tally(), process_groups.host_store, process_groups.connect_store

    def counted_host(listening: Any) -> Any:
        tally.hosted = host(listening)
        return CountedStore(tally.hosted, tally)

    def counted_connect(*args: Any) -> Any:
        return CountedStore(connect(*args), tally)

    process_groups.host_store, process_groups.connect_store = counted_host, counted_connect
    return tally


def open_session(rank: int, size: int, meeting: Any) -> Coordinator:
    """A real session: the first meeting, then the coordinator with its heartbeat."""
    group = process_groups.Group(rank=rank, size=size, meeting_store=meeting, name=NAME)
    timeouts = Timeouts()
    met = rendezvous(group, timeouts, Network())
    if isinstance(met, int):
        raise TypeError("nobody has a session yet, and one was found")
    return Coordinator(group, timeouts, met)


def save(
    coordinator: Coordinator, rounds: int, shares: bool, after: Callable[[int], None] = lambda _: None
) -> list[float]:
    """One rank's part in ``rounds`` saves: seconds of each. ``after`` each it is called with its number."""
    found = []
    client = coordinator.store_client("phases")
    for number in range(rounds):
        begun = time.monotonic()
        two_phase = _begin(coordinator, client, f"op{number}", number, shares=shares)
        entry = {"path": f"model/__{coordinator.rank}_0.distcp", "size_bytes": 1 << 30, "xxh3_128": "0" * 32}
        if coordinator.rank == 0:
            two_phase.prepared()
            two_phase.report({"files": [entry], "items": {}})
            reports = two_phase.reports(LIMIT_S)
            two_phase.conclude({"ok": {"files": sum(len(report["files"]) for report in reports.values())}})
        else:
            two_phase.await_prepared(LIMIT_S)
            two_phase.report({"files": [entry], "items": {}})
            two_phase.verdict(LIMIT_S)
        found.append(time.monotonic() - begun)
        _forget(coordinator, client)
        after(number)
    client.close()
    return found


def failed_save(coordinator: Coordinator, op_id: str, failing: int) -> dict[str, float]:
    """One rank's part in a save in which the rank ``failing`` reports an error, and rank 0 has not written its files yet.

    Returns:
        When (on the clock that all processes of this machine share) the error was told, known on rank 0, posted, and read.
    """
    client = coordinator.store_client("phases")
    two_phase = _begin(coordinator, client, op_id, 0, shares=False)
    found = {}
    if coordinator.rank == 0:
        two_phase.prepared()
        reports = two_phase.reports(LIMIT_S)
        found["known"] = time.monotonic()
        two_phase.conclude({"error": next(report["error"] for report in reports.values() if "error" in report)})
        found["posted"] = time.monotonic()
    else:
        two_phase.await_prepared(LIMIT_S)
        if coordinator.rank == failing:
            found["told"] = time.monotonic()
            two_phase.report(error_report(failing))
        two_phase.verdict(LIMIT_S)
        found["read"] = time.monotonic()
    _forget(coordinator, client)
    client.close()
    return found


def error_report(rank: int) -> dict[str, object]:
    """What a rank reports whose disk is full."""
    return {"error": to_wire(OSError(28, "No space left on device"), rank=rank, phase="write")}


def _begin(coordinator: Coordinator, client: StoreClient, op_id: str, step: int, *, shares: bool) -> TwoPhaseCommit:
    if shares:
        coordinator.agree(
            "shards",
            timeout_s=LIMIT_S,
            local=lambda: ANSWER,
            decide=lambda answers: Scatter({rank: {"kept": [rank]} for rank in answers}),
        )
    agreed = coordinator.agree(
        "save",
        must_match={"step": step},
        timeout_s=LIMIT_S,
        local=lambda: ANSWER,
        decide=lambda answers: {"writers": len(answers)},
    )
    return TwoPhaseCommit(coordinator, client, op_id, range(agreed["writers"]), lambda: None, coordinator.call)


def _forget(coordinator: Coordinator, client: StoreClient) -> None:
    while coordinator.rank == 0 and not coordinator.receipts.tidy(client, coordinator.have_left):
        time.sleep(0.001)
