"""What must never happen where the directory is in an object store: the rules of ``oracle``, as the store sees them."""

from __future__ import annotations

import json
from typing import Any

import xxhash

from sim.objects import Object
from sim.oracle import MANIFEST, Commit, Oracle
from sim.world import Proc

_TOMBSTONE = "safe_ckpt-gravestone"
_HEAD = ".safe_ckpt/head"


class StoreOracle(Oracle):
    """See the module.

    Args:
        world: whose violations it records.
        below: what the keys begin with.
        keep_last: what retention keeps at least.
    """

    def __init__(self, world: Any, below: str, keep_last: int | None) -> None:
        super().__init__(world, "", keep_last)
        self.below = below
        self.too_late: dict[str, Any] = {}
        world.objects.watcher = self

    def put(self, key: str, there: Object, proc: Proc) -> None:
        """An object was created or replaced, by a request of this process."""
        name = key.removeprefix(f"{self.below}/")
        if name == _HEAD:
            self._head_changed(json.loads(there.data), proc)
        elif name.endswith(f"/{MANIFEST}"):
            if there.before is not None:
                self.world.violate("replaced", f"{proc.name} put another object in place of {name}")
            self._manifest_put(name.partition("/")[0], json.loads(there.data), proc)
        elif f"{self._folder_of(key)}/{MANIFEST}" in self.world.objects.there:
            job = proc.name.partition(".writer")[0]
            self.too_late[self._folder_of(key)] = next(one for one in proc.host.procs if one.name == job)

    def _folder_of(self, key: str) -> str:
        return f"{self.below}/{key.removeprefix(f'{self.below}/').partition('/')[0]}"

    def deleted(self, key: str, gone: Object, proc: Proc) -> None:
        """An object was deleted."""
        facts = json.loads(gone.data) if key.endswith(f"/{MANIFEST}") else {}
        one = self.commits.get(facts.get("op_id", ""))
        if one is not None and f"{one.node}/{MANIFEST}" == key:
            one.deleted = True

    def _full(self) -> list[tuple[float, float]]:
        return []  # a store has room

    def _troubles(self, host: int) -> list[tuple[float, float]]:
        return list(self.world.objects.troubles.get(host, ()))

    def _head_changed(self, head: dict[str, Any], proc: Proc) -> None:
        lease = head["lease"]
        if head["quarantined"]:
            self.world.violate("quarantined", f"{proc.name} took {head['quarantined']} for damaged")
        if lease is None:
            if proc in self.leases.values():
                self.given_back[proc] = self.world.now
        elif lease["token"] not in self.leases:
            self.leases[lease["token"]] = proc
            if self.owners:
                self._refuse_robbery(self.owners[-1], proc, self.world.now)
            self.owners.append((self.world.now, proc, lease["lease_s"]))
            self.world.log("owns", proc.name)

    def _manifest_put(self, folder: str, facts: dict[str, Any], proc: Proc) -> None:
        if facts["format"] == _TOMBSTONE:
            self.count("tombstones")
            return
        if (known := self.commits.get(facts["op_id"])) is not None:
            # A request that was repeated after retention: the head says that it is none. Or a mirror has it once more.
            known.deleted, known.node = False, f"{self.below}/{folder}"
            return
        name = folder.rpartition(".")[0]
        self.commits[facts["op_id"]] = Commit(
            name, facts["sequence"], facts["op_id"], proc, self.world.now, f"{self.below}/{folder}"
        )
        self.count("commits")
        self.world.log("committed", proc.name, folder, facts["sequence"])
        if (problem := self._problem(f"{self.below}/{folder}", facts)) is not None:
            self.world.violate("torn", f"{folder} was committed by {proc.name} and {problem}")
        began = max((at for at, owner, _ in self.owners if owner is proc), default=0.0)
        later = [owner for at, owner, _ in self.owners if at > began and owner is not proc and owner in self.open]
        if later:
            self.world.violate("two owners", f"{proc.name} committed {folder} after {later[-1].name} had opened it")

    def _may_go(self, one: Commit) -> bool:
        """Whether something else than retention may have deleted it."""
        del one
        return False

    def _problem(self, folder: str, facts: dict[str, Any]) -> str | None:
        for row in facts["files"]:
            there = self.world.objects.there.get(f"{folder}/{row['path']}")
            if there is None:
                return f"lacks {row['path']}"
            if xxhash.xxh3_128_hexdigest(there.data) != row["xxh3_128"]:
                return f"has other bytes in {row['path']}"
        return None

    def _judge_disk(self) -> None:
        there = self.world.objects.there
        head = json.loads(there[f"{self.below}/{_HEAD}"].data) if f"{self.below}/{_HEAD}" in there else {}
        found = set()
        for one in self.commits.values():
            manifest = there.get(f"{one.node}/{MANIFEST}")
            if manifest is None or one.deleted or one.node.rpartition("/")[2] in head.get("trash", ()):
                continue
            facts = json.loads(manifest.data)
            if facts.get("op_id") != one.op_id:
                continue
            if (problem := self._problem(one.node, facts)) is not None:
                self.world.violate("torn", f"{one.node} {problem}")
            found.add(one.op_id)
        for one in self.commits.values():
            if not one.announced or one.op_id in found:
                continue
            newer = sum(other.sequence > one.sequence for other in self.commits.values())
            replaced = any(other.name == one.name and other.sequence > one.sequence for other in self.commits.values())
            if not replaced and not self._may_go(one) and (self.keep_last is None or newer < self.keep_last):
                self.world.violate("lost", f"{one.name} ({one.sequence}) was announced durable and is gone")

    def left_behind(self) -> list[str]:
        """After a clean end: what belongs to no checkpoint.

        Beside a tombstone only a late request may have left it, or who stood still, went on and was killed before it knew, or
        ended without waiting for its disk and said that it did not know.
        """
        unsure = {save.op_id[:12] for save in self.saves.values() if "unknown" in save.outcomes.values()}
        there = self.world.objects.there
        wanted = {f"{self.below}/{_HEAD}"}
        for key, one in there.items():
            if not key.endswith(f"/{MANIFEST}"):
                continue
            wanted.add(key)
            folder, facts = key.rpartition("/")[0], json.loads(one.data)
            if facts["format"] != _TOMBSTONE:
                wanted |= {f"{folder}/{row['path']}" for row in facts["files"]}
            elif self.world.objects.strayed or (
                folder in self.too_late
                and (self.too_late[folder].ended != "exit" or folder.rpartition(".")[2] in unsure)
            ):
                wanted |= {other for other in there if other.startswith(f"{folder}/")}
        return sorted(there.keys() - wanted)
