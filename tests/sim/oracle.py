"""What must never happen. A register of what was announced durable, and the rules that are held against it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import xxhash

from sim.disk import Change, Node
from sim.world import hub

MANIFEST = "manifest.json"


@dataclass
class Commit:
    """A checkpoint that got its name, as the disk saw it."""

    name: str
    sequence: int
    op_id: str
    who: Any
    at: float
    node: Any
    announced: bool = False
    undone: bool = False
    deleted: bool = False


@dataclass
class Save:
    """A save that a job began, and what each rank was told of it."""

    token: int
    step: int
    size: int
    outcomes: dict[int, str] = field(default_factory=dict)
    op_id: str = ""


class Oracle:
    """See the module.

    Args:
        world: whose violations it records.
        directory: where the checkpoints are.
        keep_last: what retention keeps at least.
    """

    def __init__(self, world: Any, directory: str, keep_last: int | None) -> None:
        self.world, self.directory, self.keep_last = world, directory, keep_last
        self.saves: dict[tuple[Any, int], Save] = {}
        self.tokens: dict[int, tuple[Any, int]] = {}
        self.commits: dict[str, Commit] = {}
        self.owners: list[tuple[float, Any, float]] = []
        self.leases: dict[str, Any] = {}
        # By whom and when the name was taken away: it may be another job that takes it after that one failed.
        self.taken_away: tuple[Any, float] | None = None
        self.given_back: dict[Any, float] = {}
        self.resumed_to: dict[tuple[Any, int], Any] = {}
        self.counts: dict[str, int] = {}
        self.root: Node | None = None
        self.open: set[Any] = set()
        self.least = 0
        self.token = ""
        self.leaving: Callable[[Commit], None] = lambda _: None
        world.disk.watchers.append(self._changed)

    def count(self, what: str) -> None:
        """Something happened that is counted."""
        self.counts[what] = self.counts.get(what, 0) + 1

    def _locked(self, node: Node) -> None:
        """A lock file got its name: whose it is, holds the directory from now on."""
        try:
            lease = json.loads(bytes(node.data))
        except ValueError:
            return
        if lease["token"] != self.token:  # one that thought it had not got it may come with its token again
            self.token = lease["token"]
            host = next(host for host in self.world.hosts if host.name == lease["host"])
            proc = next(proc for proc in host.procs if proc.pid == lease["pid"])
            self.leases[lease["token"]] = proc
            if self.owners:
                self._refuse_robbery(self.owners[-1], *(self.taken_away or (proc, self.world.now)))
            self.owners.append((self.world.now, proc, lease["lease_s"]))
            self.world.log("owns", proc.name)
        self.taken_away = None

    def _refuse_robbery(self, owner: tuple[float, Any, float], taker: Any, when: float) -> None:
        """Nobody takes the directory from a job that lives and could show itself whenever the taker could look."""
        since, holder, lease_s = owner
        if not holder.alive or holder is taker or self.gave_back_at(holder) >= since or not self._holds(holder):
            return
        mine, yours = (self._hindered(one, when - 2 * lease_s, when) for one in (holder, taker))
        mine += [span for span in self._full() if span[1] > when - 2 * lease_s and span[0] < when]
        if all(any(start >= a and end <= b for a, b in yours) for start, end in mine):
            self.world.violate("robbed", f"{taker.name} took the directory from {holder.name}, which was well")

    def _holds(self, proc: Any) -> bool:
        """Whether a process thinks so: where the disk or the store failed it has let go, and the lease runs out."""
        return bool(proc.slot.load("safe_ckpt.core.home.lease")._held)

    def gave_back_at(self, proc: Any) -> float:
        """When a process gave the directory back; before all time if it did not."""
        return self.given_back.get(proc, -1.0)

    def _hindered(self, proc: Any, since: float, until: float) -> list[tuple[float, float]]:
        """When a process could not reach the disk."""
        spans = [*proc.stops, *self._troubles(proc.host.number)]
        return [(start, end) for start, end in spans if end > since and start < until]

    def _full(self) -> list[tuple[float, float]]:
        """When nothing new could be written."""
        return list(self.world.mounts.full)

    def _troubles(self, host: int) -> list[tuple[float, float]]:
        """When a host could not use the directory."""
        return list(self.world.mounts.troubles.get(host, ()))

    def _changed(self, change: Change) -> None:
        if hub.task is None:
            return
        if change.kind == "enter" and change.name == "lock" and change.child is not None:
            self._locked(change.child)
        if change.kind == "write" and change.node is self._at(f"{self.directory}/.safe_ckpt/lock"):
            self._locked(change.node)  # where it could not be linked
        proc = hub.task.proc
        ends = proc.facts.get("phase", "").startswith(("close", "open"))
        if change.kind == "rename" and change.name == "lock" and ends and proc in self.leases.values():
            self.given_back[proc] = self.world.now
        if change.kind == "rename" and change.name == "lock" and self.taken_away is None:
            self.taken_away = (proc, self.world.now)
        if change.kind not in ("rename", "exchange"):
            return
        root = self._root()
        if change.other is root and change.other_name.startswith("step-"):
            self._committed(change.other_name, root.children[change.other_name])
        if change.node is root and change.name.startswith("step-") and change.kind == "rename":
            self._left(change.other.children[change.other_name], change.other, change.name)
        if change.other is root and change.kind == "exchange":
            self._left(change.node.children[change.name], change.node, change.name)

    def _left(self, node: Node, to: Node | None, name: str) -> None:
        """Something lost its name. Back to where it was built: its commit was taken back."""
        self.world.log("leaves", hub.task.proc.name, name)
        pending = self._at(f"{self.directory}/.safe_ckpt/pending")
        for one in self.commits.values():
            if one.node is node and to is not None and to not in pending.children.values():
                one.deleted = True
                self.leaving(one)
        if to is not None and to in pending.children.values():
            for one in self.commits.values():
                if one.node is node and one.who is hub.task.proc and not one.announced:
                    one.undone = True

    def _root(self) -> Node:
        return self._at(self.directory)

    def _at(self, path: str) -> Node:
        node = self.world.disk.root
        for part in path.strip("/").split("/"):
            node = node.children.get(part) or Node(0, "folder", 0, 0)
        return node  # type: ignore[no-any-return]

    def _committed(self, name: str, node: Node) -> None:
        proc = hub.task.proc
        manifest = node.children.get(MANIFEST)
        if manifest is None:
            self.world.violate("torn", f"{name} got its name without a manifest, by {proc.name}")
            return
        try:
            data = json.loads(bytes(manifest.data))
        except ValueError:
            self.world.violate("torn", f"{name} got its name with half a manifest, by {proc.name}")
            return
        known = self.commits.get(data["op_id"])
        if known is not None:
            # An undone replacement, or fetched from a mirror, perhaps with another place in the order.
            known.deleted, known.node, known.sequence = False, node, data["sequence"]
        if known is None or known.undone:
            self.commits[data["op_id"]] = Commit(name, data["sequence"], data["op_id"], proc, self.world.now, node)
            self.count("commits")
            self.world.log("committed", proc.name, name, data["sequence"])
            began = max((at for at, owner, _ in self.owners if owner is proc), default=0.0)
            later = [owner for at, owner, _ in self.owners if at > began and owner is not proc and owner in self.open]
            if later:
                rule = "two owners"
                self.world.violate(rule, f"{proc.name} committed {name} after {later[-1].name} had taken over")

    def saving(self, attempt: Any, step: int, token: int, size: int) -> Save:
        """A rank begins a save."""
        save = self.saves.setdefault((attempt, token), Save(token, step, size))
        self.tokens[token] = (attempt, step)
        return save

    def ended(self, save: Save, rank: int, outcome: str, op_id: str) -> None:
        """A rank was told how it ended: "ok", "unknown", or the name of an error."""
        if rank in save.outcomes:
            return
        save.outcomes[rank], save.op_id = outcome, op_id or save.op_id
        self.count(f"outcome {outcome}")
        if outcome == "ok":
            commit = self.commits.get(op_id)
            if commit is None:
                self.world.violate("announced", f"step {save.step} was announced and never got its name")
            else:
                commit.announced = True

    def newest_announced(self) -> int:
        """The highest sequence that was announced durable."""
        return max([self.least, *(one.sequence for one in self.commits.values() if one.announced)])

    def wiped(self, least: int) -> None:
        """The directory is lost; ``least`` is the newest that can be had elsewhere."""
        self.least = max(self.least, least)
        for one in self.commits.values():
            one.announced, one.deleted = False, True

    def resumed(self, attempt: Any, rank: int, floor: int, info: Any, values: Any) -> None:
        """A rank resumed.

        Args:
            attempt: which start of a job.
            rank: which rank.
            floor: the newest sequence that was announced before it began.
            info: what ``resume`` returned.
            values: the tokens that were restored.
        """
        self.count("resumes")
        if info is None:
            if floor:
                self.world.violate("lost", f"{attempt} found no checkpoint, and {floor} was announced durable")
        else:
            if info.sequence < floor:
                detail = f"{attempt} resumed {info.name} ({info.sequence}), older than {floor}, which was announced"
                self.world.violate("older", detail)
            if len(set(values)) != 1 or values[0] not in self.tokens:
                self.world.violate("mixed", f"{attempt} rank {rank} resumed {values} from {info.name}")
            elif self.tokens[values[0]][1] != info.step:
                self.world.violate("mixed", f"{attempt} resumed step {self.tokens[values[0]][1]} as {info.step}")
        got = (info.sequence, values[0]) if info is not None else None
        other = self.resumed_to.setdefault((attempt, 0), got)
        if other != got:
            self.world.violate("ranks differ", f"{attempt} rank {rank} resumed {got}, another one {other}")

    def judge_end(self) -> None:
        """All jobs are over: hold the rules against what is there."""
        for (attempt, _), save in self.saves.items():
            step = save.step
            outcomes = set(save.outcomes.values()) - {"unknown", "skipped"}
            if "ok" in outcomes and len(outcomes) > 1:
                self.world.violate("ranks differ", f"{attempt} step {step}: {save.outcomes}")
                continue
            commit = self.commits.get(save.op_id)
            failed = bool(outcomes - {"ok"})  # one rank that knows it is enough
            if failed and commit is not None and not commit.undone:
                self.world.violate("failed and there", f"{attempt} step {step}: {save.outcomes}")
        self._judge_disk()

    def opened(self, proc: Any) -> None:
        """An owner has cleaned up after the one before it: until then it has looked at nothing, and that one may commit."""
        self.open.add(proc)

    def left_behind(self) -> list[str]:
        """After a clean end: what is left and belongs to no checkpoint."""
        return []

    def _is_aside(self, one: Commit) -> bool:
        """Whether it stands aside in an interrupted replacement: the next start finishes that, or takes it back."""
        trash, pending = (self._at(f"{self.directory}/.safe_ckpt/{name}") for name in ("trash", "pending"))
        moved = (op for op, folder in trash.children.items() if one.node in folder.children.values())
        return any(op in pending.children for op in moved)

    def _judge_disk(self) -> None:
        there: dict[str, int] = {}
        for name, node in self._root().children.items():
            if name.startswith("step-"):
                if (problem := _problem(node)) is None:
                    there[name] = json.loads(bytes(node.children[MANIFEST].data))["sequence"]
                elif not any(one.node is node and one.deleted for one in self.commits.values()):
                    # Else a power cut came between its way to the trash and its deletion: it had retention's leave.
                    self.world.violate("torn", f"{name} {problem}")
        sequences = sorted(one.sequence for one in self.commits.values() if not one.undone)
        for one in self.commits.values():
            if not one.announced or there.get(one.name) == one.sequence:
                continue
            newer = sum(number > one.sequence for number in sequences)
            if self._is_aside(one):
                continue
            replaced = any(other.name == one.name and other.sequence > one.sequence for other in self.commits.values())
            if not replaced and (self.keep_last is None or newer < self.keep_last):
                self.world.violate("lost", f"{one.name} ({one.sequence}) was announced durable and is gone")


def _problem(node: Node) -> str | None:
    manifest = node.children.get(MANIFEST)
    if manifest is None:
        return "has no manifest"
    try:
        data = json.loads(bytes(manifest.data))
    except ValueError:
        return "has half a manifest"
    for row in data["files"]:
        at: Any = node
        for part in row["path"].split("/"):
            at = at.children.get(part) if at is not None else None
        if at is None:
            return f"lacks {row['path']}"
        if xxhash.xxh3_128_hexdigest(bytes(at.data)) != row["xxh3_128"]:
            return f"has other bytes in {row['path']}"
    return None
