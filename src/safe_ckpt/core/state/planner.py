"""Plans a state, and remembers how: what is as it was at the save before is not planned again.

A plan is remembered without its tensors. Its place is taken by the fingerprint of the item: where that is the same, so are all
names, types, shapes, addresses and ties, and the old plan with the tensors of today is what planning would return. Numbers such
as a learning rate are put to their places in it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch

from safe_ckpt.core.changing import unchanging
from safe_ckpt.core.formats.file_template import FileTemplate, numbers_of
from safe_ckpt.core.formats.torch_archive import with_floats
from safe_ckpt.core.sharding import dtensor
from safe_ckpt.core.sharding.dtensor import ShardedItem
from safe_ckpt.core.staging.overlap import OverlapPlan
from safe_ckpt.core.state import fingerprint, plan
from safe_ckpt.core.state.fingerprint import Fingerprint, Remembered
from safe_ckpt.core.state.held import held
from safe_ckpt.core.state.plan import Item, PerRank, Plan
from safe_ckpt.errors import StateError


@dataclass(frozen=True, kw_only=True, eq=False)
class _Known:
    """One item as it was planned last.

    Attributes:
        remembered: tells whether it is still the same.
        per_rank: whether it was ``PerRank``.
        held: see ``Plan``.
        item: its plan, without tensors; None where this rank writes nothing of it.
        templates: how its files get the tensors of today.
        float_bytes: the floats that are in it.
    """

    remembered: Remembered
    per_rank: bool
    held: Sequence[str] = ()
    item: Item | None = None
    templates: Sequence[FileTemplate] = ()
    float_bytes: bytes = b""


class Planner:
    """Plans the states that one ``Checkpointer`` saves. Used on the thread that trains.

    Args:
        rank: this rank.
        apart: whether what is not trained goes to files of its own, where that is much.
    """

    def __init__(self, rank: int, *, apart: bool = False) -> None:
        self._rank = rank
        self._apart = apart
        self._known: dict[str, _Known] = {}
        self._held: dict[str, Sequence[str]] = {}
        self._overlap: tuple[object, OverlapPlan, Sequence[int]] | None = None

    def plan(self, state: Mapping[str, Any]) -> Plan:
        """Plan the files of this rank: what is shared on rank 0, what is per rank on every rank, what is sharded by all.

        Where an item is not known, its ``state_dict()`` is called on every rank, because of sharded objects it is a collective.

        Raises:
            StateError: something cannot be saved; names it.
        """
        if not isinstance(state, Mapping):
            raise StateError(key="state", message=f"expected a mapping of names to objects, got {type(state).__name__}")
        plan.check_names(state)
        views: dict[str, Fingerprint] = {}
        items: list[Item] = []
        sharded: dict[str, ShardedItem] = {}
        self._held = {}
        try:
            for name in plan.optimizers_last(state):
                value = state[name]
                with unchanging(name):
                    now = self._fingerprint(value.value if isinstance(value, PerRank) else value, state, views)
                    found = self._one(name, value, state, now)
                if now is not None and name in self._known:
                    views[name] = now
                if isinstance(found, ShardedItem):
                    sharded[name] = found
                elif found is not None:
                    items.append(found)
            plan.check_folders(sharded, state)
        finally:
            self._known = {name: known for name, known in self._known.items() if name in state}
        return Plan(items=items, sharded=sharded, views=views, held=self._held)

    def trained(self, state: Mapping[str, Any], views: Mapping[str, Any]) -> list[Any] | None:
        """Equal for two states only if the same parameters of their modules are trained; None where that is not known.

        Args:
            state: as it was planned last.
            views: of that plan.
        """
        names = plan.modules_of(state).keys()
        if not names <= views.keys():
            return None
        return [(name, list(map(attrgetter("requires_grad"), views[name].whole))) for name in names]

    def overlap(self, state: Mapping[str, Any], views: Mapping[str, Any]) -> OverlapPlan | None:
        """Which tensors of a state may be copied after ``save`` has returned; None for none.

        Args:
            state: as it was planned last.
            views: of that plan.
        """
        named = {n: value.value if isinstance(value, PerRank) else value for n, value in state.items()}
        modules = {n: value for n, value in named.items() if isinstance(value, torch.nn.Module)}
        optimizers = {n: value for n, value in named.items() if isinstance(value, torch.optim.Optimizer)}
        names = [*modules, *optimizers]
        chosen = [views[name] for name in names if name in views]
        if len(chosen) < len(names) or any(map(_may_change_elsewhere, chosen)):
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

    def _one(
        self, name: str, value: Any, state: Mapping[str, Any], now: Fingerprint | None
    ) -> Item | ShardedItem | None:
        per_rank = isinstance(value, PerRank)
        inner = value.value if per_rank else value
        known = self._still_known(name, now, per_rank=per_rank)
        if now is not None and now.sharded and not per_rank:
            return self._sharded(name, inner, lambda: plan.resolve(name, inner, state)[0], now, known)
        if now is not None and known is not None:
            again = _again(known, now)
            if again is not None or known.item is None:
                if not per_rank:
                    self._held[name] = known.held
                return again
        resolved, form = plan.resolve(name, value, state)
        # An optimizer of sharded parameters has no sharded state before its first step.
        sharded = dtensor.has_sharded(resolved) or (
            isinstance(inner, torch.optim.Optimizer) and dtensor.has_sharded(inner)
        )
        if not per_rank and sharded:
            self._known.pop(name, None)
            return ShardedItem.of(resolved, functools.partial(self._frozen, inner))
        if not per_rank:
            self._held[name] = held(inner, resolved)
        item = None
        if self._rank == 0 or per_rank:
            own, frozen = (self._rank, frozenset()) if per_rank else (None, self._frozen(inner))
            item = plan.plan_item(name, resolved, form, own, floats=now is not None, frozen=frozen)
        return self._keep(name, item, now, per_rank=per_rank)

    def _fingerprint(
        self, inner: Any, state: Mapping[str, Any], views: Mapping[str, Fingerprint]
    ) -> Fingerprint | None:
        now = fingerprint.of(inner)
        if now is not None and now.sharded and isinstance(inner, torch.optim.Optimizer):
            now = self._by_names(now, inner, state, views)
        return now

    def _by_names(
        self,
        now: Fingerprint,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        views: Mapping[str, Fingerprint],
    ) -> Fingerprint | None:
        """Its state is saved by the names of its parameters: those, too, must be as they were."""
        modules = list(plan.modules_of(state))
        if not all(name in views for name in modules):
            return None
        numbers = _numbered(views[name] for name in modules)
        owners = [numbers.get(id(p)) for group in optimizer.param_groups for p in group["params"]]
        if None in owners:
            return None
        facts = (*now.facts, owners, modules, [self._known[name].remembered for name in modules])
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
            now, model = fingerprint.of(state), models.get(name)
            frozen = functools.partial(self._frozen_within, state, model)
            if now is None:
                items[name] = ShardedItem.of(state, frozen)
            else:
                # A state dict does not tell what is trained.
                trained = [one.requires_grad for one in model.parameters()] if self._apart and model is not None else []
                now = dataclasses.replace(now, facts=(*now.facts, trained))
                known = self._still_known(name, now)
                item = self._sharded(name, state, functools.partial(dict, state), now, known)
                items[name] = dataclasses.replace(item, frozen=frozen)
        return items

    def _still_known(self, name: str, now: Fingerprint | None, *, per_rank: bool = False) -> _Known | None:
        """What is known of an item, if it is as it was."""
        known = self._known.get(name)
        if now is None or known is None or known.per_rank != per_rank or not known.remembered.same_as(now):
            return None
        return known

    def _sharded(
        self, name: str, inner: Any, state_dict: Callable[[], Any], now: Fingerprint, known: _Known | None
    ) -> ShardedItem:
        remembered = known.remembered if known is not None else now.remember()
        if remembered is None:
            self._known.pop(name, None)
        else:
            self._known[name] = _Known(remembered=remembered, per_rank=False)
        return ShardedItem(
            state_dict=state_dict,
            known=remembered,
            tensors=now.tensors,
            floats=now.float_bytes,
            at=functools.partial(_at, inner),
            frozen=functools.partial(self._frozen, inner),
        )

    def _frozen(self, value: Any) -> frozenset[str]:
        return plan.frozen_names(value) if self._apart and isinstance(value, torch.nn.Module) else frozenset()

    def _frozen_within(self, state: Mapping[str, Any], model: torch.nn.Module | None) -> frozenset[str]:
        names = self._frozen(model)
        inner = [key for key, value in state.items() if isinstance(value, Mapping)] if names else ()
        return frozenset(f"{key}.{name}" for key in inner for name in names)

    def _keep(self, name: str, item: Item | None, now: Fingerprint | None, *, per_rank: bool) -> Item | None:
        self._known.pop(name, None)
        remembered = now.remember() if now is not None else None
        if now is None or remembered is None:
            return item
        if item is None:
            self._known[name] = _Known(remembered=remembered, per_rank=per_rank, held=self._held.get(name, ()))
            return None
        templates = []
        for image in item.images:
            template = FileTemplate.of(image, now.tensors)
            if template is None:
                return item
            templates.append(template)
        pairs = zip(item.images, templates, strict=True)
        images = tuple(dataclasses.replace(template.image, tensors=image.tensors) for image, template in pairs)
        item = dataclasses.replace(item, images=images)
        self._known[name] = _Known(
            remembered=remembered,
            per_rank=per_rank,
            held=self._held.get(name, ()),
            item=dataclasses.replace(item, images=tuple(template.image for template in templates)),
            templates=templates,
            float_bytes=now.float_bytes,
        )
        return item


def _again(known: _Known, now: Fingerprint) -> Item | None:
    """The item's plan with the tensors and the floats of today; None if that cannot be had from the known one."""
    if known.item is None or not known.templates:
        return None
    if now.float_bytes == known.float_bytes:
        images = tuple(template.filled(now.tensors) for template in known.templates)
        return dataclasses.replace(known.item, images=images)
    image = known.templates[0].image  # only a single file has floats in it
    if image.floats is None or 8 * len(image.floats) != len(now.float_bytes):
        return None
    last = [with_floats(image.pieces[-1][1], image.floats, now.float_bytes)]
    return dataclasses.replace(known.item, images=(known.templates[0].filled(now.tensors, last),))


def _at(value: Any, path: Sequence[Any]) -> Any:
    """What lies at a path of an item's state dict and has floats in it: of an optimizer that is in its groups."""
    if isinstance(value, torch.optim.Optimizer):
        value = {"param_groups": value.param_groups}
    for key in path:
        value = value[key]
    return value


def _numbered(views: Iterable[Fingerprint]) -> dict[int, int]:
    """The number of every tensor of some modules, by its ``id``."""
    return {id(tensor): number for number, tensor in enumerate(chain.from_iterable(view.whole for view in views))}


def _may_change_elsewhere(view: Fingerprint) -> bool:
    """Whether a parameter may change outside its optimizer's step, which a fingerprint does not tell."""
    return view.normed or any(map(attrgetter("_post_accumulate_grad_hooks"), view.whole))
