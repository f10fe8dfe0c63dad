"""Plans a state, and remembers how: what is as it was at the save before is not planned again.

A plan is remembered without its tensors. Its place is taken by the fingerprint of the item: where that is the same, so are all
names, types, shapes, addresses and ties, and the old plan with the tensors of today is what planning would return. Numbers such
as a learning rate are put to their places in it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch

from safe_ckpt.core.formats import file_plan, hugging_face, safetensors, torch_archive
from safe_ckpt.core.formats.file_plan import LEAST_SHARED_BYTES, FilePlan, FileTemplate, numbers_of
from safe_ckpt.core.formats.refusals import unchanging
from safe_ckpt.core.formats.torch_archive import with_floats
from safe_ckpt.core.sharding import dtensor
from safe_ckpt.core.sharding.dtensor import ShardedItem, is_extra_state
from safe_ckpt.core.state.fingerprint import Fingerprint, Remembered
from safe_ckpt.core.state.items import SavedItem, check_folders, frozen_names, modules_of
from safe_ckpt.core.state.overlap import OverlapPlan
from safe_ckpt.errors import DesyncError, StateError

SHARDED = "sharded"
_OF_RANK = re.compile(r"(?i)rank[\W_]*\d")
_MOST_NAMES = 64


class Models:
    """The modules that a save is of.

    Args:
        find: returns them by name; "" for the only one. It may raise, and is asked once somebody wants to know.
        same: equal to that of another save only if the modules have the same names in them, and the same of them is trained;
            None to look at all of them.
    """

    def __init__(self, find: Callable[[], Mapping[str, torch.nn.Module]], same: object = None) -> None:
        self._find = find
        self._same = same

    @functools.cached_property
    def modules(self) -> Mapping[str, torch.nn.Module]:
        """The modules by name."""
        return self._find()

    @functools.cached_property
    def view(self) -> object:
        """Equal for two saves only if their modules have the same names in them, and the same of them is trained."""
        if self._same is not None:
            return self._same
        return [
            (
                key,
                [(name, parameter.requires_grad) for name, parameter in module.named_parameters()],
                [name for name, _ in module.named_buffers()],
            )
            for key, module in self.modules.items()
        ]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of what this rank saves of a state.

    Attributes:
        files: those that it writes, but for what is sharded.
        sharded: items of which every rank has a part; the same names on all ranks.
        described: what the manifest says of this rank's items.
        models: the modules.
        overlap: which tensors may be copied after the save has returned; None for none.
        held: what this rank holds of the items that rank 0 saves for all; see ``held_by_this_rank``.
    """

    files: Sequence[FilePlan] = ()
    sharded: Mapping[str, ShardedItem] = field(default_factory=dict)
    described: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    models: Models = field(default_factory=lambda: Models(dict))
    overlap: OverlapPlan | None = None
    held: Mapping[str, Sequence[str]] = field(default_factory=dict)


def plan_item(
    item: SavedItem, resolved: Any, rank: int, *, floats: bool = False, frozen: frozenset[str] = frozenset()
) -> list[FilePlan]:
    """Plan one item: one file, or several if much of it is not trained. The first leads to the others.

    Args:
        item: of the state.
        resolved: what is saved of it.
        rank: this rank.
        floats: see ``torch_plan``.
        frozen: the names of its tensors that are not trained.

    Raises:
        StateError: it cannot be saved; names where.
    """
    stem = f"{item.name}.rank{rank:05d}" if item.per_rank else item.name
    try:
        return _plans(stem, resolved, item.key, floats=floats, frozen=frozen)
    except (RecursionError, ValueError) as error:  # a cycle; a number of more digits than Python prints
        raise StateError(key=item.key, message=f"{type(error).__name__}: {error}") from error


def _plans(stem: str, inner: Any, key: str, *, floats: bool, frozen: frozenset[str]) -> list[FilePlan]:
    if safetensors.fits_safetensors(inner):
        named = {name for name in inner if hugging_face.is_named(name, frozen)} if frozen else frozen
        apart = hugging_face.frozen_apart(stem, inner, named, LEAST_SHARED_BYTES) if named else []
        if apart:
            return apart
        file = safetensors.safetensors_plan(f"{stem}.safetensors", inner)
        return [dataclasses.replace(file, frozen=named.issuperset(inner))]
    if file_plan.is_exact_json(inner):
        return [file_plan.json_plan(f"{stem}.json", inner)]
    return [torch_archive.torch_plan(f"{stem}.pt", inner, strict=True, key=key, floats=floats)]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Known:
    """One item as it was planned last.

    Attributes:
        remembered: tells whether it is still the same.
        per_rank: whether it was ``PerRank``.
        held: see ``Plan``; empty where that is not compared.
        templates: its files, without tensors, and how they get those of today. Empty where this rank writes nothing of it.
        float_bytes: the floats that are in it.
    """

    remembered: Remembered
    per_rank: bool
    held: Sequence[str] = ()
    templates: Sequence[FileTemplate] = ()
    float_bytes: bytes = b""


class Planner:
    """Plans the states that one ``Checkpointer`` saves. Used on the thread that trains.

    Args:
        rank: this rank.
        frozen_apart: whether what is not trained goes to files of its own, where that is much.
        overlapped: whether tensors are copied after the save has returned.
        alone: there is no other rank that could hold something else.
    """

    def __init__(self, rank: int, *, frozen_apart: bool = False, overlapped: bool = False, alone: bool = False) -> None:
        self._rank = rank
        self._frozen_apart = frozen_apart
        self._overlapped = overlapped
        self._alone = alone
        self._known: dict[str, _Known] = {}
        self._held: dict[str, Sequence[str]] = {}
        self._overlap: tuple[object, OverlapPlan, Sequence[int]] | None = None

    def plan(self, items: Sequence[SavedItem]) -> Plan:
        """Plan the files of this rank: what is shared on rank 0, what is per rank on every rank, what is sharded by all.

        Where an item is not known, its ``state_dict()`` is called on every rank, because of sharded objects it is a collective.

        Args:
            items: those of the state; see ``items_of``.

        Raises:
            StateError: something cannot be saved; names it.
        """
        modules = modules_of(items)
        self._refuse_local_parts(items, modules)
        views: dict[str, Fingerprint] = {}
        files: list[FilePlan] = []
        described: dict[str, Mapping[str, Any]] = {}
        sharded: dict[str, ShardedItem] = {}
        self._held = {}
        try:
            for item in items:
                with unchanging(item.name):
                    now = self._fingerprint(item, views)
                    found = self._one(item, now)
                if now is not None and item.name in self._known:
                    views[item.name] = now
                if isinstance(found, ShardedItem):
                    sharded[item.name] = found
                    if self._rank == 0:
                        described[item.name] = {"file": item.name, "per_rank": False, "form": SHARDED}
                elif found:
                    files += found
                    described[item.name] = {"file": found[0].path, "per_rank": item.per_rank, "form": item.form}
            check_folders(sharded, [item.name for item in items])
        finally:
            names = {item.name for item in items}
            self._known = {name: known for name, known in self._known.items() if name in names}
        same = [(name, self._known[name].remembered) for name in modules] if modules.keys() <= views.keys() else None
        return Plan(
            files=files,
            sharded=sharded,
            described=described,
            models=Models(lambda: modules, same),
            overlap=self._overlap_plan(items, views) if self._overlapped else None,
            held=self._held,
        )

    def _refuse_local_parts(self, items: Sequence[SavedItem], modules: Mapping[str, torch.nn.Module]) -> None:
        """An optimizer's state dict whose tensors are all plain is no sharded item: rank 0's would be taken for all."""
        data = {item.name: item.value for item in items if type(item) is SavedItem and not item.per_rank}
        fresh = False
        for name, value in data.items():
            with unchanging(name):
                fresh |= name not in self._known and any(
                    isinstance(one, torch.Tensor) for one in dtensor.leaves_of(value)
                )
        if fresh and dtensor.dtensor_class():  # else no module is walked
            data[""] = {name: dict(one.named_parameters()) for name, one in modules.items()}
            found: list[tuple[tuple[Any, ...], Any]] = []
            for name, value in data.items():
                with unchanging(name or "the modules"):
                    found += dtensor.placed({name: value})
            dtensor.refuse_local_among(found)

    def _overlap_plan(self, items: Sequence[SavedItem], views: Mapping[str, Fingerprint]) -> OverlapPlan | None:
        modules = {item.name: item.module for item in items if item.module is not None}
        optimizers = {item.name: item.optimizer for item in items if item.optimizer is not None}
        names = [*modules, *optimizers]
        chosen = [views[name] for name in names if name in views]
        # A parameter may change outside its optimizer's step, which a fingerprint does not tell.
        hooks = attrgetter("_post_accumulate_grad_hooks")
        if len(chosen) < len(names) or any(view.normed or any(map(hooks, view.whole)) for view in chosen):
            self._overlap = None
            return OverlapPlan(modules.values(), optimizers.values()) or None
        numbers = _numbered(views[name] for name in modules)
        stepped = [list(map(numbers.get, map(id, views[name].whole))) for name in optimizers]
        key = [(name, self._known[name].remembered) for name in names], stepped
        tensors = list(chain.from_iterable(view.tensors for view in chosen))
        if self._overlap is not None and self._overlap[0] == key:
            _, known, chosen_ones = self._overlap
            return known.renewed(list(map(tensors.__getitem__, chosen_ones))) or None
        made = OverlapPlan(modules.values(), optimizers.values())
        found = numbers_of(made.watched, tensors)
        self._overlap = None if found is None else (key, made.renewed(()), found)
        return made or None

    def _one(self, item: SavedItem, now: Fingerprint | None) -> Sequence[FilePlan] | ShardedItem:
        def frozen_below() -> frozenset[str]:
            return frozenset(f"{item.name}.{name}" for name in self._frozen(item))

        known = self._still_known(item, now)
        if now is not None and now.sharded and not item.per_rank:
            found = self._sharded(item, lambda: item.below(item.state()), now, known)
            return dataclasses.replace(found, at=lambda path: item.at(path[1:]), frozen=frozen_below)
        if now is not None and known is not None:
            again = _again(known, now)
            if again is not None:
                if known.held:
                    self._held[item.name] = known.held
                return again
        resolved = item.state()
        if not item.per_rank:
            # An optimizer of sharded parameters has no sharded state before its first step.
            if dtensor.any_sharded(dtensor.leaves_of(resolved)) or (item.optimizer is not None and item.sharded):
                self._known.pop(item.name, None)
                return ShardedItem.of(item.below(resolved), frozen_below)
            if not self._alone:
                self._held[item.name] = held_by_this_rank(item, resolved)
        planned: Sequence[FilePlan] = ()
        if self._rank == 0 or item.per_rank:
            frozen = frozenset() if item.per_rank else self._frozen(item)
            planned = plan_item(item, resolved, self._rank, floats=now is not None, frozen=frozen)
        return self._keep(item, planned, now)

    def _fingerprint(self, item: SavedItem, views: Mapping[str, Fingerprint]) -> Fingerprint | None:
        now = item.fingerprint()
        if now is None or not now.sharded or item.optimizer is None:
            return now
        # Its state is saved by the names of its parameters: those, too, must be as they were.
        if not all(name in views for name in item.modules):
            return None
        numbers = _numbered(views[name] for name in item.modules)
        owners = [numbers.get(id(p)) for group in item.optimizer.param_groups for p in group["params"]]
        if None in owners:
            return None
        facts = (*now.facts, owners, list(item.modules), [self._known[name].remembered for name in item.modules])
        return dataclasses.replace(now, facts=facts)

    def sharded_states(
        self, states: Mapping[str, Any], models: Mapping[str, torch.nn.Module] = MappingProxyType({})
    ) -> dict[str, ShardedItem]:
        """Sharded state dicts by name, for a ``ShardPlanner``, with what is known of them. Instead of ``plan``.

        Args:
            states: the state dicts.
            models: of some of the same names, the modules whose state dicts are values of those.
        """
        items = {}
        for name, state in states.items():
            item, model = SavedItem(name, state), models.get(name)
            now = item.fingerprint()
            frozen = functools.partial(self._frozen_within, state, model)
            if now is None:
                items[name] = ShardedItem.of(state, frozen)
            else:
                # A state dict does not tell what is trained.
                trained = (
                    [one.requires_grad for one in model.parameters()]
                    if self._frozen_apart and model is not None
                    else []
                )
                now = dataclasses.replace(now, facts=(*now.facts, trained))
                known = self._still_known(item, now)
                found = self._sharded(item, functools.partial(dict, state), now, known)
                items[name] = dataclasses.replace(found, frozen=frozen)
        return items

    def _still_known(self, item: SavedItem, now: Fingerprint | None) -> _Known | None:
        """Return what is known of an item, if it is as it was."""
        known = self._known.get(item.name)
        if now is None or known is None or known.per_rank != item.per_rank or not known.remembered.same_as(now):
            return None
        return known

    def _sharded(
        self, item: SavedItem, state_dict: Callable[[], Any], now: Fingerprint, known: _Known | None
    ) -> ShardedItem:
        remembered = known.remembered if known is not None else now.remember()
        if remembered is None:
            self._known.pop(item.name, None)
        else:
            self._known[item.name] = _Known(remembered=remembered, per_rank=False)
        return ShardedItem(
            state_dict=state_dict,
            known=remembered,
            tensors=now.tensors,
            floats=now.float_bytes,
            at=item.at,
        )

    def _frozen(self, item: SavedItem) -> frozenset[str]:
        return item.frozen_names() if self._frozen_apart else frozenset()

    def _frozen_within(self, state: Mapping[str, Any], model: torch.nn.Module | None) -> frozenset[str]:
        names = frozen_names(model) if self._frozen_apart and model is not None else ()
        inner = [key for key, value in state.items() if isinstance(value, Mapping)] if names else ()
        return frozenset(names).intersection(state).union(f"{key}.{name}" for key in inner for name in names)

    def _keep(self, item: SavedItem, files: Sequence[FilePlan], now: Fingerprint | None) -> Sequence[FilePlan]:
        self._known.pop(item.name, None)
        remembered = now.remember() if now is not None else None
        if now is None or remembered is None:
            return files
        templates, laid_out = FileTemplate.of_all(files, now.tensors)
        if len(templates) < len(files):
            return files
        self._known[item.name] = _Known(
            remembered=remembered,
            per_rank=item.per_rank,
            held=self._held.get(item.name, ()),
            templates=templates,
            float_bytes=now.float_bytes,
        )
        return laid_out


def _again(known: _Known, now: Fingerprint) -> list[FilePlan] | None:
    """The item's files with the tensors and the floats of today; None if that cannot be had from the known ones."""
    if now.float_bytes == known.float_bytes or not known.templates:
        return [template.filled(now.tensors) for template in known.templates]
    file = known.templates[0].plan  # only a single file has floats in it
    if file.floats is None or 8 * len(file.floats) != len(now.float_bytes):
        return None
    last = [with_floats(file.pieces[-1][1], file.floats, now.float_bytes)]
    return [known.templates[0].filled(now.tensors, last)]


def _numbered(views: Iterable[Fingerprint]) -> dict[int, int]:
    """The number of every tensor of some modules, by its ``id``."""
    return {id(tensor): number for number, tensor in enumerate(chain.from_iterable(view.whole for view in views))}


def held_by_this_rank(item: SavedItem, resolved: Any) -> list[str]:
    """List what this rank holds of an item that rank 0 saves alone: a kind, and a text for the tensors; empty for nothing.

    The values are those of rank 0. A rank that holds other tensors, such as a pipeline's next stage, would lose them. So would
    one that holds something under a name of its own rank, such as ``dp_rank_1``: those names come behind.

    Args:
        item: of the state.
        resolved: what would be saved of it.
    """
    found = list(dtensor.placed(resolved, tuples=True))
    own = list(filter(_OF_RANK.search, sorted({str(key) for path, _ in found for key in path})))
    if len(own) > _MOST_NAMES:  # as of all ranks
        own = []
    facts = [_fact(path, leaf) for path, leaf in found if isinstance(leaf, torch.Tensor)]
    if item.optimizer is not None:
        facts.append(f"groups of {[len(group['params']) for group in item.optimizer.param_groups]} parameters")
    if not facts:
        return [item.kind, "", *own]
    facts.sort()
    digest = hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()
    return [item.kind, f"{len(facts)} names, such as {facts[0]:.80} (digest {digest})", *own]


def refuse_unsaved(by_rank: Mapping[int, Mapping[str, list[str]]]) -> None:
    """Refuse what a rank holds and rank 0 does not.

    Args:
        by_rank: what ``held_by_this_rank`` returned on every rank, by item.

    Raises:
        DesyncError: names the first such item, and what the ranks hold.
    """
    for name, (kind, tensors, *own) in by_rank[0].items():
        for other in (holds[name] for rank, holds in sorted(by_rank.items()) if rank):
            lost = other[0] != kind or (other[1] and other[1] != tensors) or not set(own).issuperset(other[2:])
            if other[0] and lost:
                values = {str(rank): " with ".join(filter(None, holds[name])) for rank, holds in by_rank.items()}
                raise DesyncError(what=f"state[{name!r}]", values=values)


def _fact(path: Sequence[Any], tensor: torch.Tensor) -> str:
    """Name, type and shape of a tensor."""
    if path and is_extra_state(str(path[-1])):  # of any size
        return repr(path)
    try:
        return f"{path!r} {tensor.dtype} {tuple(tensor.shape)}"
    except RuntimeError:  # such as of a nested tensor
        return f"{path!r} {tensor.dtype} {tensor.layout}"
