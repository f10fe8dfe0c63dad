"""What it costs many ranks to act as one: agree on a save, report, commit. No files, no tensors, only the control plane.

By default every rank is a thread of this process with a store connection of its own, against one real TCPStore; the protocol
objects are those of a real save (``Coordinator.agree``, ``TwoPhaseCommit``). All threads share one interpreter lock and few
cores: the times are upper bounds, and what counts is their shape and the number of store operations per rank.

``--processes``: every rank is a process with a real session. ``--played``: a real rank 0 among ranks that two processes play
(``played_ranks.py``). ``--planning``: DCP's planning of a sharded save and ours (``dcp_planning.py``). ``--out``: a folder for
a JSON file that later runs add to, the tables and a plot.

torch looks up the name of every address that connects to a TCPStore, in its host's only thread. Where a name server is slow
now and then, all ranks wait for it. The times are those of the store alone where /etc/hosts names ``::ffff:127.0.0.1``:

    (cat /etc/hosts; echo ::ffff:127.0.0.1 localhost) > /tmp/hosts
    sudo unshare -m sh -c 'mount --bind /tmp/hosts /etc/hosts && exec python benchmarks/control_plane.py --processes 16'

    python benchmarks/control_plane.py [ranks ...] [--processes N ...] [--played N ...] [--planning N ...] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import control_report
import torch.distributed as dist
from control_report import PLANNING, ROUNDS, Row
from control_rounds import CountedStore, LocalStoreClient, save

from safe_ckpt.core.coordination.coordinator import Coordinator
from safe_ckpt.core.coordination.heartbeat import Heartbeat
from safe_ckpt.core.coordination.rounds import Receipts
from safe_ckpt.core.coordination.store import StoreClient


class ThreadSession(Coordinator):
    """A session whose rank is a thread: its calls run on that thread, and nobody beats."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size = rank, size
        self.users, self.receipts, self.progress_sources = 1, Receipts(), []
        self.at_exit, self._pid = None, os.getpid()
        self.call, self._part, self._depth, self._goes_on, self.unsure = -1, 0, 0, False, False
        self._named, self.over = "", []
        self._shutdown_s, self._answer_s = 5.0, 5.0
        self._name, self._meeting, self._closed = "threads", None, False
        self._calls = LocalStoreClient(store)
        self._heartbeat = Heartbeat(
            self._calls, rank=rank, peers={}, stall_s=5.0, interval_s=1.0, progress=self._own_progress
        )

    def store_client(self, name: str, store: Any = None) -> StoreClient:
        return self._calls


def simulate(ranks: int, rounds: int = 3, *, shares: bool = True) -> tuple[list[float], list[Counter[str]]]:
    """Run saves on that many ranks, which are threads.

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


def threads_row(ranks: int, rounds: int) -> Row:
    """A row of the table for ranks that are threads."""
    threading.stack_size(512 << 10)
    # Thousands of threads that wait for the interpreter lock would else wake up every 5 ms to ask for it.
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(5.0)
    try:
        times, calls = simulate(ranks, rounds)
    finally:
        sys.setswitchinterval(interval_s)
        threading.stack_size(0)
    own = [sum(call.values()) / rounds for call in calls]
    return {"way": "threads", "ranks": ranks, "seconds": times, "requests": max(own[1:]), "requests_0": own[0]}


def _tried(section: str, way: str, measure: Callable[..., Any], ranks: int, *args: Any, **kwargs: Any) -> list[Row]:
    """The rows of one measurement, or one that says why there are none."""
    begun = time.monotonic()
    try:
        found = measure(ranks, *args, **kwargs)
        rows = found if isinstance(found, list) else [found]
    except Exception as error:  # the larger ones may not fit, and what was measured before is to be kept
        rows = [{"way": way, "ranks": ranks, "error": str(error).strip().splitlines()[-1]}]
    rows = [{**row, "section": section, "took_s": time.monotonic() - begun} for row in rows]
    for row in rows:
        print(control_report.line(row), flush=True)
    return rows


def measured(options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of all that was asked for. What forks comes before what starts threads here."""
    import played_ranks
    import rank_processes

    each: dict[str, float] = {}
    for ranks in options.processes:
        rows = _tried(ROUNDS, "processes", rank_processes.processes, ranks, options.rounds, **each)
        each = _each(rows, each)
        yield rows
    for ranks in options.played:
        saves, every = options.saves or options.rounds, options.every_request
        way = played_ranks.way(every_request=every)
        yield _tried(ROUNDS, way, played_ranks.played, ranks, saves, every_request=every, limit_s=options.limit_s)
    each = {}
    for ranks in options.planning:
        import dcp_planning  # here: a rank of the others is to be as small as it can be

        ways = options.ways or dcp_planning.WAYS
        more = {"ways": ways, **each}
        rows = _tried(PLANNING, ", ".join(ways), dcp_planning.planning, ranks, options.tensors, options.rounds, **more)
        each = _each(rows, each)
        yield rows
    for ranks in options.ranks:
        yield _tried(ROUNDS, "threads", threads_row, ranks, options.rounds)


def _each(rows: list[Row], known: dict[str, float]) -> dict[str, float]:
    """What one process takes, for the next number of them."""
    return {"each_bytes": rows[0]["private_bytes"]} if "private_bytes" in rows[0] else known


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="*", help="ranks that are threads")
    parser.add_argument("--processes", type=int, nargs="*", default=[], help="ranks that are processes")
    parser.add_argument("--played", type=int, nargs="*", default=[], help="a real rank 0 among so many played ranks")
    parser.add_argument(
        "--planning", type=int, nargs="*", default=[], help="gloo processes that plan with DCP and ours"
    )
    parser.add_argument("--rounds", type=int, default=3, help="saves")
    parser.add_argument(
        "--saves", type=int, help="saves among played ranks; keys are counted after 1, 10, 100 and 1,000"
    )
    parser.add_argument("--every-request", action="store_true", help="played ranks read and count one by one")
    parser.add_argument("--tensors", type=int, default=200, help="of the state that is planned")
    parser.add_argument("--ways", nargs="*", help='of planning: "DCP, no plan cache", "DCP, plan cache", "ours"')
    parser.add_argument("--limit-s", type=float, default=300.0, help="for one number of played ranks")
    parser.add_argument("--out", type=Path, help="a folder for JSON, tables and a plot")
    options = parser.parse_args(arguments)
    if not (options.ranks or options.processes or options.played or options.planning):
        options.ranks = [16, 64, 128, 256, 512]
    return options


def main() -> None:
    """Measure, print the tables, and write them."""
    options = options_of()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    run = control_report.facts(options.out if options.out and options.out.exists() else Path())
    print(control_report.said(run), flush=True)
    rows: list[Row] = []
    for found in measured(options):
        rows += found
        if options.out:
            paths = control_report.write(options.out, run, found)
    print("\n" + control_report.markdown({"runs": [run], "rows": rows}))
    if options.out:
        print("\n".join(map(str, paths)))


if __name__ == "__main__":
    main()
