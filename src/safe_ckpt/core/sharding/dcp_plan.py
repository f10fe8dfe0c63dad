"""Sharded items: planned by ``torch.distributed.checkpoint`` (DCP), agreed through the store, laid out for our writer.

DCP's planner decides what is written by whom: replicated tensors once, spread over the ranks. Every rank sends its local plan
only when it has changed since the last save; rank 0 answers with which entries each rank writes, and knows by then where they
will lie, so the ``.metadata`` is complete before a byte is written. What was planned and what was written are compared at the
commit like every other file.
"""

from __future__ import annotations

import dataclasses
import pickle
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from safe_ckpt.core.coordination.rounds import Scatter
from safe_ckpt.core.formats.file_plan import FilePlan, FileTemplate, bytes_plan, values_of
from safe_ckpt.core.formats.manifest import DCP_METADATA
from safe_ckpt.core.formats.refusals import refuse_short, unchanging
from safe_ckpt.core.formats.torch_archive import saved_bytes
from safe_ckpt.core.sharding import dcp_entries, dtensor, plan_data
from safe_ckpt.core.sharding.dcp_layout import File, entries, file_of, frozen_entries, type_and_shape, under
from safe_ckpt.core.sharding.dcp_ranks import divided, name_of_empty, on_part, refuse_others
from safe_ckpt.core.sharding.dtensor import ShardedItem
from safe_ckpt.errors import SaveError, StateError

if TYPE_CHECKING:
    from safe_ckpt.core.coordination.coordinator import Coordinator

_VERSION = "1.0.0"  # of DCP's format


class _Planner(DefaultSavePlanner):
    """DCP's own leaves out empty mappings, as if they were not there."""

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **options: Any) -> None:
        super().set_up_planner(state_dict, *args, **options)
        for path, value in _empty_mappings(state_dict):
            name = name_of_empty(path)
            self.state_dict[name], self.mappings[name] = value, path


def _empty_mappings(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, Mapping):
        if not value and path:
            yield path, value
        for key, inner in value.items():
            yield from _empty_mappings(inner, (*path, str(key)))
    elif isinstance(value, list) and any(isinstance(leaf, torch.Tensor | Mapping) for leaf in value):
        for number, inner in enumerate(value):
            yield from _empty_mappings(inner, (*path, number))


@dataclass(kw_only=True, eq=False)
class _Local:
    """One item as this rank could write it.

    Attributes:
        item: as it is now.
        plan: what this rank has.
        objects: the bytes of what is no tensor, by its place in the plan.
        with_floats: those of them that have floats in them, and where in the state dict they lie.
        planner: finds the tensors.
        frozen_apart: which entries of the plan go to further files, because they are not trained.
        templates: this rank's files, if they were laid out for ``kept``.
        kept: which entries of the plan they have.
        last: which objects are the last pieces of the first one.
        on_part: see ``dcp_ranks.on_part``; empty where it is not planned anew.
    """

    item: ShardedItem
    plan: SavePlan
    objects: Mapping[int, bytes]
    with_floats: Mapping[int, Sequence[Any]]
    planner: DefaultSavePlanner | None = None
    frozen_apart: Sequence[int] = ()
    templates: Sequence[FileTemplate] = ()
    kept: Sequence[int] = ()
    last: Sequence[int] = ()
    on_part: Sequence[Sequence[Any]] = ()

    def lookup(self, index: MetadataIndex) -> torch.Tensor:
        """A tensor of this rank."""
        if self.planner is None:
            self.planner = DefaultSavePlanner()
            self.planner.set_up_planner(dict(self.item.state_dict()), is_coordinator=False)
        value = self.planner.state_dict.get(index.fqn)
        if isinstance(value, torch.Tensor) and dtensor.is_scattered(value):
            return _part_at(value, index)
        found: torch.Tensor = self.planner.lookup_object(index)
        return found

    def remembered(self) -> _Local:
        """The same without tensors."""
        return dataclasses.replace(
            self,
            item=dataclasses.replace(self.item, tensors=(), state_dict=dict, at=None, frozen=frozenset),
            planner=None,
            on_part=(),
        )


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """The plan that the ranks agreed on.

    Attributes:
        items: what this rank has, by folder.
        metadata: on rank 0, what goes into ``.metadata``, by the folder that has it.
    """

    items: Mapping[str, _Local]
    metadata: Mapping[str, bytes]


@dataclass(frozen=True, kw_only=True)
class _Global:
    """The global plan that rank 0 made of all local plans.

    Attributes:
        token: unique to it; a rank whose plan is still the same names it instead of sending the plan again.
        plans: every rank's.
        frozen_apart: which entries of its plan go to further files of that rank.
        kept: which entries of its plan every rank writes.
        metadata: what goes into ``.metadata``, but for where things lie.
    """

    token: str
    plans: Mapping[int, SavePlan]
    frozen_apart: Mapping[int, Sequence[int]]
    kept: Mapping[int, Sequence[int]]
    metadata: Metadata


@dataclass(frozen=True, kw_only=True)
class _Agreed:
    """This rank's memory of the last agreement on one item."""

    token: str
    plan: SavePlan
    frozen_apart: Sequence[int]
    kept: Sequence[int]


class ShardPlanner:
    """Plans sharded items, remembering what was agreed. One per pipeline; every rank has one and asks it alike.

    Args:
        coordinator: where the ranks meet.
        barrier_s: how long one waits for another there.
        strict: refuse objects that ``torch.load(weights_only=True)`` would refuse.
        together: one ``.metadata`` in the checkpoint's own folder says of all items; else each folder has one. The names in
            different items are different then.
    """

    def __init__(
        self, coordinator: Coordinator, *, barrier_s: float, strict: bool = True, together: bool = False
    ) -> None:
        self._coordinator = coordinator
        self._barrier_s = barrier_s
        self._strict = strict
        self._together = together
        self._agreed: dict[str, _Agreed] = {}
        self._known: dict[str, _Local] = {}  # what was planned last, without tensors
        self._global: dict[str, _Global] = {}  # on rank 0
        self._twice: set[str] = set()  # what has one name on several meshes: its values are compared at each save
        self._written: dict[str, tuple[Any, bytes]] = {}  # on rank 0: the last metadata, and what it was made of

    def files(self, states: Mapping[str, Any], problem: Exception | None = None) -> list[FilePlan]:
        """The files of this rank. Every rank calls this, on the thread that trains; see ``agree`` and ``lay_out``."""
        return self.lay_out(self.agree(states, problem))

    def agree(
        self,
        states: Mapping[str, Any],
        problem: Exception | None = None,
        *,
        kind: str = "shards",
        must_match: Mapping[str, object] | None = None,
    ) -> ShardPlan:
        """Agree on who writes what. Every rank calls this, on the thread that trains.

        Args:
            states: folder (``""`` for the checkpoint's own) to the state dict that goes there, or to what is known of it.
            problem: why this rank has none to plan; every rank raises it.
            kind: of the agreement. A rank that knows of no shards, because it failed before, meets the others here when it is
                that of the save that follows: all raise its error.
            must_match: further values that must be equal on all ranks.

        Raises:
            StateError: something cannot be saved; names it. On every rank.
            DesyncError: the ranks have different items.
        """
        local: dict[str, _Local] = {}
        wholes: dict[str, _Global] = {}
        metadata: dict[str, bytes] = {}

        def plan() -> dict[str, Any]:
            if problem is not None:
                raise problem
            for folder, state in states.items():
                item = state if isinstance(state, ShardedItem) else ShardedItem.of(state)
                local[folder] = self._recall(folder, item) or self._plan(folder, item)
            return {folder: self._say(folder, item) for folder, item in local.items()}

        try:
            share = self._coordinator.agree(
                kind,
                timeout_s=self._barrier_s,
                must_match={**(must_match or {}), "sharded items": ", ".join(states)},
                local=plan,
                decide=lambda answers: self._decide(answers, wholes, metadata),
                phase="planning shards",
            )
        except Exception:
            self._agreed.clear()
            self._known.clear()
            raise
        self._twice.update(folder for folder, told in share.items() if told["twice"])
        for folder, item in local.items():
            kept = share[folder]["kept"]
            if kept is None:
                kept = self._agreed[folder].kept
            else:
                kept = plan_data.kept_from_json(kept, item.plan, rank=self._coordinator.rank)
            self._agreed[folder] = _Agreed(
                token=share[folder]["token"], plan=item.plan, frozen_apart=item.frozen_apart, kept=kept
            )
        self._global.update(wholes)
        self._known = {folder: known for folder, known in self._known.items() if folder in local}
        return ShardPlan(items=local, metadata=metadata)

    def lay_out(self, parts: ShardPlan) -> list[FilePlan]:
        """The files of this rank. What goes wrong here is this rank's own to tell.

        Raises:
            StateError: a tensor is not what was planned; names it.
        """
        files: list[FilePlan] = []
        for folder, local in parts.items.items():
            files += self._lay_out(folder, local, self._agreed[folder].kept)
        return [*files, *(bytes_plan(under(folder, DCP_METADATA), data) for folder, data in parts.metadata.items())]

    def _lay_out(self, folder: str, local: _Local, kept: Sequence[int]) -> Sequence[FilePlan]:
        if local.templates and local.kept is kept:
            first, *others = local.templates
            changing = zip(local.last, first.plan.pieces[first.plan.fixed :], strict=True)
            if all(len(local.objects[number]) == len(piece) for number, (_, piece) in changing):
                last = [local.objects[number] for number in local.last]
                return [first.filled(local.item.tensors, last), *(t.filled(local.item.tensors) for t in others)]
        files: Sequence[FilePlan]
        files, numbers = _lay_out(folder, local, kept, self._coordinator.rank, self._within(folder))
        self._known.pop(folder, None)
        if local.item.known is not None:
            local.templates, files = FileTemplate.of_all(files, local.item.tensors)
            local.kept, local.last = kept, numbers
            self._known[folder] = local.remembered()
        return files

    def _recall(self, folder: str, item: ShardedItem) -> _Local | None:
        """Return the last plan, if only values have changed since."""
        known = self._known.get(folder) if folder not in self._twice else None
        if known is None or item.known is None or known.item.known is not item.known or item.at is None:
            return None
        objects = dict(known.objects)
        if item.floats != known.item.floats:
            for number, path in known.with_floats.items():
                try:
                    value = item.at(path)
                except (LookupError, TypeError):
                    return None
                objects[number] = self._bytes_of(self._key(folder, known.plan.items[number].index.fqn), value)
        return dataclasses.replace(known, item=item, objects=objects)

    def _plan(self, folder: str, item: ShardedItem) -> _Local:
        with unchanging(folder or "the sharded state"):
            state = item.state_dict()
        if self._strict:
            _refuse_other_keys("state" if self._together else folder, state)
        planner = _Planner()
        try:
            planner.set_up_planner(dict(state), is_coordinator=self._coordinator.rank == 0)
        except ValueError as error:  # "a.b" beside "b" in "a"
            raise StateError(key=folder, message=f"beside shards DCP joins keys by dots: {error}") from error
        for fqn, value in planner.state_dict.items():
            _admit(self._key(folder, fqn), value)
        plan = _in_boxes(planner.create_local_plan(), planner.state_dict)
        paths = plan.planner_data or {}
        objects, with_floats = {}, {}
        for number, entry in enumerate(plan.items):
            if entry.type == WriteItemType.BYTE_IO:
                name, value = entry.index.fqn, planner.lookup_object(entry.index)
                objects[number] = self._bytes_of(self._key(folder, name), value)
                if any(isinstance(leaf, float) for leaf in dtensor.leaves_of(value)):
                    with_floats[number] = paths.get(name, (name,))
        frozen_apart = frozen_entries(plan, item.frozen())
        parts = on_part(planner.state_dict, self._coordinator.size)
        return _Local(
            item=item,
            plan=plan,
            objects=objects,
            with_floats=with_floats,
            planner=planner,
            frozen_apart=frozen_apart,
            on_part=parts,
        )

    def _key(self, folder: str, name: str) -> str:
        """Return the name of an entry in errors."""
        return f"{folder}: {name.removeprefix(self._within(folder))}"

    def _within(self, folder: str) -> str:
        """Return the beginning of the names in an item."""
        return f"{folder}." if self._together else ""

    def _bytes_of(self, key: str, value: object) -> bytes:
        return saved_bytes(value, strict=self._strict, key=key)

    def _say(self, folder: str, item: _Local) -> dict[str, Any]:
        known = self._agreed.get(folder)
        if known is not None and (known.plan != item.plan or known.frozen_apart != item.frozen_apart):
            known = None
        return {
            "token": None if known is None else known.token,
            "plan": plan_data.plan_to_json(item.plan) if known is None else None,
            "frozen_apart": list(item.frozen_apart) if known is None else None,
            "lengths": {str(number): len(data) for number, data in item.objects.items()},
            "on_part": list(item.on_part),
        }

    def _decide(self, answers: Mapping[int, Any], wholes: dict[str, _Global], metadata: dict[str, bytes]) -> Scatter:
        shares: dict[int, dict[str, Any]] = {rank: {} for rank in answers}
        lengths: dict[str, Mapping[int, Any]] = {}
        for folder in answers[0]:
            reports = {rank: answer[folder] for rank, answer in answers.items()}
            whole = wholes[folder] = self._whole(folder, reports)
            lengths[folder] = {rank: report["lengths"] for rank, report in reports.items()}
            on_part = {rank: report["on_part"] for rank, report in reports.items()}
            twice = refuse_others(folder, on_part, self._within(folder))
            for rank, report in reports.items():
                kept = None if report["token"] == whole.token else list(whole.kept[rank])
                shares[rank][folder] = {"token": whole.token, "kept": kept, "twice": twice}
        for place, folders in ({"": [*wholes]} if self._together else {name: [name] for name in wholes}).items():
            facts = [(wholes[folder].token, lengths[folder]) for folder in folders]
            if place not in self._written or self._written[place][0] != facts:
                parts = {folder: (wholes[folder], lengths[folder]) for folder in folders}
                self._written[place] = facts, _metadata_of(place, parts)
            metadata[place] = self._written[place][1]
        return Scatter(shares)

    def _whole(self, folder: str, reports: Mapping[int, Any]) -> _Global:
        known = self._global.get(folder)
        if known is not None and all(one["token"] == known.token for one in reports.values()):
            return known
        plans: dict[int, SavePlan] = {}
        frozen_apart: dict[int, Sequence[int]] = {}
        for rank, one in reports.items():
            if one["plan"] is not None:
                plans[rank] = plan_data.plan_from_json(one["plan"], rank=rank)
                frozen_apart[rank] = plan_data.kept_from_json(one["frozen_apart"], plans[rank], rank=rank)
            elif known is not None and one["token"] == known.token:
                plans[rank], frozen_apart[rank] = known.plans[rank], known.frozen_apart[rank]
            else:
                raise SaveError(name=folder, cause="its plan is not known here any more; save again", rank=rank)
        shares = divided(folder, plans, within=self._within(folder))
        final, metadata = DefaultSavePlanner().create_global_plan(list(shares.values()))
        chosen = {rank: {item.index for item in final[number].items} for number, rank in enumerate(shares)}
        kept = {rank: [n for n, item in enumerate(plans[rank].items) if item.index in chosen[rank]] for rank in shares}
        return _Global(token=uuid.uuid4().hex, plans=plans, frozen_apart=frozen_apart, kept=kept, metadata=metadata)


def _in_boxes(plan: SavePlan, state: Mapping[str, Any]) -> SavePlan:
    """The plan with an entry for each box of what is no box, for which DCP plans one."""
    if not any(map(dtensor.is_scattered, state.values())):
        return plan
    items: list[WriteItem] = []
    for item in plan.items:
        tensor = state.get(item.index.fqn)
        if not isinstance(tensor, torch.Tensor) or not dtensor.is_scattered(tensor) or item.tensor_data is None:
            items.append(item)
            continue
        for piece in dtensor.pieces_of(tensor):
            chunk = ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=torch.Size(piece.sizes))
            index = MetadataIndex(item.index.fqn, chunk.offsets)
            data = dataclasses.replace(item.tensor_data, chunk=chunk)
            items.append(dataclasses.replace(item, index=index, tensor_data=data))
    return dataclasses.replace(plan, items=items)


def _part_at(tensor: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
    local = dtensor.local_of(tensor)
    for piece in dtensor.pieces_of(tensor):
        if index.offset is not None and tuple(index.offset) == piece.offsets:
            return dtensor.cut(local, piece.begin, piece.sizes)
    raise StateError(key=index.fqn, message="its parts are not those that were planned")


def _metadata_of(place: str, parts: Mapping[str, tuple[_Global, Mapping[int, Any]]]) -> bytes:
    """The ``.metadata`` at ``place``, of what was agreed on for these folders, and of the lengths of each rank's objects."""
    known: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for folder, (whole, lengths) in parts.items():
        for both in known.keys() & whole.metadata.state_dict_metadata.keys():
            raise StateError(key=both, message="beside shards DCP joins keys by dots, and two items come to this name")
        known.update(whole.metadata.state_dict_metadata)
        paths.update(whole.metadata.planner_data or {})
        places.update(_places("" if folder == place else folder, whole, lengths))
    planned = sum(len(one.chunks) if isinstance(one, TensorStorageMetadata) else 1 for one in known.values())
    if planned != len(places):
        raise SaveError(name=place, cause=f"{planned} entries are planned and {len(places)} would be written")
    saved_by = StorageMeta(save_id=".".join(whole.token for whole, _ in parts.values()))
    facts: dict[str, Any] = {"planner_data": paths, "storage_data": places, "storage_meta": saved_by}
    if "version" in {field.name for field in dataclasses.fields(Metadata)}:  # since torch 2.9
        facts["version"] = _VERSION
    return pickle.dumps(Metadata(state_dict_metadata=known, **facts))


def _places(folder: str, whole: _Global, by_rank: Mapping[int, Any]) -> dict[MetadataIndex, _StorageInfo]:
    """Return where everything lies, relative to the folder of ``.metadata``."""
    places = {}
    for rank, plan in whole.plans.items():
        lengths = plan_data.lengths_from_json(by_rank[rank], plan, rank=rank)
        for item, _, file, at, length in entries(plan, whole.kept[rank], whole.frozen_apart[rank], lengths):
            places[item.index] = _StorageInfo(under(folder, file_of(rank, file)), at, length)
    return places


def _lay_out(
    folder: str, local: _Local, kept: Sequence[int], rank: int, within: str
) -> tuple[list[FilePlan], list[int]]:
    """Lay out this rank's files, as far as it has them. Returns also the objects that are the last pieces of the first one.

    Health is told by the names without ``within``, with which all begin.
    """
    made: dict[int, File] = {}
    objects: dict[int, tuple[int, bytes]] = {}
    lengths = {number: len(data) for number, data in local.objects.items()}
    for entry, number, which, at, length in entries(local.plan, kept, local.frozen_apart, lengths):
        file = made.setdefault(which, File())
        file.end = at + length
        if number in local.objects:
            objects[number] = at, local.objects[number]
            continue
        name, around = entry.index.fqn.removeprefix(within), dcp_entries.envelope(*type_and_shape(entry))
        tensor = values_of(local.lookup(entry.index))
        if (tensor.dtype, tuple(tensor.shape)) != type_and_shape(entry):
            message = f"planned as {type_and_shape(entry)}, it is {tuple(tensor.shape)} {tensor.dtype}"
            raise StateError(key=f"{folder}: {name}", message=message)
        file.add(name, tensor, at, around)
    files = [
        file.planned(under(folder, file_of(rank, which)), () if which else objects.values(), frozen=which > 0)
        for which, file in sorted(made.items())
    ]
    return files, list(objects)


def _admit(key: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        return
    if dtensor.is_partial(value):
        raise StateError(key=key, message="a DTensor whose parts are still to be reduced: redistribute it first")
    parts = dtensor.parts_of(value)
    if any(part.is_meta for part in parts):
        raise StateError(key=key, message="a tensor on the meta device: it has no data. Materialise it first")
    for part in parts:
        refuse_short(key, part)
    if dtensor.is_sharded(value):  # a ShardedTensor answers no such question
        return
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        raise StateError(key=key, message="a sparse, quantized or nested tensor beside sharded ones")


def _refuse_other_keys(where: str, value: object) -> None:
    # DCP joins the keys of nested mappings to names: others than text would come back as text.
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value if isinstance(value, list | tuple) else ())
    for key, inner in pairs:
        if isinstance(value, Mapping) and not isinstance(key, str):
            raise StateError(key=f"{where}[{key!r}]", message="beside sharded tensors the keys must be text")
        _refuse_other_keys(f"{where}[{key!r}]", inner)
