"""What must never happen in a mirror: the rules of an object store, and what a mirror promises about the directory."""

from __future__ import annotations

from typing import Any

from sim.object_oracle import StoreOracle
from sim.oracle import MANIFEST, Oracle
from sim.world import Proc, hub


class MirrorOracle(StoreOracle):
    """See the module.

    Args:
        world: whose violations it records.
        below: what the keys begin with.
        mirror: the settings of the mirror.
        disk: the rules of the directory.
    """

    def __init__(self, world: Any, below: str, mirror: dict[str, Any], disk: Oracle) -> None:
        super().__init__(world, below, mirror.get("keep_last"))
        world.disk.watchers.remove(self._changed)
        self._settings, self._disk = mirror, disk
        self.told: set[Any] = set()
        disk.leaving = self._refuse_early

    def newest(self) -> int:
        """The highest sequence that is there, whole."""
        there = self.world.objects.there
        return max((one.sequence for one in self.commits.values() if f"{one.node}/{MANIFEST}" in there), default=0)

    def announced(self, proc: Proc, event: Any) -> None:
        """An event of a rank 0: something was mirrored, or was not."""
        if type(event).__name__ != "Mirrored":
            return
        if event.error:
            self.told.add(proc)
            return
        self.told.discard(proc)
        self.count("mirrored")
        node = event.url.partition("//")[2].partition("/")[2]
        one = next((one for one in self.commits.values() if one.node == node), None)
        if one is None:
            self.world.violate("announced", f"{event.url} was announced and never got its manifest")
        else:
            one.announced = True

    def closed(self, proc: Proc) -> None:
        """A rank 0 has closed without an error: its newest checkpoint is there, or it was said that it is not."""
        own = [one for one in self._disk.commits.values() if one.who is proc and one.announced]
        if not own or proc in self.told:
            return
        newest = max(own, key=lambda one: one.sequence)
        if newest.op_id not in self.commits:
            self.world.violate("not mirrored", f"{newest.name} of {proc.name}, and nobody said so")

    def _manifest_put(self, folder: str, facts: dict[str, Any], proc: Proc) -> None:
        super()._manifest_put(folder, facts, proc)
        op_id = facts.get("op_id")  # a tombstone has none
        if op_id in self.commits and op_id not in self._disk.commits:
            self.world.violate("mirrored too early", f"{folder} is no checkpoint of the directory")

    def _refuse_early(self, one: Any) -> None:
        """With ``required`` retention waits until this one, or a newer one, is in the mirror."""
        if not self._settings["required"] or hub.task.inner != "retain" or not one.announced:
            return
        if not any(other.sequence >= one.sequence for other in self.commits.values()):
            self.world.violate("deleted too early", f"{one.name} ({one.sequence}), and the mirror has nothing newer")

    def left_behind(self) -> list[str]:
        """As in a store, if somebody opened it in the end: a job that ends before the lease of a dead one does not."""
        return super().left_behind() if self.owners and self.given_back.get(self.owners[-1][1]) is not None else []

    def _may_go(self, one: Any) -> bool:
        return bool(self._settings["follow"]) and one.sequence < self.newest()
