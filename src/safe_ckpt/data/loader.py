"""A DataLoader whose place in the data can be saved, and found again without reading what came before it.

``resumable`` returns a loader of a subclass of the loader's own class, so that frameworks take it for what it was. It counts
the batches that the training loop was given, not those that workers have fetched ahead. After a resume its index sampler
begins at the place, so only what is left is read, and batches that were in flight at the save are made again.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader

from safe_ckpt.data import generators, order, seeding
from safe_ckpt.data.facts import (
    draws_itself,
    each_of,
    epoch_of,
    facts_of,
    is_map,
    is_still_meant,
    is_warm,
    most_of,
    name_of,
    own_generators,
    put_back,
    sampler_of,
    set_epoch,
)
from safe_ckpt.data.position import Position
from safe_ckpt.errors import RestoreError

logger = logging.getLogger(__name__)
Loader = TypeVar("Loader", bound="DataLoader[Any]")
Seeding = Literal["stock", "per_sample"]
_GLOBAL = "process"
_READ = "before"
_TORCH = "torch"
_END = object()
_CANNOT = (
    "its data set cannot go to a place within an epoch. "
    "resumable(loader, skip='read') reads what came before it again, and drops it"
)


class Resumable:
    """Mixed into the class of a DataLoader by ``resumable``. Used on one thread."""

    worker_seeding: ClassVar[Seeding] = "stock"
    skip: ClassVar[Literal["read"] | None] = None
    _place = Position()
    _pending: Position | None = None
    _given: Counter | None = None
    _found = False
    _undo: Mapping[str, torch.Tensor] | None = None
    _drawn: Mapping[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """The place behind the last batch that was given: plain data, a few hundred bytes.

        It is the same on all ranks if they share one order (``DistributedSampler``). If each rank has an order of its own, save
        it as ``PerRank(loader)``.
        """
        position = self.position()
        if position.begun and not is_map(self) and self.skip != "read":
            logger.warning("%s: %s", name_of(self), _CANNOT)
        return position.to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place at the start of the next iteration.

        Raises:
            RestoreError: the state is no place of a loader, or the data or their order were others then.
        """
        position = Position.from_json(state)
        if position.begun and not is_map(self) and self.skip != "read":
            raise RestoreError(key=name_of(self), message=_CANNOT)
        if position.sampler_epoch is not None:
            set_epoch(sampler_of(self), position.sampler_epoch)
        position.refuse_other(facts_of(self), name_of(self))
        if (
            position.begun
            and self.skip == "read"
            and (position.each != each_of(self) or _READ not in position.generators)
        ):
            message = "with skip='read' the batch size must be what it was, and the place must have been saved that way"
            raise RestoreError(key=name_of(self), message=message)
        self._pending = self._place = position
        self._given, self._drawn = None, {}

    def position(self) -> Position:
        """The place, as a value."""
        if self._pending is not None:
            return self._pending
        place, own = self._place, own_generators(self)
        now = {name: generators.to_text(one.get_state()) for name, one in own.items()}
        if not place.begun:
            warm, epoch = is_warm(self), epoch_of(sampler_of(self))
            return dataclasses.replace(place, now=now, warm=warm, sampler_epoch=epoch, facts=facts_of(self))
        given = self._given.count if self._given is not None else 0
        begun = {name: _as_text(state) for name, state in self._drawn.items()}
        return dataclasses.replace(place, batches=place.batches + given, now=now, generators=begun)

    def __iter__(self) -> Iterator[Any]:
        return Batches(self)

    @property
    def _index_sampler(self) -> Any:
        given: Any = super()._index_sampler  # type: ignore[misc]
        return given if not is_map(self) else _Remaining(self, given)

    def _get_iterator(self) -> Any:
        """As torch's, with another data set where samples are made."""
        own: dict[str, Any] = self.__dict__
        dataset, in_worker = own["dataset"], own["num_workers"] > 0
        if self.worker_seeding == "per_sample":
            own["dataset"] = seeding.SeededDataset(dataset, own_process=in_worker)
        elif in_worker and is_map(self) and self.skip != "read":
            own["dataset"] = seeding.WatchedDataset(dataset, name_of(self))
        try:
            return super()._get_iterator()  # type: ignore[misc]
        finally:
            own["dataset"] = dataset

    def __reduce__(self) -> tuple[Any, ...]:
        # The class was made at run time: another process makes it again.
        kind, passing = type(self), {"_iterator": None, "_given": None, "_undo": None}
        return make, (kind.__bases__[1], self.__dict__ | passing, kind.worker_seeding, kind.skip, kind.__bases__[0])

    def _begin(self, given: Counter) -> Iterator[Any]:
        """The batches of torch, from the place on. Called when the first one is asked for."""
        pending, self._pending = self._pending, None
        if pending is not None and not is_still_meant(self, pending):
            pending = None
        if pending is not None and not pending.begun:
            put_back(self, pending.now)
        if pending is not None and pending.warm and not is_warm(self):
            # Workers that went on running would not have been seeded again: what that draws is put back.
            own = own_generators(self) if not pending.begun else {}
            self._undo = {_TORCH: torch.get_rng_state(), **{name: one.get_state() for name, one in own.items()}}
        self._given, self._found = given, False
        if pending is None or not pending.begun:
            return self._started()
        return self._resumed(pending)

    def _end(self, given: Counter) -> None:
        if self._given is given:  # else another iteration has begun since
            self._place, self._given, self._drawn = self._place.at_end(), None, {}

    def _started(self) -> Iterator[Any]:
        sampler, last = sampler_of(self), self._place
        self._drawn = {name: one.get_state() for name, one in own_generators(self).items()}
        self._place = Position(
            epoch=last.epoch + last.begun,  # an epoch that was broken off counts
            begun=True,
            each=each_of(self),
            most=most_of(self),
            sampler_epoch=epoch_of(sampler),
            warm=is_warm(self) or self._undo is not None,
            facts=facts_of(self),
        )
        if self.worker_seeding == "per_sample":
            if order.is_spread(sampler):
                token = seeding.mixed(seeding.mixed(sampler.seed, sampler.epoch), self._place.epoch)
            else:
                token = order.draw_seed()
            self._place = dataclasses.replace(self._place, token=token)
        if self.skip == "read":
            self._drawn = {**self._drawn, _READ: generators.all_to_text()}
        return super().__iter__()  # type: ignore[misc, no-any-return]

    def _resumed(self, pending: Position) -> Iterator[Any]:
        put_back(self, pending.generators)
        if self._undo is not None:
            own = {name: one.get_state() for name, one in own_generators(self).items()}
            self._undo = {**self._undo, **own}
        self._drawn = dict(pending.generators)
        again = self.skip == "read"
        self._place = dataclasses.replace(
            pending,
            first_batch=0 if again else pending.batches,
            first_sample=0 if again else pending.samples,
            each=each_of(self),
            most=most_of(self),
            facts=facts_of(self),
        )
        if again:
            return self._read_up_to(pending)
        with generators.borrowed():  # what torch draws to start an epoch was drawn before the save
            batches: Iterator[Any] = super().__iter__()  # type: ignore[misc]
        return batches

    def _read_up_to(self, pending: Position) -> Iterator[Any]:
        with generators.borrowed():
            generators.put_all_back(pending.generators[_READ])
            batches: Iterator[Any] = super().__iter__()  # type: ignore[misc]
            for _ in range(pending.batches):
                next(batches, None)
        return batches


class Counter:
    """How many batches were given since an epoch began, or was resumed: counting is all that is done for each of them."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Batches:
    """The batches of an epoch. As Lightning has it for those of a DataLoader, none go along in a copy of a Trainer.

    The loader does not hold it, so that workers end with the last reference to either.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._inner: Iterator[Any] | None = None
        self._counter = Counter()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        inner = self._inner
        if inner is None:
            # Not in ``__iter__``: a framework's hooks before the first batch have run by now.
            inner = self._inner = self._loader._begin(self._counter)
            resumed = self._loader._place.first_batch > 0
            batch = self._given(inner)
            if resumed and is_map(self._loader) and not self._loader._found:
                message = "its class has an iteration of its own, so that its place cannot be found again"
                raise RestoreError(key=name_of(self._loader), message=message)
            return batch
        return self._given(inner)

    def _given(self, inner: Iterator[Any]) -> Any:
        try:
            batch = next(inner)
        except StopIteration:
            self._loader._end(self._counter)
            raise
        except Exception:
            self._counter.count += 1  # torch goes on with the next one, if the caller does
            raise
        self._counter.count += 1
        return batch

    def __reduce__(self) -> tuple[Any, ...]:
        return iter, ((),)


class _Remaining:
    """The index sampler of a loader from its place on. Its loader may hold the iterator that holds this."""

    def __init__(self, loader: Any, given: Any) -> None:
        self._loader = weakref.ref(loader)
        self._given = given

    def __len__(self) -> int:
        return len(self._given)

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader()
        if loader is None:
            return iter(())
        batches = self._from_the_place(loader)
        token = loader._place.token
        return batches if token is None else seeding.marked(batches, token, batched=loader.batch_sampler is not None)

    def _from_the_place(self, loader: Any) -> Iterator[Any]:
        """A generator: samplers draw when the first index is asked for."""
        given, place = self._given, loader._place
        loader._found = True
        undo, loader._undo = loader._undo, None
        if undo is not None:
            torch.set_rng_state(undo[_TORCH])
            for name, one in own_generators(loader).items():
                one.set_state(undo[name])
        plain = type(given) is BatchSampler
        sampler = given.sampler if plain else given
        start = place.first_sample if place.each else place.first_batch
        seed = place.seed
        if order.draws_seed(sampler) and seed is None:
            seed = order.draw_seed()
            loader._place = dataclasses.replace(loader._place, seed=seed)
        own = draws_itself(sampler)
        indices = self._drawn(loader, sampler, start) if own else order.indices(sampler, start, seed=seed)
        del loader  # a generator that waits must not keep it
        yield from order.batches(given, indices) if plain else indices

    def _drawn(self, loader: Any, sampler: Any, start: int) -> Iterator[Any]:
        """From the generators of this process, as they were when the epoch began."""
        name = _TORCH if order.is_known(sampler) else _GLOBAL
        saved = loader._place.generators.get(name)
        if saved is None:
            state = torch.get_rng_state() if name == _TORCH else generators.all_to_text()
            loader._drawn = {**loader._drawn, name: state}
            return order.indices(sampler, start)
        with generators.borrowed():
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
            after a resume. One number more is drawn at the start of an epoch.
        skip: "read": a resume within an epoch reads what was used up again, and drops it. For an ``IterableDataset``; or for
            data sets that draw random numbers in workers, which then draw the same.

    Raises:
        TypeError: it is not a DataLoader, or one whose place cannot be told: with ``in_order=False``, or of a class that
            knows its place itself.
    """
    return made_of(loader, worker_seeding, skip, Resumable)


def made_of(loader: Loader, worker_seeding: Seeding, skip: Literal["read"] | None, mixin: type[Resumable]) -> Loader:
    """See ``resumable``; with a mixin of one's own."""
    if not isinstance(loader, DataLoader):
        raise TypeError(f"resumable() takes a DataLoader, got {type(loader).__name__}")
    kind: Any = type(loader)
    if issubclass(kind, Resumable):
        if (kind.worker_seeding, kind.skip, kind.__bases__[0]) == (worker_seeding, skip, mixin):
            return loader
        kind = kind.__bases__[1]
    elif hasattr(kind, "state_dict"):
        raise TypeError(f"resumable(): a {kind.__name__} knows its place itself: save it as it is")
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise TypeError("resumable() needs in_order=True: which batches have come cannot be told otherwise")
    if worker_seeding == "per_sample" and not is_map(loader):
        raise TypeError("resumable(): worker_seeding='per_sample' needs a data set with indices")
    if skip == "read" and loader.num_workers and loader.persistent_workers:
        raise TypeError(
            "resumable(): skip='read' needs persistent_workers=False: what workers drew before is not known"
        )
    return make(kind, loader.__dict__ | {"_iterator": None}, worker_seeding, skip, mixin)  # type: ignore[no-any-return]


def make(
    kind: type[Any],
    state: dict[str, Any],
    worker_seeding: Seeding,
    skip: Literal["read"] | None,
    mixin: type[Resumable] = Resumable,
) -> Any:
    """A loader of a subclass of ``kind``, with this state."""
    facts = {"__module__": __name__, "worker_seeding": worker_seeding, "skip": skip}
    subclass: Any = type(f"Resumable{kind.__name__}", (mixin, kind), facts)
    made = subclass.__new__(subclass)
    # Past DataLoader's guard against changing attributes: these are the ones it was built with.
    made.__dict__.update(state)
    return made


def _as_text(state: Any) -> str:
    return state if isinstance(state, str) else generators.to_text(state)
