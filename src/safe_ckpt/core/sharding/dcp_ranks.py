"""Which rank says what of a sharded item: each its own parts; of anything else, the lowest rank that has it.

Ranks may have other names, such as those of their experts. What two ranks have under one name must be the same tensor: one of
two others would be lost.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from safe_ckpt.core.sharding.dtensor import is_extra_state
from safe_ckpt.errors import DesyncError


def divided(folder: str, plans: Mapping[int, SavePlan], within: str = "") -> dict[int, SavePlan]:
    """The plans of all ranks with what each is to say.

    Args:
        folder: of the item, for errors.
        plans: what each rank has.
        within: what all names begin with, which errors leave out.

    Raises:
        DesyncError: two ranks have other tensors under one name; names it.
    """
    said = _Said(folder, plans, within)
    return {rank: dataclasses.replace(plans[rank], items=said.by(rank, plans[rank])) for rank in sorted(plans)}


def name_of_empty(path: Sequence[Any]) -> str:
    """The name of the entry of an empty mapping, of which DCP makes none."""
    return ".".join(map(str, (*path, "{}")))


class _Said:
    """What the ranks so far have said."""

    def __init__(self, folder: str, plans: Mapping[int, SavePlan], within: str) -> None:
        self._folder = folder
        self._within = within
        self._first: dict[str, tuple[int, WriteItem]] = {}
        self._paths: set[tuple[Any, ...]] = set()
        self._above: set[tuple[Any, ...]] = set()  # beginnings of those
        # What is empty here may have something in it on another rank.
        paths = (path for plan in plans.values() for path in (plan.planner_data or {}).values())
        self._filled = {above for path in paths for above in itertools.accumulate((key,) for key in path[:-1])}

    def by(self, rank: int, plan: SavePlan) -> list[WriteItem]:
        """What this rank says of its plan."""
        own, paths = [], plan.planner_data or {}
        for item in plan.items:
            name = item.index.fqn
            path = tuple(paths.get(name, (name,)))
            if path in self._filled and name == name_of_empty(path):
                continue
            if name in self._first:
                first_rank, first = self._first[name]
                if _would_be_lost(item, first):
                    self._refuse(name, {first_rank: _described(first), rank: _described(item)})
                if rank == first_rank or item.type == WriteItemType.SHARD:
                    own.append(item)
            elif self._is_free(path):
                self._first[name] = rank, item
                self._paths.add(path)
                self._above.update(itertools.accumulate((key,) for key in path[:-1]))
                own.append(item)
            elif item.type != WriteItemType.BYTE_IO:
                self._refuse(name, {0: "no tensor", rank: _described(item)})
        return own

    def _is_free(self, path: tuple[Any, ...]) -> bool:
        """Whether no rank has said that this is, or is in, something else."""
        return path not in self._above and self._paths.isdisjoint(itertools.accumulate((key,) for key in path[:-1]))

    def _refuse(self, name: str, texts: Mapping[int, str]) -> None:
        name = name.removeprefix(self._within)
        what = f"state[{self._folder!r}]: {name}" if self._folder else name
        raise DesyncError(what=what, values={str(rank): text for rank, text in texts.items()})


def _would_be_lost(item: WriteItem, first: WriteItem) -> bool:
    if item is first or item.tensor_data is None:
        return False
    if first.tensor_data is None:
        return True
    if is_extra_state(item.index.fqn):  # of any size
        return False
    one, other = item.tensor_data, first.tensor_data
    return (item.type, one.size, one.properties.dtype) != (first.type, other.size, other.properties.dtype)


def _described(item: WriteItem) -> str:
    data = item.tensor_data
    if data is None:
        return "no tensor"
    kind = "a sharded tensor" if item.type == WriteItemType.SHARD else "a tensor"
    return f"{kind} {tuple(data.size)} {data.properties.dtype}"
