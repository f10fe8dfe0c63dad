"""The index sampler of a loader, from a place on."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler

from safe_ckpt.data import generators, order, seeding
from safe_ckpt.data.facts import draws_itself

_GLOBAL = "process"
_END = object()


class Remaining:
    """The index sampler of a loader from its place on. Its loader may hold the iterator that holds this."""

    def __init__(self, loader: Any, given: Any) -> None:
        self._loader = weakref.ref(loader)
        self._given = given

    def __len__(self) -> int:
        return len(self._given)

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader()
        if loader is None or loader._asked_in_vain():
            return iter(())
        given = self._given
        # A sampler of somebody's own may draw in its ``__iter__``, which torch calls before it draws itself.
        at_once = type(given) is not BatchSampler and not order.is_known(given)
        batches = self._from_the_place(loader) if at_once else _lazily(self, weakref.ref(loader))
        token = loader._place.token
        return batches if token is None else seeding.marked(batches, token, batched=loader.batch_sampler is not None)

    def _from_the_place(self, loader: Any) -> Iterator[Any]:
        given, place = self._given, loader._place
        loader._found = True
        loader._take_back_draws()
        plain = type(given) is BatchSampler
        sampler = given.sampler if plain else given
        start = place.first_sample if place.each else place.first_batch
        seed = place.seed
        if order.draws_seed(sampler) and seed is None:
            seed = order.draw_seed()
            loader._place = dataclasses.replace(loader._place, seed=seed)
        own = draws_itself(sampler)
        indices = self._drawn(loader, sampler, start) if own else order.indices(sampler, start, seed=seed)
        return order.batches(given, indices) if plain else indices

    def _drawn(self, loader: Any, sampler: Any, start: int) -> Iterator[Any]:
        """From the generators of this process, as they were when the epoch began."""
        name = generators.TORCH if order.is_known(sampler) else _GLOBAL
        saved = loader._place.generators.get(name)
        if saved is None:
            before = _state(name)
            indices = order.indices(sampler, start)
            if before == _state(name):  # it draws when the first index is asked for
                return _noting(indices, weakref.ref(loader), name)
            loader._drawn = {**loader._drawn, name: before}
            return indices
        with generators.borrowed():
            generators.put_back(None, saved) if name == generators.TORCH else generators.put_all_back(saved)
            indices = order.indices(sampler, start)
            return _borrowing(indices, generators.taken())


def _lazily(remaining: Remaining, loader: Any) -> Iterator[Any]:
    """A generator, as torch's own samplers are: they draw when the first index is asked for."""
    held = loader()
    if held is None:
        return
    indices = remaining._from_the_place(held)
    del held  # a generator that waits must not keep it
    yield from indices


def _noting(indices: Iterator[Any], loader: Any, name: str) -> Iterator[Any]:
    """The same, once it was noted what the generators were before the first one."""
    held = loader()
    if held is not None:
        held._drawn = {**held._drawn, name: _state(name)}
    del held
    yield from indices


def _borrowing(indices: Iterator[Any], then: tuple[Any, Any, Any]) -> Iterator[Any]:
    """The same, the first one drawn with the generators at ``then``. torch asks for two orders, and uses one of them only."""
    with generators.borrowed():
        generators.set_to(then)
        first = next(indices, _END)
    if first is not _END:
        yield first
        yield from indices


def _state(name: str) -> str:
    return generators.to_text(torch.get_rng_state()) if name == generators.TORCH else generators.all_to_text()
