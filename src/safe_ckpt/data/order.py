"""The order in which samplers give the indices of an epoch, from any place on, without giving those before it.

The samplers of torch are done again here: what they draw is the same, number for number, and the place is found by counting.
Any other sampler is asked for its indices anew, and those before the place are dropped. Below: what else of a DataLoader its
place depends on.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from safe_ckpt.core.coordination.process_groups import world_rank
from safe_ckpt.core.state import rng
from safe_ckpt.data.position import Position

logger = logging.getLogger(__name__)
_CHUNK = 4096  # indices that are made at a time: as lists they take ten times as much memory
_DRAWN_AT_ONCE = 32  # by torch.utils.data.RandomSampler with replacement
_DEEP = 6  # samplers in samplers


def can_repeat(sampler: object) -> bool:
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
    """The rest of the order, taken in turns. It is filled up, or cut off, so that all ranks get as many."""
    size, ranks = len(sampler.dataset), sampler.num_replicas
    order = torch.arange(size)
    if sampler.shuffle:
        order = torch.randperm(size, generator=torch.Generator().manual_seed(sampler.seed + sampler.epoch))
    rest = max(0, size - start)
    total = (rest // ranks if sampler.drop_last else -(-rest // ranks)) * ranks
    left = order[start : start + total]
    missing = total - len(left)
    if missing > 0:
        left = torch.cat([left, order.repeat(-(-missing // size))[:missing]])
    return _from(left[sampler.rank :: ranks], 0)


def is_map(loader: Any) -> bool:
    """Whether its data set gives samples by index."""
    return not isinstance(loader.__dict__["dataset"], IterableDataset)


def is_placed(loader: Any) -> bool:
    """Whether its data set is iterable, and knows its place."""
    dataset = loader.__dict__["dataset"]
    return not is_map(loader) and hasattr(dataset, "load_state_dict") and _is_asked_plainly(dataset, "state_dict")


def loses_its_buffer(loader: Any) -> bool:
    """Whether its data set says itself that a resume loses samples: ``datasets`` does not save what is in a shuffle buffer."""
    step = getattr(loader.__dict__["dataset"], "_ex_iterable", None)
    while step is not None and type(step).__name__ != "BufferShuffledExamplesIterable":
        step = getattr(step, "ex_iterable", None)
    return step is not None


def sampler_of(loader: Any) -> Any:
    """The sampler of single indices where there is one, else ``order_of``."""
    given = order_of(loader)
    return given.sampler if type(given) is BatchSampler else given


def order_of(loader: Any) -> Any:
    """The sampler that the loader asks: for batches of indices, or for one at a time."""
    return loader.batch_sampler if loader.batch_sampler is not None else loader.sampler


def draws_itself(sampler: Any) -> bool:
    """Whether it draws from the generators of this process, so that they must be known."""
    if can_repeat(sampler):
        own = is_spread(sampler) or draws_seed(sampler) or type(sampler) is SequentialSampler
        return not own and getattr(sampler, "generator", None) is None
    return not isinstance(sampler, list | tuple | range)


def own_generators(loader: Any) -> dict[str, torch.Generator]:
    """Generators that the user gave: the loader's, and those of its samplers."""
    found, places = {"loader": loader.generator}, [order_of(loader)]
    while places and len(found) < _DEEP:
        place = places.pop(0)
        # One that seeds its generator for each epoch, as Accelerate's, makes it as late as it likes.
        found[f"sampler{len(found)}"] = None if hasattr(place, "initial_seed") else getattr(place, "generator", None)
        places += [inner for name in ("sampler", "batch_sampler") if (inner := getattr(place, name, None)) is not None]
    seen: dict[int, str] = {}
    return {
        name: one
        for name, one in found.items()
        if isinstance(one, torch.Generator) and seen.setdefault(id(one), name) == name
    }


def own_as_text(loader: Any) -> dict[str, str]:
    """The user's generators as they are now, encoded; none of what is no stock loader."""
    found = own_generators(loader) if isinstance(loader, DataLoader) else {}
    return {name: rng.generator_to_text(one.get_state()) for name, one in found.items()}


def put_back(loader: Any, texts: Mapping[str, str]) -> None:
    """Set the user's own generators to what was encoded."""
    for name, one in own_generators(loader).items():
        if name in texts:
            rng.generator_from_text(one, texts[name])


def _is_asked_plainly(dataset: Any, name: str) -> bool:
    """Whether it has a method that takes nothing: litdata's ``state_dict`` wants what only its own loader knows."""
    try:
        inspect.signature(getattr(dataset, name)).bind()
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def is_warm(loader: Any) -> bool:
    """Whether its workers run, and go on into the next epoch."""
    return bool(loader.persistent_workers and getattr(loader, "_iterator", None) is not None)


def stays(loader: Any) -> bool:
    """Whether its workers go on into the next epoch."""
    return bool(loader.persistent_workers and loader.num_workers)


def each_of(loader: Any) -> int:
    """The number of indices in a batch, of all ranks together; 0 where only batches can be counted."""
    given, sampler = order_of(loader), sampler_of(loader)
    if type(given) is BatchSampler:
        size = given.batch_size
    elif loader.batch_sampler is None and is_map(loader):
        size = 1
    else:
        return 0
    return int(size * (sampler.num_replicas if is_spread(sampler) else 1))


def most_of(loader: Any) -> int | None:
    """The number of indices in an epoch, of all ranks together if they share one order; None where that is not known."""
    sampler = sampler_of(loader)
    try:
        return len(sampler.dataset) if is_spread(sampler) else len(sampler)
    except (TypeError, NotImplementedError):
        return None


def epoch_of(sampler: Any) -> int | None:
    """The epoch that ``set_epoch`` was given; None where the sampler has no such number."""
    epoch = getattr(sampler, "epoch", None)
    return epoch if isinstance(epoch, int) else None


def set_epoch(sampler: Any, epoch: int) -> None:
    """Go to an epoch, where the sampler has such a number."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    elif hasattr(sampler, "epoch"):
        sampler.epoch = epoch


def is_still_meant(loader: Any, pending: Position) -> bool:
    """Whether nobody has called ``set_epoch`` with another one since the place was loaded."""
    now = epoch_of(sampler_of(loader))
    if not pending.begun or pending.sampler_epoch is None or now == pending.sampler_epoch:
        return True
    message = "%s: its place was in epoch %d, and set_epoch was called with %s: that epoch starts from its beginning"
    logger.warning(message, name_of(loader), pending.sampler_epoch, now)
    return False


def facts_of(loader: Any) -> dict[str, Any]:
    """The facts on which the order depends. If one of them has changed, the place means nothing."""
    sampler = sampler_of(loader)
    facts: dict[str, Any] = {"sampler": type(sampler).__name__}
    if not is_map(loader):
        whose = {"rank": world_rank()} if is_placed(loader) else {}
        return {**facts, "num_workers": loader.num_workers, "batch_size": loader.batch_size, **whose}
    if (most := most_of(loader)) is not None:
        facts["indices"] = most
    if type(sampler) is RandomSampler and len(sampler.data_source) != most:
        facts["samples"] = len(sampler.data_source)  # its length is the number that was asked for
    if own := sorted(own_generators(loader)):
        facts["generators"] = own
    if is_spread(sampler):
        return {**facts, "seed": sampler.seed, "shuffle": sampler.shuffle}
    if draws_seed(sampler) or draws_itself(sampler):
        facts["rank"] = world_rank()  # each rank has an order of its own
    return facts


def name_of(loader: Any) -> str:
    """The name of a loader in messages."""
    return f"{type(loader).__name__} over {type(loader.__dict__['dataset']).__name__}"
