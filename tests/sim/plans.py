"""What a seed decides before a history begins: hosts, disk, jobs and their settings, and the list of faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from sim.hosts import has_hosts, on_hosts
from sim.mirror_plans import has_mirror, mirrored, with_writer_faults
from sim.object_plans import in_a_store, moved
from sim.readers import has_readers, with_readers
from sim.strikes import AT_PHASES, KINDS, PHASES, Fault

_TIMEOUTS = {"lengthy_s": 40.0, "barrier_s": 20.0, "writer_stall_s": 8.0, "fsync_stall_s": 10.0}
_TIMEOUTS |= {"peer_stall_s": 6.0, "shutdown_s": 10.0}
_SLACK_S = 2 * _TIMEOUTS["peer_stall_s"]
"""A rank that is lost is noticed so much later, and rank 0's last word is waited for."""


def _limits_s(lease_s: float, faults: list[Fault]) -> dict[str, float]:
    """How long each call may take: what the settings say, and the faults, which may stop a disk or a clock, on top."""
    barrier_s, lengthy_s = _TIMEOUTS["barrier_s"], _TIMEOUTS["lengthy_s"]
    calls = {
        "open": 2 * barrier_s + 2 * lease_s,  # the ranks meet, the lock is awaited, and they meet again
        "resume": 3 * barrier_s,  # what has half of its files is waited for, at the list and again by itself
        "save": barrier_s + lengthy_s,  # the one before it may be under way
        "wait": lengthy_s,
        "close": lengthy_s + _TIMEOUTS["shutdown_s"],
    }
    return {call: limit_s + _SLACK_S + sum(one.length_s for one in faults) for call, limit_s in calls.items()}


@dataclass
class JobPlan:
    """A job as it is to be started."""

    name: str
    hosts: list[int]
    at: float
    facts: dict[str, Any]


@dataclass
class Plan:
    """See the module."""

    hosts: int
    local: bool
    exchanges: bool
    links: bool
    stale_s: float
    slow: float
    keep_last: int | None
    jobs: list[JobPlan]
    audit: JobPlan
    horizon_s: float
    faults: list[Fault] = field(default_factory=list)
    objects: bool = False
    mirror: dict[str, Any] = field(default_factory=dict)


def plan_of(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"plan {seed}")
    size = rng.choices((1, 2, 3, 4, 8, 16), (48, 26, 9, 14.1, 1.5, 0.4))[0]
    hosts = 1 if size == 1 and rng.random() < 0.6 else rng.randint(1, min(4, max(2, size)))
    local = hosts == 1 and rng.random() < 0.8
    steps = rng.randint(3, 7) if size <= 4 else rng.randint(2, 3)
    config = _config(rng)
    keep = config.get("retention", {}).get("keep_last")
    wait = rng.choice((0.0, 0.5, 1.0))
    pace_s = rng.choice((0.05, 0.5, 3.0, 6.0))
    facts = {
        "steps": steps,
        "config": config,
        "wait": wait,
        "pace_s": pace_s,
        "signals": bool(config.get("save_on_signals")),
    }
    if rng.random() < 0.2:
        facts["namespace"] = 4026531837
    placed = sorted(rng.randrange(hosts) for _ in range(size))
    faults = _faults(rng, hosts, size, 2.0 + steps * pace_s * 1.6, local=local)
    facts["limits_s"] = _limits_s(config["lease_s"], faults)
    facts["again"] = rng.choice((0.0, 0.0, 0.3))
    rivals = rng.random() < 0.35
    facts["per_rank"] = not rivals
    jobs = [JobPlan("job", placed, 0.0, {**facts, "base": 0})]
    if rivals:
        others = sorted(rng.randrange(hosts) for _ in range(rng.choice((1, 1, 2))))
        rival = {**facts, "base": 10_000_000, "steps": steps + rng.randint(0, 3), "attempts": 4}
        rival["namespace"] = rng.choice((4026531836, 4026531837, 4026531838))
        jobs.append(JobPlan("rival", others, rng.uniform(0.0, 3.0 + steps * pace_s), rival))
    scenario = rng.choices(list(_SCENARIOS), [share for share, _ in _SCENARIOS.values()])[0]
    exchanges = rng.random() < 0.7
    if scenario != "plain" and _fits(scenario, size, hosts, local=local):
        rivals_facts = {**facts, "per_rank": False, "base": 10_000_000, "attempts": 4, "namespace": 4026531838}
        _SCENARIOS[scenario][1](rng, facts, jobs, faults, rivals_facts)
        exchanges &= scenario not in ("replace", "aside")
        for job in jobs:
            job.facts["limits_s"] = _limits_s(config["lease_s"], faults)
    audited = {**facts, "base": 90_000_000, "steps": 100, "attempts": 1, "signals": False, "once": True, "wait": 1.0}
    audited["config"] = {key: value for key, value in config.items() if key != "save_on_signals"}
    plan = Plan(
        hosts=hosts,
        local=local,
        exchanges=exchanges,
        links=rng.random() < 0.85,
        stale_s=0.0 if local else rng.choice((0.0, 0.3, 3.0)),
        slow=rng.choice((0.0, 0.0, 0.02)),
        keep_last=keep if config.get("retention") else None,
        jobs=jobs,
        audit=JobPlan("audit", [rng.randrange(hosts)], 0.0, audited),
        horizon_s=rng.choice((60.0, 90.0, 120.0)),
        faults=faults,
    )
    if has_hosts(seed):
        return on_hosts(plan, seed)
    if has_readers(seed):
        return with_readers(plan)
    plan = moved(plan, seed) if in_a_store(seed) else mirrored(plan, seed) if has_mirror(seed) else plan
    return with_writer_faults(plan, seed)


def _takeover(
    rng: random.Random, facts: dict[str, Any], jobs: list[JobPlan], faults: list[Fault], rival: dict[str, Any]
) -> None:
    """A job stands still for longer than its lease; another one comes meanwhile; then the first one goes on."""
    facts["config"]["lease_s"] = 4.0
    facts["config"]["on_failure"] = rng.choice(("warn", "raise"))
    at = 0.5 + rng.random() * facts["pace_s"] * 3
    kind = rng.choice(("pause", "pause", "down"))
    where: dict[str, Any] = {"host": jobs[0].hosts[0], "rank": 0, "job": "job"}
    if rng.random() < 0.7:
        where |= {
            "phase": rng.choice(("train", "save", "write", "prepare", "commit", "retain")),
            "nth": rng.randint(1, 30),
        }
    faults.insert(0, Fault(kind=kind, at=at, length_s=rng.choice((12.0, 30.0)), chance=1.0, **where))
    del jobs[1:]
    jobs[0].facts |= {"per_rank": False, "steps": facts["steps"] + 2}
    jobs.append(JobPlan("rival", [rng.choice((0, jobs[0].hosts[-1]))], at + rng.uniform(0.5, 6.0), rival))


def _outage(
    rng: random.Random, facts: dict[str, Any], jobs: list[JobPlan], faults: list[Fault], rival: dict[str, Any]
) -> None:
    """The storage stands still for all while another job waits for a sign of life."""
    facts["config"]["lease_s"] = rng.choice((4.0, 10.0))
    jobs[0].facts |= {"per_rank": False, "pace_s": 3.0, "steps": 8}
    del jobs[1:]
    jobs.append(JobPlan("rival", [jobs[0].hosts[-1]], 2.0 + 6.0 * rng.random(), rival))
    where: dict[str, Any] = {"host": 0, "rank": 0, "phase": "lock", "nth": rng.randint(2, 14), "job": "rival"}
    faults[:] = [Fault(kind="outage", at=0.0, length_s=rng.choice((12.0, 30.0)), chance=1.0, **where)]


def _replace(
    rng: random.Random, facts: dict[str, Any], jobs: list[JobPlan], faults: list[Fault], rival: dict[str, Any]
) -> None:
    """Steps are saved twice where two names cannot be swapped, and somebody dies in a commit."""
    del rival
    for job in jobs:
        job.facts["again"] = 1.0
    kind = rng.choice(("kill", "power", "kill all", "eio"))
    where: dict[str, Any] = {"host": jobs[0].hosts[0], "rank": 0, "phase": "commit", "nth": rng.randint(3, 60)}
    faults[:] = [Fault(kind=kind, at=0.0, length_s=3.0, chance=0.5, **where), *faults[:1]]


def _resume(
    rng: random.Random, facts: dict[str, Any], jobs: list[JobPlan], faults: list[Fault], rival: dict[str, Any]
) -> None:
    """A job dies, and a read is wrong, once, while it resumes."""
    del rival, facts
    kind = rng.choice(("kill all", "power"))
    first: dict[str, Any] = {"host": jobs[0].hosts[0], "rank": 0, "phase": rng.choice(("train", "save", "retain"))}
    second: dict[str, Any] = {"host": jobs[0].hosts[0], "rank": 0, "phase": "resume", "nth": rng.randint(4, 40)}
    first["phase"] = "close" if rng.random() < 0.3 else "retain"
    faults[:] = [
        Fault(kind=kind, at=0.0, length_s=1.0, chance=1.0, nth=rng.randint(1, 20), **first),
        Fault(kind="wrong read", at=0.0, length_s=1.0, chance=1.0, **second),
    ]


def _verdict(
    rng: random.Random, facts: dict[str, Any], jobs: list[JobPlan], faults: list[Fault], rival: dict[str, Any]
) -> None:
    """Rank 0 commits, and the others, on another host, do not hear of it."""
    del rival
    facts["per_rank"] = True
    jobs[0].facts["per_rank"] = True
    jobs[0].hosts = [0, *(1 for _ in jobs[0].hosts[1:])]
    del jobs[1:]
    kind = rng.choice(("cut", "cut", "kill"))
    where: dict[str, Any] = {"host": 0, "rank": 0, "phase": "commit", "nth": rng.randint(1, 40)}
    faults[:] = [Fault(kind=kind, at=0.0, length_s=rng.choice((12.0, 30.0)), chance=1.0, **where), *faults[:1]]


def _aside(
    rng: random.Random, facts: dict[str, Any], jobs: list[JobPlan], faults: list[Fault], rival: dict[str, Any]
) -> None:
    """Steps are saved twice where two names cannot be swapped, and the answers to renames are lost."""
    del rival, facts
    for job in jobs:
        job.facts["again"] = 1.0
    where: dict[str, Any] = {"host": jobs[0].hosts[0], "rank": 0, "phase": "commit", "nth": 5 * rng.randint(0, 8) + 3}
    faults[:] = [Fault(kind="eio", at=0.0, length_s=rng.choice((0.5, 3.0)), chance=0.7, **where)]


_SCENARIOS = {
    "plain": (49, _resume), "takeover": (18, _takeover), "outage": (9, _outage), "replace": (9, _replace),
    "resume": (9, _resume), "verdict": (3, _verdict), "aside": (3, _aside),
}  # fmt: skip
"""How often, and what makes it of a plan; "plain" is left as it is."""


def _fits(scenario: str, size: int, hosts: int, *, local: bool) -> bool:
    if scenario == "verdict":
        return size > 1 and hosts > 1
    return not (local and scenario in ("outage", "aside"))


def _config(rng: random.Random) -> dict[str, Any]:
    config: dict[str, Any] = {"timeouts": dict(_TIMEOUTS), "lease_s": rng.choice((4.0, 10.0, 20.0))}
    if rng.random() < 0.8:
        config["retention"] = {"keep_last": rng.randint(1, 3)}
    if rng.random() < 0.4:
        config["max_in_flight"] = rng.randint(2, 3)
    if rng.random() < 0.2:
        config["on_busy"] = "skip"
    if rng.random() < 0.4:
        config["on_failure"] = "warn"
    if rng.random() < 0.25:
        config["unchanged"] = {"share": False}
    if rng.random() < 0.15:
        config["writer"] = {"inline_bytes": 0}
    if rng.random() < 0.3:
        config["save_on_signals"] = ("SIGTERM",)
        config["signal_grace_s"] = 25.0
    config["record_events"] = rng.random() < 0.3
    return config


def _faults(rng: random.Random, hosts: int, size: int, within_s: float, *, local: bool) -> list[Fault]:
    count = rng.choices((0, 1, 2, 3, 5), (6, 34, 30, 20, 10))[0]
    kinds = [kind for kind, only in KINDS.items() if only != "shared" or not local]
    found = []
    for _ in range(count):
        kind = rng.choice(kinds)
        place: dict[str, Any] = {"host": rng.randrange(hosts), "rank": rng.randrange(size)}
        if rng.random() < 0.5:
            place["rank"] = 0
        length_s = rng.choice((0.5, 3.0, 12.0, 30.0))
        if rng.random() < 0.65 and kind in AT_PHASES:
            phase = rng.choice(PHASES)
            place |= {"phase": phase, "nth": rng.randint(1, 12 if phase in ("prepare", "retain", "lock") else 40)}
        found.append(
            Fault(
                kind=kind, at=rng.uniform(0.1, within_s), length_s=length_s, chance=rng.choice((0.1, 0.5, 1.0)), **place
            )
        )
    return found
