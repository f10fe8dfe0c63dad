"""What it costs many ranks to act as one: agree on a save, report, commit. No files, no tensors, only the control plane.

Every rank is a thread of this process with a store connection of its own, against one real TCPStore; the protocol objects are
those of a real save (``Coordinator.agree``, ``TwoPhaseCommit``). All threads share one interpreter lock and few cores: the
times are upper bounds, and what counts is their shape and the number of store operations per rank. Connecting takes longer.

    python benchmarks/control_plane.py [ranks ...]
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from safe_ckpt.core.coordination.coordinator import Coordinator
from safe_ckpt.core.coordination.log_entry import Scatter
from safe_ckpt.core.coordination.mailbox import Receipts, TwoPhaseCommit
from safe_ckpt.core.coordination.store import StoreClient


class CountedStore:
    """A store that counts what is asked of it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls[name] += 1
            return getattr(self._store, name)(*args)

        return call


class LocalStoreClient(StoreClient):
    """The store is in this process: calls run on the caller's thread."""

    def __init__(self, store: Any) -> None:
        super().__init__(lambda: store, name="local", answer_s=0.0)
        self._store = store

    def call(self, operation: Callable[[Any], Any], **_: Any) -> Any:
        return operation(self._store)

    def begin(self, operation: Callable[[Any], Any], **_: Any) -> Any:
        operation(self._store)


class ThreadSession(Coordinator):
    """A session whose rank is a thread: its calls run on that thread, and nobody beats."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size = rank, size
        self.users, self.receipts, self.movers = 1, Receipts(), []
        self.at_exit, self._pid = None, os.getpid()
        self.call, self._part, self._depth, self._goes_on, self._ended, self.unsure = -1, 0, 0, False, [], False
        self._shutdown_s, self._answer_s = 5.0, 5.0
        self._name, self._meeting, self._closed, self._heartbeat = "threads", None, False, None
        self._calls = LocalStoreClient(store)

    def store_client(self, name: str, store: Any = None) -> StoreClient:
        return self._calls


def save(coordinator: Coordinator, rounds: int, shares: bool) -> list[float]:
    """One rank's part in ``rounds`` saves: seconds of each."""
    answer = {"bytes": 1 << 30, "writes": True, "earlier": None}
    found = []
    for number in range(rounds):
        begun = time.monotonic()
        if shares:
            coordinator.agree(
                "shards",
                timeout_s=60,
                local=lambda: answer,
                decide=lambda a: Scatter({rank: {"kept": [rank]} for rank in a}),
            )
        agreed = coordinator.agree(
            "save",
            must_match={"step": number},
            timeout_s=60,
            local=lambda: answer,
            decide=lambda a: {"writers": len(a)},
        )
        two_phase = TwoPhaseCommit(
            coordinator,
            coordinator.store_client("phases"),
            f"op{number}",
            range(agreed["writers"]),
            lambda: None,
            coordinator.call,
        )
        entry = {"path": f"model/__{coordinator.rank}_0.distcp", "size_bytes": 1 << 30, "xxh3_128": "0" * 32}
        if coordinator.rank == 0:
            two_phase.prepared()
            two_phase.report({"files": [entry], "items": {}})
            reports = two_phase.reports(60)
            two_phase.conclude({"ok": {"files": sum(len(report["files"]) for report in reports.values())}})
        else:
            two_phase.await_prepared(60)
            two_phase.report({"files": [entry], "items": {}})
            two_phase.verdict(60)
        found.append(time.monotonic() - begun)
        if coordinator.rank == 0:
            while not two_phase.forget():
                time.sleep(0.001)
    return found


def simulate(ranks: int, rounds: int = 3, *, shares: bool = True) -> tuple[list[float], list[Counter[str]]]:
    """Run saves on that many ranks.

    Returns:
        The seconds of each save, of the slowest rank, and what each rank asked of the store.
    """
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    stores: list[CountedStore] = [CountedStore(server)] * ranks
    seconds: list[list[float]] = [[] for _ in range(ranks)]
    failures: list[BaseException] = []
    ready = threading.Barrier(ranks)

    def run(rank: int) -> None:
        try:
            if rank:
                limit = timedelta(seconds=300)
                client = dist.TCPStore("localhost", server.port, is_master=False, wait_for_workers=False, timeout=limit)
                stores[rank] = CountedStore(client)
            ready.wait(timeout=300)
            seconds[rank] = save(ThreadSession(rank, ranks, stores[rank]), rounds, shares)
        except BaseException as error:
            failures.append(error)
            ready.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=400)
    if failures or any(len(times) < rounds for times in seconds):
        raise RuntimeError(f"{len(failures)} ranks failed: {failures[:1]}")
    return [max(times[number] for times in seconds) for number in range(rounds)], [store.calls for store in stores]


def main() -> None:
    """Print the curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", type=int, nargs="*", default=[16, 64, 256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    threading.stack_size(512 << 10)
    # Thousands of threads that wait for the interpreter lock would else wake up every 5 ms to ask for it.
    sys.setswitchinterval(5.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(
        f"{'ranks':>6} {'agree -> commit, s':>20} {'ms per rank':>12} {'jobs of a rank':>14} {'jobs of rank 0 / rank':>21}"
    )
    for ranks in options.ranks:
        times, calls = simulate(ranks, options.rounds)
        own = [sum(call.values()) / options.rounds for call in calls]
        best = sorted(times)[len(times) // 2]
        print(f"{ranks:>6} {best:>20.3f} {1000 * best / ranks:>12.3f} {max(own[1:]):>14.1f} {own[0] / ranks:>21.2f}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


if __name__ == "__main__":
    main()
