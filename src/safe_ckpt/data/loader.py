"""A DataLoader whose place in the data can be saved, and found again without reading what came before it.

``resumable`` returns a loader of a subclass of the loader's own class, so that frameworks take it for what it was. It counts
the batches that the training loop was given, not those that workers have fetched ahead. After a resume its index sampler
begins at the place, so only what is left is read, and batches that were in flight at the save are made again.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from safe_ckpt.core.coordination.process_groups import world_rank
from safe_ckpt.data import generators, order, seeding
from safe_ckpt.data.position import Position
from safe_ckpt.errors import RestoreError

logger = logging.getLogger(__name__)
Loader = TypeVar("Loader", bound="DataLoader[Any]")
Seeding = Literal["stock", "per_sample"]
_GLOBAL = "process"
_TORCH = "torch"
_END = object()


class Resumable:
    """Mixed into the class of a DataLoader by ``resumable``. Used on one thread."""

    worker_seeding: ClassVar[Seeding] = "stock"
    skip: ClassVar[Literal["read"] | None] = None
    _place = Position()
    _pending: Position | None = None
    _drawn: Mapping[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """The place behind the last batch that was given: plain data, a few hundred bytes.

        It is the same on all ranks if they share one order (``DistributedSampler``). If each rank has an order of its own, save
        it as ``PerRank(loader)``.
        """
        return self.position().to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place at the start of the next iteration.

        Raises:
            RestoreError: the state is no place of a loader, or the data or their order were others then.
        """
        position = Position.from_json(state)
        position.refuse_other(_facts(self), _name(self))
        if position.begun and not _is_map(self) and self.skip != "read":
            message = (
                "its data set cannot go to a place. resumable(loader, skip='read') reads and drops what came before it"
            )
            raise RestoreError(key=_name(self), message=message)
        if position.sampler_epoch is not None and hasattr(_sampler(self), "set_epoch"):
            _sampler(self).set_epoch(position.sampler_epoch)
        self._pending = position
        self._place = position

    def position(self) -> Position:
        """The place, as a value."""
        own = {name: generators.to_text(one) for name, one in _own_generators(self).items()}
        begun = {name: _as_text(name, state) for name, state in self._drawn.items()} if self._place.begun else {}
        return dataclasses.replace(self._place, now=own, generators=begun or self._place.generators, facts=_facts(self))

    def __iter__(self) -> Iterator[Any]:
        return Batches(self._go_on())

    @property
    def _index_sampler(self) -> Any:
        given: Any = super()._index_sampler  # type: ignore[misc]
        return given if not _is_map(self) else _Remaining(self, given)

    def _get_iterator(self) -> Any:
        """As torch's, with another data set where samples are made."""
        own: dict[str, Any] = self.__dict__
        dataset, in_worker = own["dataset"], own["num_workers"] > 0
        if self.worker_seeding == "per_sample" and _is_map(self):
            own["dataset"] = seeding.SeededDataset(dataset, own_process=in_worker)
        elif in_worker and _is_map(self):
            own["dataset"] = seeding.WatchedDataset(dataset, _name(self))
        try:
            return super()._get_iterator()  # type: ignore[misc]
        finally:
            own["dataset"] = dataset

    def __reduce__(self) -> tuple[Any, ...]:
        # The class was made at run time: another process makes it again.
        kind = type(self)
        return make, (kind.__mro__[2], self.__dict__, kind.worker_seeding, kind.skip)

    def _go_on(self) -> Iterator[Any]:
        # A generator: all this happens when the first batch is asked for, after a framework's hooks before it have run.
        pending, self._pending = self._pending, None
        if pending is not None and not _is_still_meant(self, pending):
            pending = None
        if pending is not None and not pending.begun:
            for name, one in _own_generators(self).items():
                generators.put_back(one, pending.now[name])
        begun = pending is not None and pending.begun
        batches = self._resumed(pending) if pending is not None and begun else self._started()
        for batch in batches:
            self._place = dataclasses.replace(self._place, batches=self._place.batches + 1)
            yield batch
        self._place = dataclasses.replace(self._place.at_end(), sampler_epoch=None)
        self._drawn = {}

    def _started(self) -> Iterator[Any]:
        sampler = _sampler(self)
        self._drawn = {name: one.get_state() for name, one in _own_generators(self).items()}
        self._place = Position(
            epoch=self._place.epoch,
            begun=True,
            each=_each(self),
            most=_most(self),
            sampler_epoch=_epoch_of(sampler),
            facts=_facts(self),
        )
        if self.worker_seeding == "per_sample":
            token = order.draw_seed() if not order.is_spread(sampler) else seeding.mixed(sampler.seed, sampler.epoch)
            self._place = dataclasses.replace(self._place, token=token)
        if not _is_map(self):
            self._drawn = {**self._drawn, _GLOBAL: generators.all_to_text()}
        return super().__iter__()  # type: ignore[misc, no-any-return]

    def _resumed(self, pending: Position) -> Iterator[Any]:
        for name, one in _own_generators(self).items():
            generators.put_back(one, pending.generators[name])
        self._drawn = dict(pending.generators)
        self._place = dataclasses.replace(
            pending,
            first_batch=pending.batches,
            first_sample=pending.samples,
            each=_each(self),
            most=_most(self),
            facts=_facts(self),
        )
        if not _is_map(self):
            return self._read_up_to(pending)
        with generators.borrowed():  # what torch draws to start an epoch was drawn before the save
            batches: Iterator[Any] = super().__iter__()  # type: ignore[misc]
        return batches

    def _read_up_to(self, pending: Position) -> Iterator[Any]:
        with generators.borrowed():
            generators.put_all_back(pending.generators[_GLOBAL])
            batches: Iterator[Any] = super().__iter__()  # type: ignore[misc]
            for _ in range(pending.batches):
                next(batches, None)
        return batches


class Batches:
    """The batches of an epoch. As Lightning has it for those of a DataLoader, none go along in a copy of a Trainer."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def __reduce__(self) -> tuple[Any, ...]:
        return iter, ((),)


class _Remaining:
    """The index sampler of a loader from its place on."""

    def __init__(self, loader: Any, given: Any) -> None:
        self._loader = loader
        self._given = given

    def __len__(self) -> int:
        return len(self._given)

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader
        batches = self._from_the_place()
        token = loader._place.token
        return batches if token is None else seeding.marked(batches, token)

    def _from_the_place(self) -> Iterator[Any]:
        """A generator: samplers draw when the first index is asked for."""
        loader, given, place = self._loader, self._given, self._loader._place
        plain = type(given) is BatchSampler
        sampler = given.sampler if plain else given
        resumed = place.first_batch > 0 or bool(place.generators) or place.seed is not None
        start = place.first_sample if place.each else place.first_batch
        seed = place.seed
        if order.draws_seed(sampler) and seed is None:
            seed = order.draw_seed()
            loader._place = dataclasses.replace(loader._place, seed=seed)
        if _draws_itself(sampler):
            indices = self._drawn(sampler, start, resumed=resumed)
        else:
            indices = order.indices(sampler, start, seed=seed)
        yield from order.batches(given, indices) if plain else indices

    def _drawn(self, sampler: Any, start: int, *, resumed: bool) -> Iterator[Any]:
        """From the generators of this process, as they were when the epoch began."""
        loader = self._loader
        name = _TORCH if order.is_known(sampler) else _GLOBAL
        if not resumed:
            state = torch.get_rng_state() if name == _TORCH else generators.all_to_text()
            loader._drawn = {**loader._drawn, name: state}
            return order.indices(sampler, start)
        with generators.borrowed():
            saved = loader._place.generators[name]
            generators.put_back(None, saved) if name == _TORCH else generators.put_all_back(saved)
            indices = order.indices(sampler, start)
            first = next(indices, _END)
        return iter(()) if first is _END else itertools.chain([first], indices)


def resumable(loader: Loader, *, worker_seeding: Seeding = "stock", skip: Literal["read"] | None = None) -> Loader:
    """Make the place of a DataLoader in its data resumable. Returns a loader that stands in for it, of a subclass of its class.

    It gives the same batches in the same order as the loader itself. Its place is an item of a checkpoint
    (``state={"loader": loader, ...}``), and a resume within an epoch goes on with the next batch. Nothing is read to find it.

    Args:
        loader: a ``torch.utils.data.DataLoader``.
        worker_seeding: "stock": torch seeds each worker, so what a data set draws in one depends on what it has made before,
            and differs after a resume within an epoch. "per_sample": the generators are set before each sample is made, by
            the epoch and its index. What is drawn for it is the same for any workers, prefetching and number of ranks, and
            after a resume.
        skip: "read": for an ``IterableDataset``, a resume reads and drops what was used up.

    Raises:
        TypeError: it is not a DataLoader.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"resumable() takes a DataLoader, got {type(loader).__name__}")
    if issubclass(type(loader), Resumable):
        return make(type(loader).__mro__[2], loader.__dict__, worker_seeding, skip)  # type: ignore[no-any-return]
    return make(type(loader), loader.__dict__, worker_seeding, skip)  # type: ignore[no-any-return]


def make(kind: type[Any], state: dict[str, Any], worker_seeding: Seeding, skip: Literal["read"] | None) -> Any:
    """A loader of a subclass of ``kind``, with this state."""
    facts = {"__module__": __name__, "worker_seeding": worker_seeding, "skip": skip}
    subclass: Any = type(f"Resumable{kind.__name__}", (Resumable, kind), facts)
    made = subclass.__new__(subclass)
    # Past DataLoader's guard against changing attributes: these are the ones it was built with.
    made.__dict__.update(state)
    return made


def _is_map(loader: Any) -> bool:
    return not isinstance(loader.__dict__["dataset"], IterableDataset)


def _sampler(loader: Any) -> Any:
    """What gives the indices, one by one if that can be told."""
    given = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    return given.sampler if type(given) is BatchSampler else given


def _draws_itself(sampler: Any) -> bool:
    """Whether it draws from the generators of this process, so that they must be known."""
    if order.is_known(sampler):
        return (
            not order.is_spread(sampler)
            and getattr(sampler, "generator", _END) is None
            and not order.draws_seed(sampler)
        )
    return True


def _own_generators(loader: Any) -> dict[str, torch.Generator]:
    """Generators that the user gave."""
    places = {"loader": loader, "sampler": _sampler(loader), "batch_sampler": loader.batch_sampler}
    found = {name: getattr(place, "generator", None) for name, place in places.items()}
    return {name: one for name, one in found.items() if isinstance(one, torch.Generator)}


def _each(loader: Any) -> int:
    """How many indices a batch has, of all ranks together; 0 where only batches can be counted."""
    given, sampler = loader.batch_sampler, _sampler(loader)
    if given is not None and type(given) is not BatchSampler:
        return 0
    size = given.batch_size if given is not None else 1
    return int(size * (sampler.num_replicas if order.is_spread(sampler) else 1))


def _most(loader: Any) -> int | None:
    sampler = _sampler(loader)
    try:
        return len(sampler.dataset) if order.is_spread(sampler) else len(sampler)
    except TypeError:
        return None


def _epoch_of(sampler: Any) -> int | None:
    epoch = getattr(sampler, "epoch", None)
    return epoch if isinstance(epoch, int) else None


def _is_still_meant(loader: Any, pending: Position) -> bool:
    """Whether nobody has called ``set_epoch`` with another one since the place was loaded."""
    now = _epoch_of(_sampler(loader))
    if not pending.begun or pending.sampler_epoch is None or now == pending.sampler_epoch:
        return True
    message = "%s: its place was in epoch %d, and set_epoch was called with %s: that epoch starts from its beginning"
    logger.warning(message, _name(loader), pending.sampler_epoch, now)
    return False


def _facts(loader: Any) -> dict[str, Any]:
    """What the order depends on: another one then, and the place means nothing."""
    sampler, given = _sampler(loader), loader.batch_sampler
    facts: dict[str, Any] = {"sampler": type(sampler).__name__}
    if (most := _most(loader)) is not None:
        facts["indices"] = most
    if order.is_spread(sampler):
        facts |= {"seed": sampler.seed, "shuffle": sampler.shuffle}
        return facts
    if given is not None and type(given) is not BatchSampler:
        facts["batch_sampler"] = type(given).__name__
    if order.draws_seed(sampler) or _draws_itself(sampler):
        facts["rank"] = world_rank()  # each rank has an order of its own
    return facts


def _name(loader: Any) -> str:
    return f"{type(loader).__name__} over {type(loader.__dict__['dataset']).__name__}"


def _as_text(name: str, state: Any) -> str:
    if isinstance(state, str):
        return state
    made = torch.Generator()
    made.set_state(state)
    del name
    return generators.to_text(made)
