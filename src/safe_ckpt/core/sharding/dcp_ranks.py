"""Which rank says what of a sharded item: each its own parts; of anything else, the lowest rank that has it.

Ranks may have other names, such as those of their experts. What two ranks have under one name must be the same tensor: one of
two others would be lost.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from safe_ckpt.core.formats.file_plan import values_of
from safe_ckpt.core.sharding import dtensor
from safe_ckpt.core.sharding.dtensor import is_extra_state
from safe_ckpt.errors import DesyncError

_SAMPLE = 256


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


def on_part(state: Mapping[str, Any], size: int) -> list[Sequence[Any]]:
    """Name, place, mesh and a digest of each DTensor on a mesh of some of the ``size`` ranks: others may have one of that name.

    The digest is of some of the values of this rank, those on the whole of a small tensor.
    """
    found: list[Sequence[Any]] = []
    meshes: dict[int, torch.Tensor] = {}  # of their ids: a mesh lays out its ranks anew each time that it is asked
    for name, value in state.items():
        if not dtensor.is_dtensor(value):
            continue
        if (at := id(value.device_mesh)) not in meshes:
            meshes[at] = value.device_mesh.mesh
        if (mesh := meshes[at]).numel() < size:
            local = values_of(dtensor.local_of(value)).reshape(-1)
            some = local[:: max(1, local.numel() // _SAMPLE)].contiguous().view(torch.uint8)
            digest = hashlib.blake2b(bytes(some.tolist()), digest_size=8).hexdigest()
            place = [piece.offsets for piece in dtensor.pieces_of(value)]
            found.append([name, str(place), int(mesh.min()), digest])
    return found


def refuse_others(folder: str, told: Mapping[int, Sequence[Sequence[Any]]], within: str = "") -> bool:
    """Refuse one name on several meshes with other values: one of them would be lost.

    Args:
        folder: of the item, for errors.
        told: what ``on_part`` returned on every rank.
        within: what all names begin with, which errors leave out.

    Returns:
        Whether there is a name on several meshes.

    Raises:
        DesyncError: their values differ; names it.
    """
    seen: dict[tuple[str, str], tuple[int, int, str]] = {}
    twice = False
    for rank in sorted(told):
        for name, place, mesh, digest in told[rank]:
            first, on, known = seen.setdefault((name, place), (rank, mesh, digest))
            twice |= on != mesh
            if on != mesh and known != digest:
                where = "values on the mesh that begins with rank"
                texts = {first: f"{where} {on}", rank: f"other {where} {mesh}: give these a name of their own"}
                _refuse(folder, within, name, texts)
    return twice


def _refuse(folder: str, within: str, name: str, texts: Mapping[int, str]) -> NoReturn:
    name = name.removeprefix(within)
    what = f"state[{folder!r}]: {name}" if folder else name
    raise DesyncError(what=what, values={str(rank): text for rank, text in texts.items()})


def name_of_empty(path: Sequence[Any]) -> str:
    """The name of the entry of an empty mapping, of which DCP makes none."""
    return ".".join(map(str, (*path, "{}")))


class _Said:
    """The entries that the ranks so far have planned."""

    def __init__(self, folder: str, plans: Mapping[int, SavePlan], within: str) -> None:
        self._refuse = functools.partial(_refuse, folder, within)
        self._first: dict[str, tuple[int, WriteItem]] = {}
        self._paths: set[tuple[Any, ...]] = set()
        self._above: set[tuple[Any, ...]] = set()  # beginnings of those
        # What is empty here may have something in it on another rank.
        paths = (path for plan in plans.values() for path in (plan.planner_data or {}).values())
        self._filled = {above for path in paths for above in itertools.accumulate((key,) for key in path[:-1])}

    def by(self, rank: int, plan: SavePlan) -> list[WriteItem]:
        """Return the entries of this rank's plan that stay in it."""
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
            elif path not in self._above and self._paths.isdisjoint(itertools.accumulate((key,) for key in path[:-1])):
                # No rank has said that this is, or is in, something else.
                self._first[name] = rank, item
                self._paths.add(path)
                self._above.update(itertools.accumulate((key,) for key in path[:-1]))
                own.append(item)
            elif item.type != WriteItemType.BYTE_IO:
                self._refuse(name, {0: "no tensor", rank: _described(item)})
        return own


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
