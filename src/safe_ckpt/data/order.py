"""In which order samplers give the indices of an epoch, from any place on, without giving those before it.

The samplers of torch are done again here: what they draw is the same, number for number, and the place is found by counting.
Any other sampler is asked for its indices anew, and those before the place are dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

_CHUNK = 4096  # indices that are made at a time: as lists they take ten times as much memory
_DRAWN_AT_ONCE = 32  # by torch.utils.data.RandomSampler with replacement


def is_known(sampler: object) -> bool:
    """Whether a sampler is done again here; not a subclass, which may give other indices."""
    return type(sampler) in (
        SequentialSampler,
        RandomSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
        DistributedSampler,
    )


def is_spread(sampler: object) -> bool:
    """Whether all ranks together give the indices of one order."""
    return type(sampler) is DistributedSampler


def draws_seed(sampler: object) -> bool:
    """Whether it makes a generator of its own for each epoch, from one number of torch's."""
    return type(sampler) is RandomSampler and sampler.generator is None


def draw_seed() -> int:
    """The number that ``torch.utils.data.RandomSampler`` draws at the start of an epoch."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


def indices(sampler: Any, start: int, *, seed: int | None = None) -> Iterator[int]:
    """The indices of an epoch from one place on.

    Args:
        sampler: what gives them. Its generator, or torch's where it has none, must be as it was at the start of the epoch.
        start: how many of them to leave out; with a ``DistributedSampler``, of those of all ranks together.
        seed: what ``draw_seed`` gave for this epoch, where ``draws_seed``.
    """
    kind = type(sampler)
    if kind is SequentialSampler:
        return iter(range(start, len(sampler.data_source)))
    if kind is RandomSampler:
        generator = sampler.generator if seed is None else torch.Generator().manual_seed(seed)
        return _random(
            len(sampler.data_source), sampler.num_samples, start, generator, sampler.replacement, seed is None
        )
    if kind is SubsetRandomSampler:
        order = torch.randperm(len(sampler.indices), generator=sampler.generator)
        return (sampler.indices[at] for at in _from(order, start))
    if kind is WeightedRandomSampler:
        drawn = torch.multinomial(
            sampler.weights, sampler.num_samples, sampler.replacement, generator=sampler.generator
        )
        return _from(drawn, start)
    if kind is DistributedSampler:
        return _spread(sampler, start)
    return itertools.islice(iter(sampler), start, None)


def count(sampler: Any, start: int) -> int:
    """How many indices ``indices`` gives.

    Raises:
        TypeError: the sampler has no length.
    """
    if is_spread(sampler):
        left, size = max(0, len(sampler.dataset) - start), sampler.num_replicas
        return int(left // size if sampler.drop_last else -(-left // size))
    return max(0, len(sampler) - start)


def batches(sampler: Any, given: Iterable[int]) -> Iterator[list[int]]:
    """As ``torch.utils.data.BatchSampler`` has them.

    Args:
        sampler: the ``BatchSampler``.
        given: the indices.
    """
    return iter(BatchSampler(given, sampler.batch_size, sampler.drop_last))


def _from(order: torch.Tensor, start: int) -> Iterator[int]:
    for at in range(start, len(order), _CHUNK):
        yield from order[at : at + _CHUNK].tolist()


def _random(
    size: int, total: int, start: int, generator: torch.Generator | None, replacement: bool, own: bool
) -> Iterator[int]:
    if replacement:
        for begin in range(0, total, _DRAWN_AT_ONCE):
            drawn = torch.randint(size, (min(_DRAWN_AT_ONCE, total - begin),), dtype=torch.int64, generator=generator)
            if begin + _DRAWN_AT_ONCE > start:
                yield from drawn[max(0, start - begin) :].tolist()
        return
    for begin in range(0, total, size):
        order = torch.randperm(size, generator=generator)
        if begin + size > start:
            yield from _from(order[: total - begin], max(0, start - begin))
    if total % size == 0 and own:
        torch.randperm(size, generator=generator)  # torch draws one more, which the next epoch's generator shows


def _spread(sampler: Any, start: int) -> Iterator[int]:
    """What is left of the order, taken in turns. It is filled up, or cut off, so that all ranks get as many."""
    size, ranks = len(sampler.dataset), sampler.num_replicas
    order = torch.arange(size)
    if sampler.shuffle:
        order = torch.randperm(size, generator=torch.Generator().manual_seed(sampler.seed + sampler.epoch))
    total = count(sampler, start) * ranks
    left = order[start : start + total]
    missing = total - len(left)
    if missing > 0:
        left = torch.cat([left, order.repeat(-(-missing // size))[:missing]])
    return _from(left[sampler.rank :: ranks], 0)
