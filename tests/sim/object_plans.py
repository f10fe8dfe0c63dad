"""Histories whose directory is an address in an object store: which seeds, and what else their plans and faults are."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from sim.strikes import PHASES, Fault
from sim.world import Proc

URL = "s3://bucket/run"
_ONCE = ("late request", "request twice", "lost answer", "wrong answer", "wrong list")
KINDS = (
    *_ONCE, "refused", "store down", "store outage", "kill", "kill", "kill all", "power", "pause", "pause", "clock", "signal",
    "cut", "delays", "answer lost",
)  # fmt: skip
"""Those of the store, and of the others those that are none of a disk. Some are in it twice: they come more often."""
_ANYWHERE = ("delays", "answer lost")
_AT_REQUESTS = (*_ONCE, "refused", "kill", "kill all", "power", "pause", "store outage")


class StoreFault(Fault):
    """See ``Fault``: also what can happen to requests."""

    def _next_request(self, history: Any, host: Any, what: str) -> None:
        history.world.objects.once.setdefault(host.number, []).append(what)
        if not what.startswith("wrong"):
            now = history.world.now
            history.world.objects.trouble(host.number, now, now + 1.0)

    def _late_request(self, history: Any, host: Any, proc: Proc | None) -> None:
        self._next_request(history, host, "late")

    def _request_twice(self, history: Any, host: Any, proc: Proc | None) -> None:
        self._next_request(history, host, "twice")

    def _lost_answer(self, history: Any, host: Any, proc: Proc | None) -> None:
        self._next_request(history, host, "lost")

    def _wrong_answer(self, history: Any, host: Any, proc: Proc | None) -> None:
        self._next_request(history, host, "wrong")

    def _wrong_list(self, history: Any, host: Any, proc: Proc | None) -> None:
        self._next_request(history, host, "wrong list")

    def _refused(self, history: Any, host: Any, proc: Proc | None) -> None:
        until = history.world.now + min(self.length_s, 12.0)
        history.world.objects.trouble(host.number, history.world.now, until)
        history.world.objects.refusing.append((host.number, self.chance, until))

    def _store_down(self, history: Any, host: Any, proc: Proc | None) -> None:
        history.world.objects.hang(host.number, self.length_s)

    def _store_outage(self, history: Any, host: Any, proc: Proc | None) -> None:
        for one in history.world.hosts:
            history.world.objects.hang(one.number, self.length_s)


def in_a_store(seed: int) -> bool:
    """Whether the directory of this history is in an object store: of one in six."""
    return seed % 6 == 4


def moved(plan: Any, seed: int) -> Any:
    """The same plan, on at most two hosts with four ranks a job, in a store."""
    rng = random.Random(f"objects {seed}")
    plan.objects, plan.local, plan.exchanges, plan.links, plan.stale_s = True, True, True, True, 0.0
    plan.hosts = min(2, plan.hosts)
    for job in (*plan.jobs, plan.audit):
        job.hosts = sorted(number % plan.hosts for number in job.hosts[:4])
        config = {**job.facts["config"], "storage": {"request_timeout_s": 5.0}}
        config.pop("record_events", None)
        job.facts = {**job.facts, "config": config}
    first = plan.jobs[0]
    within_s = 2.0 + first.facts["steps"] * first.facts["pace_s"] * 1.6
    count = rng.choices((0, 1, 2, 3, 5), (6, 30, 30, 24, 10))[0]
    plan.faults = [_fault(rng, plan.hosts, len(first.hosts), within_s) for _ in range(count)]
    scenario = rng.random()
    if scenario < 0.3:
        plan.faults.insert(0, _silence(rng, plan))
    elif scenario < 0.5:
        plan.faults += _resume(rng, first)
    for job in (*plan.jobs, plan.audit):
        more_s = sum(one.length_s for one in plan.faults)
        job.facts["limits_s"] = {call: limit_s + more_s for call, limit_s in job.facts["limits_s"].items()}
    return plan


def _fault(rng: random.Random, hosts: int, size: int, within_s: float) -> StoreFault:
    kind = rng.choice(KINDS)
    place: dict[str, Any] = {"host": rng.randrange(hosts), "rank": rng.choice((0, rng.randrange(size)))}
    if kind not in _ANYWHERE and rng.random() < (0.75 if kind in _AT_REQUESTS else 0.4):
        phase = rng.choice(PHASES)
        place |= {"phase": phase, "nth": rng.randint(1, 4 if phase in ("prepare", "commit", "write", "close") else 12)}
    length_s, chance = rng.choice((0.5, 3.0, 12.0, 30.0)), rng.choice((0.1, 0.5, 1.0))
    return StoreFault(kind=kind, at=rng.uniform(0.1, within_s), length_s=length_s, chance=chance, **place)


def _silence(rng: random.Random, plan: Any) -> StoreFault:
    """The owner stands still, or is cut off from the store, in a commit or beside one, for longer than its lease."""
    where: dict[str, Any] = {"host": plan.jobs[0].hosts[0], "rank": 0, "job": "job"}
    where |= {"phase": rng.choice(("commit", "commit", "write", "prepare", "retain")), "nth": rng.randint(1, 6)}
    kind = rng.choice(("pause", "pause", "store down"))
    if len(plan.jobs) < 2:
        plan.jobs.append(replace(plan.jobs[0], name="rival", hosts=[plan.hosts - 1]))
    rival = plan.jobs[1]
    rival.at, rival.facts = 1.0, {**rival.facts, "base": 10_000_000, "attempts": 20}
    rival.facts["namespace"] = 4026531838  # it cannot see the owner's process
    for job in plan.jobs:
        job.facts["config"]["lease_s"] = 4.0
        job.facts["per_rank"] = False
    return StoreFault(kind=kind, at=0.0, length_s=rng.choice((12.0, 30.0)), chance=1.0, **where)


def _resume(rng: random.Random, first: Any) -> list[StoreFault]:
    """A job dies, and an answer is wrong, once, while it starts again."""
    where: dict[str, Any] = {"host": first.hosts[0], "rank": 0}
    phase = rng.choice(("train", "retain", "commit", "close"))
    kill = StoreFault(kind="kill all", at=0.0, length_s=1.0, chance=1.0, phase=phase, nth=rng.randint(1, 8), **where)
    phase = rng.choice(("resume", "resume", "sweep", "lock"))
    wrong = StoreFault(
        kind=rng.choice(("wrong answer", "wrong answer", "wrong list")),
        at=0.0,
        length_s=1.0,
        chance=1.0,
        phase=phase,
        nth=rng.randint(1, 12),
        **where,
    )
    return [kill, wrong]
