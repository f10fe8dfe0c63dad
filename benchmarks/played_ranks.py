"""A real rank 0 among thousands of ranks that are played: a few processes write the keys of many ranks each.

Rank 0 is what is measured: its real session, its real store, its heartbeat. Who plays the others knows the keys of
``rendezvous``, ``Heartbeat``, ``LogEntry`` and ``TwoPhaseCommit``: ``_Player.meet``, ``_Player.beat``, ``_Player.agree`` and
``_Player.commit``. A player writes one answer and one report for every rank. What each rank only reads or counts up, it reads
once and counts up by as many; with ``every_request`` it asks as often as the ranks would.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from control_rounds import (
    ANSWER,
    LIMIT_S,
    NAME,
    LocalStoreClient,
    Tally,
    count_requests,
    error_report,
    failed_save,
    open_session,
    save,
)
from rank_processes import await_all, forked, met, private_bytes

from safe_ckpt.core.coordination import process_groups
from safe_ckpt.core.coordination.rounds import LogEntry, Round
from safe_ckpt.core.coordination.store import SealedStore
from safe_ckpt.machine import machine_id

PLAYERS = 2
KEYS_AFTER = (1, 10, 100, 1000)
_BEAT_S = 5.0
_FAILURES = (0.0, 0.5)  # how many ranks have reported before one fails


class _Player:
    """Plays the ``ranks`` of a session of ``size``; ``every_request`` as often as they would ask themselves."""

    def __init__(self, ranks: range, size: int, *, every_request: bool) -> None:
        self._ranks, self._size = ranks, size
        self._asks = ranks if every_request else ranks[:1]
        self._amount = 1 if every_request else len(ranks)
        self._call = -1
        self._connect: Callable[[], SealedStore]

    def greet(self, meeting: Any) -> dict[int, str]:
        """Say that all ranks are here. Returns their nonces."""
        nonces = {rank: uuid.uuid4().hex for rank in self._ranks}
        for rank, nonce in nonces.items():
            word = json.dumps({"nonce": nonce, "have": "", "gone": False})
            meeting.set(f"safe_ckpt/{NAME}/hello/{rank}", word)
        return nonces

    def meet(self, meeting: Any, nonces: dict[int, str]) -> None:
        """Take the welcomes, and join rank 0's store."""
        welcome: dict[str, Any] = {}
        for nonce in nonces.values():
            key = f"safe_ckpt/{NAME}/welcome/{nonce}"
            welcome = welcome or json.loads(meeting.get(key))
            meeting.delete_key(key)

        def connect() -> SealedStore:
            return SealedStore(process_groups.connect_store("127.0.0.1", welcome["port"], 60.0), welcome["secret"])

        self._connect, self._store = connect, connect()
        self._client = LocalStoreClient(self._store)
        joined = json.dumps({"host": machine_id(), "pid": os.getpid()})
        for rank in self._ranks:
            self._store.set(f"joined/{rank}", joined)
        self._count("joined")
        self._read("met")
        self._count("met/read")
        threading.Thread(target=self.beat, daemon=True).start()

    def beat(self) -> None:
        """The heartbeats of all ranks, as long as this process lives."""
        store, number = self._connect(), 0
        while True:
            number += 1
            beat = json.dumps([number, 0, -1, []])
            for rank in self._ranks:
                store.set(f"beat/{rank}", beat)
            time.sleep(_BEAT_S)

    def agree(self, *, shares: bool) -> None:
        """The ranks' part in ``Coordinator.agree``."""
        self._call += 1
        entry = LogEntry(
            self._client, self._ranks[0], self._size, f"log/{self._call}.0", "played", LIMIT_S, lambda: None
        )
        self._read(entry.name)
        self._post(entry, self._ranks, {"answer": ANSWER})
        self._read(f"{entry.name}/verdict")
        for rank in self._ranks if shares else ():
            self._store.get(f"{entry.name}/share/{rank}")
            self._store.delete_key(f"{entry.name}/share/{rank}")
        self._count(entry.read)

    def commit(self, op_id: str) -> None:
        """The ranks' part in ``TwoPhaseCommit``."""
        self._read(f"op/{op_id}/prepared")
        entry = {"path": "model/__12345_0.distcp", "size_bytes": 1 << 30, "xxh3_128": "0" * 32}
        self._post(self._reports(op_id), self._ranks, {"files": [entry], "items": {}})
        self._conclude(op_id)

    def fail(self, op_id: str, before: float) -> float:
        """The last rank fails after a share ``before`` of the others has reported. Returns when it said so, else 0."""
        self._read(f"op/{op_id}/prepared")
        reports, told = self._reports(op_id), 0.0
        whole = {rank for rank in range(1, self._size - 1) if rank <= before * self._size}
        self._post(reports, [rank for rank in self._ranks if rank in whole], {"files": [], "items": {}})
        if self._ranks[-1] == self._size - 1:
            while reports.posted() < len(whole):
                time.sleep(0.001)
            told = time.monotonic()
            reports.post(self._size - 1, error_report(self._size - 1), wake=True)
        self._conclude(op_id)
        return told

    def _reports(self, op_id: str) -> Round:
        return Round(self._client, f"op/{op_id}", range(self._size), "played")

    def _conclude(self, op_id: str) -> None:
        self._read(f"op/{op_id}/verdict")
        self._count(f"op/{op_id}/read")

    def _post(self, exchange: Round, ranks: range | list[int], message: object) -> None:
        count, everyone, *words = exchange.message_keys()
        text, first = json.dumps(message), self._size - len(words)
        for rank in ranks:
            self._store.set(words[rank - first], text)
            if self._amount == 1 and self._store.add(count, 1) >= len(words):
                self._store.set(everyone, "{}")
        if self._amount > 1 and self._store.add(count, len(ranks)) >= len(words):
            self._store.set(everyone, "{}")

    def _read(self, key: str) -> None:
        for _ in self._asks:
            self._client.get(key, phase="", wait_s=LIMIT_S)

    def _count(self, key: str) -> None:
        for _ in self._asks:
            self._store.add(key, self._amount)


def _process(number: int, count: int, listening: socket.socket, size: int, rounds: int, every: bool) -> dict[str, Any]:
    meeting = met(number, listening)
    if number == 0:
        return _lead(meeting, count, size, rounds)
    players = count - 1
    player = _Player(range(number, size, players), size, every_request=every)
    nonces = player.greet(meeting)
    await_all(meeting, "bench", count)
    player.meet(meeting, nonces)
    for step in range(rounds):
        player.agree(shares=True)
        player.agree(shares=False)
        player.commit(f"op{step}")
    told = []
    for turn, before in enumerate(_FAILURES):
        player.agree(shares=False)
        told.append(player.fail(f"failed{turn}", before))
    return {"told": told}


def _lead(meeting: Any, count: int, size: int, rounds: int) -> dict[str, Any]:
    tally, before = count_requests(), private_bytes()
    await_all(meeting, "bench", count)
    begun, cpu_s = time.monotonic(), time.process_time()
    coordinator = open_session(0, size, meeting)
    found: dict[str, Any] = {"meeting_s": time.monotonic() - begun, "meeting_cpu_s": time.process_time() - cpu_s}
    rows = _Rows(tally)
    rows.begin()
    found["seconds"] = save(coordinator, rounds, shares=True, after=rows.end)
    found["stamps"] = [failed_save(coordinator, f"failed{turn}", size - 1) for turn in range(len(_FAILURES))]
    coordinator.close()
    return {**found, "saves": rows.saves, "keys": rows.keys, "before_bytes": before}


class _Rows:
    """What rank 0 notes of each save, and when its keys are gone."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self.saves: list[dict[str, float]] = []
        self.keys: dict[int, dict[str, int]] = {}

    def begin(self) -> None:
        """A save begins."""
        self._at = time.monotonic(), time.process_time(), self._tally.calls.total(), self._tally.waited_s

    def end(self, number: int) -> None:
        """It is over: ``save`` has deleted the reports, the answers are being deleted behind it."""
        keys = self._settled()
        at = time.monotonic(), time.process_time(), self._tally.calls.total(), self._tally.waited_s
        names = "until_tidy_s", "cpu_s", "requests", "waited_s"
        self.saves.append({name: now - then for name, now, then in zip(names, at, self._at, strict=True)})
        if number + 1 in KEYS_AFTER:
            self.keys[number + 1] = {"keys": keys, "private_bytes": private_bytes()}
        self.begin()

    def _settled(self) -> int:
        counts: list[int] = []
        while len(counts) < 5 or len(set(counts[-5:])) > 1:
            counts.append(self._tally.hosted.num_keys())
            time.sleep(0.01)
        return counts[-1]


def way(*, every_request: bool) -> str:
    """The name of these rows."""
    return "played, every request" if every_request else "played"


def played(ranks: int, rounds: int, *, every_request: bool = False, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Saves of a real rank 0 among so many ranks that are played: a row of the table."""
    lead, *players = forked(1 + PLAYERS, _process, ranks, rounds, every_request, limit_s=limit_s)
    told = [max(player["told"][turn] for player in players) for turn in range(len(_FAILURES))]
    stamps, saves = lead["stamps"], lead["saves"]
    posted = [stamp["posted"] - at for stamp, at in zip(stamps, told, strict=True)]

    def median(name: str) -> float:
        return statistics.median(one[name] for one in saves)

    return {
        "way": way(every_request=every_request),
        "ranks": ranks,
        "seconds": lead["seconds"],
        "requests_0": median("requests"),
        "waited_s": median("waited_s"),
        "cpu_0_s": median("cpu_s"),
        "until_tidy_s": median("until_tidy_s"),
        "meeting_s": lead["meeting_s"],
        "meeting_cpu_s": lead["meeting_cpu_s"],
        "error_known_s": stamps[0]["known"] - told[0],
        "error_posted_s": posted[0],
        "error_posted_half_s": posted[1],
        "keys": lead["keys"],
        "before_bytes": lead["before_bytes"],
        "private_0_bytes": lead["private_bytes"],
    }
