"""Histories in which each host has a directory on its own disk behind one far directory (``mirror.near: per-host``).

Only the histories of a range of seeds are so: all others stay as they are.
"""

from __future__ import annotations

import json
import random
from typing import Any

from sim.disk import Change, Node
from sim.oracle import MANIFEST, Commit, Oracle, _problem
from sim.strikes import Fault
from sim.world import Proc, hub

FIRST, LAST = 8_000_000, 9_000_000
NEAR, FAR = "/data/run", "/far/run"
_KINDS = (
    "kill", "kill all", "kill all", "power", "power all", "power all", "pause", "cut", "delays", "answer lost", "eio",
    "lost disk", "lost disk", "flip", "flip", "far silent", "far fails",
)  # fmt: skip
_PHASES = (
    "prepare",
    "commit",
    "commit",
    "retain",
    "sweep",
    "repair",
    "resume",
    "open",
    "save",
    "close",
    "mirror",
    "train",
)
_MORE_S = {"open": 60.0, "resume": 160.0, "save": 60.0, "wait": 60.0, "close": 160.0}
"""Hosts are asked one thing after the other; a resume may fetch, and a close waits for copies as long as they get on."""


def has_hosts(seed: int) -> bool:
    """Whether each host has a disk of its own in this history."""
    return FIRST <= seed < LAST


def on_hosts(plan: Any, seed: int) -> Any:
    """The same plan with one job whose ranks lie on two or three hosts of four, each with a disk of its own."""
    rng = random.Random(f"hosts {seed}")
    plan.hosts, plan.local, plan.stale_s, plan.objects, plan.mirror = 4, False, 0.0, False, {}
    del plan.jobs[1:]
    job, size = plan.jobs[0], rng.choice((2, 2, 3, 4))
    usual = _layout(rng, size, [0, 1] if size == 2 or rng.random() < 0.6 else [0, 1, 2])
    others = rng.random() < 0.5
    layouts = [usual if not others or rng.random() < 0.5 else _other(rng, size) for _ in range(12)]
    mirror: dict[str, Any] = {"url": FAR, "near": "per-host", "required": rng.random() < 0.2}
    if rng.random() < 0.6:
        mirror["keep_last"] = rng.randint(1, 2)
    plan.keep_last = rng.randint(1, 2)
    within_s = 2.0 + job.facts["steps"] * job.facts["pace_s"] * 1.6
    plan.faults = [_fault(rng, size, within_s) for _ in range(rng.choice((1, 2, 3, 4, 6)))]
    longer_s = sum(one.length_s for one in plan.faults)
    for one in (job, plan.audit):
        config = {**one.facts["config"], "mirror": mirror, "retention": {"keep_last": plan.keep_last}}
        config.pop("save_on_signals", None)
        config.pop("on_busy", None)
        limits_s = {call: s + longer_s + _MORE_S.get(call, 0.0) for call, s in one.facts["limits_s"].items()}
        one.facts = {**one.facts, "config": config, "limits_s": limits_s, "signals": False, "per_rank": True}
        one.facts |= {"layouts": layouts, "attempts": 12}
        one.hosts = usual
    last = usual if rng.random() < 0.7 else _other(rng, size)
    plan.audit.facts |= {"layouts": [last], "attempts": 1}
    plan.audit.hosts = last
    return plan


def _layout(rng: random.Random, size: int, hosts: list[int]) -> list[int]:
    """The host of each rank; each host has one at least."""
    hosts = hosts[:size]
    placed = [*hosts, *(rng.choice(hosts) for _ in range(size - len(hosts)))]
    return sorted(placed) if rng.random() < 0.7 else rng.sample(placed, len(placed))


def _other(rng: random.Random, size: int) -> list[int]:
    """One host replaced, one more or one less, or other ranks on each."""
    return _layout(rng, size, rng.choice(([0, 1], [0, 1, 2], [0, 2], [1, 2], [0], [1, 0], [3, 1])))


def _fault(rng: random.Random, size: int, within_s: float) -> HostFault:
    kind = rng.choice(_KINDS)
    place: dict[str, Any] = {"host": rng.randrange(3), "rank": rng.choice((0, rng.randrange(size)))}
    if rng.random() < 0.7 and kind not in ("delays", "answer lost"):
        place |= {"phase": rng.choice(_PHASES), "nth": rng.randint(1, 40)}
    length_s, chance = rng.choice((0.5, 3.0, 12.0, 30.0)), rng.choice((0.1, 0.5, 1.0))
    return HostFault(kind=kind, at=rng.uniform(0.5, 5.0 + within_s), length_s=length_s, chance=chance, **place)


class HostFault(Fault):
    """See ``Fault``: also what can happen to disks of hosts, and to the far end."""

    def _power_all(self, history: Any, host: Any, proc: Proc | None) -> None:
        for one in history.world.hosts:
            self._power(history, one, None)

    def _lost_disk(self, history: Any, host: Any, proc: Proc | None) -> None:
        """Where nothing is far yet, the only one would be gone with it."""
        world, oracle = history.world, history.oracle
        if not history.mirror.newest_told():
            return
        for one in [one for one in host.procs if one.alive and "rank" in one.facts]:
            one.kill("its disk is lost")
        world.disk.forget(f"/near/{host.name}/run")
        oracle.harmed |= {one.op_id for one in oracle.commits.values() if host.number in oracle.hosts_of[one.op_id]}
        world.log("lost", host.name)

    def _flip(self, history: Any, host: Any, proc: Proc | None) -> None:
        """One bit of a file of the newest part on this disk."""
        world, oracle = history.world, history.oracle
        names = sorted(name for name in oracle.root_of(host.name).children if name.startswith("step-"))
        if not history.mirror.newest_told() or not names:
            return
        node = oracle.root_of(host.name).children[names[-1]]
        files = [one for path, one in sorted(world.disk.tree(node).items()) if path.endswith(".safetensors")]
        if not files:
            return
        file = world.rng.choice(files)
        at = world.rng.randrange(len(file.data))
        world.disk.change("write", None, file, at=at, data=bytes([file.data[at] ^ 1]))
        world.disk.sync(file)
        oracle.harmed.add(_facts_of(node).get("op_id", ""))
        world.log("flipped", host.name, names[-1])

    def _far_silent(self, history: Any, host: Any, proc: Proc | None) -> None:
        world = history.world
        world.mounts.far_silent = world.now + self.length_s
        history.mirror.troubles.append((world.now, world.now + self.length_s))

    def _far_fails(self, history: Any, host: Any, proc: Proc | None) -> None:
        world = history.world
        world.mounts.far_failing = world.now + self.length_s
        history.mirror.troubles.append((world.now, world.now + self.length_s))


def set_up(world: Any, plan: Any) -> tuple[HostOracle, FarOracle]:
    """The disks, and the rules that are held against what is on them."""
    world.own_disks = True
    world.disk.make_folder("/far")
    for host in world.hosts:
        world.disk.make_folder(f"/near/{host.name}", host.number)
    world.disk.watchers.clear()
    near = HostOracle(world, NEAR, plan.keep_last)
    near.far = FarOracle(world, near)
    return near, near.far


def _facts_of(node: Node) -> dict[str, Any]:
    manifest = node.children.get(MANIFEST)
    try:
        return json.loads(bytes(manifest.data)) if manifest is not None else {}
    except ValueError:
        return {}


class HostOracle(Oracle):
    """The rules of directories on several hosts.

    Attributes:
        hosts_of: where the ranks of each commit lay.
        harmed: commits of which a part is lost or damaged.
    """

    far: FarOracle

    def __init__(self, world: Any, directory: str, keep_last: int | None) -> None:
        super().__init__(world, directory, keep_last)
        self.hosts_of: dict[str, set[int]] = {}
        self.harmed: set[str] = set()
        self._from_far: dict[Any, float] = {}

    def root_of(self, host: str) -> Node:
        """The directory of a host."""
        return self._at(f"/near/{host}/run")

    def _changed(self, change: Change) -> None:
        if hub.task is None or change.kind not in ("rename", "exchange"):
            return
        proc = hub.task.proc
        root = self.root_of(proc.host.name)
        if change.other is root and change.other_name.startswith("step-"):
            self._named(proc, root.children[change.other_name])
        if change.node is root and change.name.startswith("step-") and change.kind == "rename":
            self._unnamed(proc, change.other.children[change.other_name], change.other)
        if change.other is root and change.kind == "exchange":
            self._unnamed(proc, change.node.children[change.name], change.node)

    def _named(self, proc: Proc, node: Node) -> None:
        facts = _facts_of(node)
        if not facts:
            self.world.violate("torn", f"a part got its name without a manifest, by {proc.name}")
            return
        op_id = facts["op_id"]
        if op_id in self.commits:
            one = self.commits[op_id]
            if proc.facts["rank"] == 0:
                one.node, one.sequence, one.undone, one.deleted = node, facts["sequence"], False, False
            return
        if proc.facts["rank"]:
            self.world.violate("named too early", f"{facts['name']} by {proc.name}: rank 0 has not committed it")
        self.commits[op_id] = Commit(facts["name"], facts["sequence"], op_id, proc, self.world.now, node)
        self.hosts_of[op_id] = set(proc.facts["attempt"].hosts)
        self.count("commits")
        self.world.log("committed", proc.name, facts["name"], facts["sequence"])

    def _unnamed(self, proc: Proc, node: Node, to: Node) -> None:
        """A part lost its name."""
        one = self.commits.get(_facts_of(node).get("op_id", ""))
        hidden = f"/near/{proc.host.name}/run/.safe_ckpt"
        if one is None or to in self._at(f"{hidden}/quarantine").children.values():
            return
        if to in self._at(f"{hidden}/pending").children.values():
            one.undone |= not one.announced and one.node is node
            return
        if self.is_aside(hidden, to):
            return
        if one.node is node:
            one.deleted = True
        later = [other for other in self.commits.values() if other.at > one.at and not other.undone]
        if one.announced and one.op_id not in self.harmed and not later:
            self.world.violate("deleted too early", f"{one.name} on {proc.host.name}: nothing newer is committed")

    def is_aside(self, hidden: str, to: Node) -> bool:
        """Whether this folder of the trash is where a save that is under way sets aside what it replaces."""
        names = [name for name, node in self._at(f"{hidden}/trash").children.items() if node is to]
        return any(name in self._at(f"{hidden}/pending").children for name in names)

    def _near_floor(self, hosts: list[int]) -> int:
        """The newest that was told, where all its parts are sound and on these hosts; 0 where they are not."""
        told = [one for one in self.commits.values() if one.announced]
        newest = max(told, key=lambda one: one.at, default=None)
        if newest is None:
            return 0
        later = [one for one in self.commits.values() if one.at >= newest.at]
        whole = all(one.op_id not in self.harmed and self.hosts_of[one.op_id] <= set(hosts) for one in later)
        return newest.sequence if whole and hosts[0] in self.hosts_of[newest.op_id] else 0

    def is_anywhere(self, hosts: list[int]) -> bool:
        """Whether a job on these hosts finds something that was told: else it may say that nothing is usable."""
        return bool(self._near_floor(hosts) or self.far.newest_told())

    def newest_announced(self) -> int:
        """See ``Oracle``: for the process that runs, which is about to resume."""
        proc = hub.task.proc
        floor = self._near_floor(proc.facts["attempt"].hosts)
        if not floor:
            self._from_far[proc] = self.world.now
        return floor or self.far.newest_told()

    def resumed(self, attempt: Any, rank: int, floor: int, info: Any, values: Any) -> None:
        """See ``Oracle``. A far end that gave no answer is not looked at, if something is near."""
        # A disk may have been damaged meanwhile.
        floor = min(floor, self._near_floor(attempt.hosts) or self.far.newest_told())
        since = self._from_far.get(hub.task.proc)
        spans = [*self.far.troubles, *(one for host in attempt.hosts for one in self._troubles(host))]
        if (
            since is not None
            and info is not None
            and any(end > since and begin < self.world.now for begin, end in spans)
        ):
            floor = 0
        super().resumed(attempt, rank, floor, info, values)

    def _judge_disk(self) -> None:
        pass  # the last job's resume says it


class FarOracle:
    """The rules of the far directory.

    Args:
        world: whose violations it records.
        near: the rules of the hosts.

    Attributes:
        told: rank 0s that said that something is not far.
        troubles: when it failed or was silent.
    """

    def __init__(self, world: Any, near: HostOracle) -> None:
        self.world, self._near = world, near
        self.counts: dict[str, int] = {}
        self.told: set[Any] = set()
        self.troubles: list[tuple[float, float]] = []
        self.commits: dict[str, tuple[Node, float, int]] = {}
        self._announced: set[str] = set()
        world.disk.watchers.append(self._changed)

    def newest_told(self) -> int:
        """The highest sequence of which an event said that it is far."""
        return max((self.commits[one][2] for one in self._announced), default=0)

    def announced(self, proc: Proc, event: Any) -> None:
        """An event of a rank 0: something is far, or is not."""
        if type(event).__name__ != "Mirrored":
            return
        if event.error:
            self.told.add(proc)
            return
        self.told.discard(proc)
        self.counts["mirrored"] = self.counts.get("mirrored", 0) + 1
        node = self._near._at(event.url)
        op_id = _facts_of(node).get("op_id", "")
        if op_id not in self.commits or _problem(node) is not None:
            self.world.violate("announced", f"{event.url} was announced far: {_problem(node)}")
            return
        self._announced.add(op_id)

    def closed(self, proc: Proc) -> None:
        """A rank 0 has closed without an error: its newest checkpoint is far, or it was said that it is not."""
        own = [one for one in self._near.commits.values() if one.who is proc and one.announced]
        newest = max(own, key=lambda one: one.at, default=None)
        if newest is not None and proc not in self.told and newest.op_id not in self.commits:
            self.world.violate("not mirrored", f"{newest.name} of {proc.name}, and nobody said so")

    def _changed(self, change: Change) -> None:
        if hub.task is None or change.kind not in ("rename", "exchange"):
            return
        root = self._near._at(FAR)
        if change.other is root and change.other_name.startswith("step-"):
            node = root.children[change.other_name]
            facts = _facts_of(node)
            if facts.get("op_id") not in self._near.commits:
                self.world.violate("far too early", f"{change.other_name} is no checkpoint of the hosts")
                return
            if (problem := _problem(node)) is not None:
                self.world.violate("torn", f"{change.other_name}, far, {problem}")
            self.commits[facts["op_id"]] = (node, self.world.now, facts["sequence"])
        if change.node is root and change.name.startswith("step-") and change.kind == "rename":
            if self._near.is_aside(f"{FAR}/.safe_ckpt", change.other):
                return
            self._gone(change.other.children[change.other_name])

    def _gone(self, node: Node) -> None:
        op_id = next((op_id for op_id, (there, _, _) in self.commits.items() if there is node), "")
        newer = [one for one in self.commits.values() if op_id and one[2] > self.commits[op_id][2]]
        if op_id in self._announced and not newer:
            self.world.violate("deleted too early", f"{_facts_of(node)['name']}: nothing newer is far")

    def judge_end(self) -> None:
        """What is far is whole."""
        for name, node in self._near._at(FAR).children.items():
            if name.startswith("step-") and (problem := _problem(node)) is not None:
                self.world.violate("torn", f"{name}, far, {problem}")

    def left_behind(self) -> list[str]:
        """See ``Oracle``."""
        return []
