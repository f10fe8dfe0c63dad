"""Histories in which each checkpoint goes to an object store as well, and those in which a process of its own writes."""

from __future__ import annotations

import random
from typing import Any

from sim.object_plans import KINDS as STORE_KINDS
from sim.object_plans import StoreFault
from sim.strikes import Fault
from sim.world import Proc

URL = "s3://bucket/mirror"
_OF_STORES = tuple(
    kind for kind in STORE_KINDS if "request" in kind or "answer" in kind or "store" in kind or kind == "refused"
)
_MORE_S = {"close": 60.0, "resume": 100.0}
"""A close waits for uploads as long as they get on, and a resume may fetch."""


class MirrorFault(StoreFault):
    """See ``Fault``: also that all of a disk is lost."""

    def _new_disk(self, history: Any, host: Any, proc: Proc | None) -> None:
        world = history.world
        for one in [one for host in world.hosts for one in host.procs if "rank" in one.facts]:
            one.kill("new disk")
        world.disk.forget(history.directory)
        for host in world.hosts:
            world.mounts.forget_all(host)
        history.oracle.wiped(history.mirror.newest())


def has_mirror(seed: int) -> bool:
    """Whether the directory of this history has a mirror: of one in twelve."""
    return seed % 12 == 1


def mirrored(plan: Any, seed: int) -> Any:
    """The same plan, with a mirror, and with faults of it."""
    rng = random.Random(f"mirror {seed}")
    mirror: dict[str, Any] = {"url": URL, "required": rng.random() < 0.3, "follow": rng.random() < 0.2}
    if rng.random() < 0.4:
        mirror["keep_last"] = rng.randint(1, 3)
    plan.mirror = mirror
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        plan.faults.append(_of_the_store(rng, plan.hosts, plan.jobs[0].facts["steps"] * plan.jobs[0].facts["pace_s"]))
    if rng.random() < 0.4:
        where: dict[str, Any] = {"host": plan.jobs[0].hosts[0], "rank": 0}
        if rng.random() < 0.6:
            phase = rng.choice(("train", "save", "prepare", "commit", "retain", "resume", "close", "mirror"))
            where |= {"phase": phase, "nth": rng.randint(1, 30)}
        plan.faults.append(MirrorFault(kind="new disk", at=rng.uniform(1.0, 40.0), length_s=0.0, chance=1.0, **where))
        if rng.random() < 0.5:
            where = {"host": plan.jobs[0].hosts[0], "rank": 0, "phase": "resume", "nth": rng.randint(2, 24)}
            plan.faults.append(MirrorFault(kind="wrong answer", at=0.0, length_s=0.0, chance=1.0, **where))
    longer_s = sum(one.length_s for one in plan.faults[-4:])
    for job in (*plan.jobs, plan.audit):
        limits_s = {call: s + longer_s + _MORE_S.get(call, 0.0) for call, s in job.facts["limits_s"].items()}
        config = {**job.facts["config"], "mirror": mirror, "storage": {"request_timeout_s": 5.0}}
        job.facts = {**job.facts, "config": config, "limits_s": limits_s}
    return plan


def _of_the_store(rng: random.Random, hosts: int, within_s: float) -> StoreFault:
    place: dict[str, Any] = {"host": rng.randrange(hosts), "rank": 0}
    if rng.random() < 0.7:
        place |= {"phase": rng.choice(("mirror", "mirror", "resume", "writer")), "nth": rng.randint(1, 25)}
    length_s, chance = rng.choice((0.5, 3.0, 12.0, 30.0)), rng.choice((0.1, 0.5, 1.0))
    kind = rng.choice((*_OF_STORES, "kill", "pause"))
    return MirrorFault(kind=kind, at=rng.uniform(0.1, 3.0 + within_s), length_s=length_s, chance=chance, **place)


def with_writer_faults(plan: Any, seed: int) -> Any:
    """The same plan, with faults of the process that writes, where there is one."""
    if not plan.mirror and "writer" not in plan.jobs[0].facts["config"]:
        return plan
    rng = random.Random(f"writer {seed}")
    more = [_of_the_writer(rng, plan) for _ in range(rng.choice((0, 1, 1, 2, 4)))]
    plan.faults += more
    for job in (*plan.jobs, plan.audit):
        longer_s = sum(one.length_s for one in more) + 3 * job.facts["config"]["timeouts"]["writer_stall_s"]
        job.facts = {**job.facts, "limits_s": {call: s + longer_s for call, s in job.facts["limits_s"].items()}}
    return plan


def _of_the_writer(rng: random.Random, plan: Any) -> Fault:
    kind = rng.choice(("writer killed", "writer killed", "writer stopped", "power", "eio", "full", "down"))
    if plan.local and kind == "down":
        kind = "writer killed"
    size = len(plan.jobs[0].hosts)
    place: dict[str, Any] = {"host": rng.randrange(plan.hosts), "rank": rng.choice((0, rng.randrange(size)))}
    if rng.random() < 0.8:
        place |= {"phase": "writer", "nth": rng.randint(1, 25)}
    length_s = rng.choice((0.5, 3.0, 12.0, 30.0))
    return MirrorFault(kind=kind, at=rng.uniform(0.5, 20.0), length_s=length_s, chance=rng.choice((0.5, 1.0)), **place)
