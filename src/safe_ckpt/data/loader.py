"""A DataLoader whose place in the data can be saved, and found again without reading what came before it.

``resumable`` returns a loader of a subclass of the loader's own class, so that frameworks take it for what it was. It counts
the batches that the training loop was given, not those that workers have fetched ahead. After a resume its index sampler
begins at the place, so only what is left is read, and batches that were in flight at the save are made again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch.utils.data import DataLoader

from safe_ckpt.core.coordination.process_groups import world_rank
from safe_ckpt.core.state import rng
from safe_ckpt.data import order, workers
from safe_ckpt.data.batches import Batches, Counter, Remaining, again_from, shown
from safe_ckpt.data.position import Position, plain_state
from safe_ckpt.errors import RestoreError

logger = logging.getLogger(__name__)
Loader = TypeVar("Loader", bound="DataLoader[Any]")
Skip = Literal["read"] | None
_READ = "before"
_CANNOT = (
    "its data set has neither indices nor a state_dict and load_state_dict of its own, so its place within an epoch cannot be "
    "found again. resumable(loader, skip='read') reads what came before it again, and drops it"
)
_LOSES = (
    "its data set does not save what is in its shuffle buffer: a resume within an epoch leaves out those samples. "
    "resumable(loader, skip='read') reads what came before it again, and loses nothing if no one else draws random numbers"
)


class Resumable:
    """Mixed into the class of a DataLoader by ``resumable``. Used on one thread."""

    skip: ClassVar[Skip] = None
    looks_ahead: int = 0  # how many batches may be taken before they are used, and given again after a resume
    _place = Position()
    _pending: Position | None = None
    _given: Counter | None = None
    _found = _in_vain = _told = False
    _undo: Mapping[str, torch.Tensor] | None = None
    _restored: Position | None = None
    _ended: Position | None = None
    _offered: Position | None = None
    _drawn: Mapping[str, Any] = {}
    reading: Callable[[], Sequence[Any]] | None = None  # gives the iterators that train, where a framework knows them

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
        if position.begun and not self._can_go_to_a_place():
            raise RestoreError(key=order.name_of(self), message=_CANNOT)
        if position.sampler_epoch is not None:
            order.set_epoch(order.sampler_of(self), position.sampler_epoch)
        position.refuse_other(order.facts_of(self), order.name_of(self))
        reads = position.begun and self.skip == "read"
        if reads and (position.each != order.each_of(self) or _READ not in position.generators):
            message = "with skip='read' the batch size must be what it was, and the place must have been saved that way"
            raise RestoreError(key=order.name_of(self), message=message)
        if not order.is_placed(self):
            position = position.for_workers(self.__dict__["num_workers"], world_rank(), order.name_of(self))
        self._pending = self._place = position
        self._given, self._drawn = None, {}
        self.__dict__["_iterator"] = None  # workers that stay are somewhere else

    def start_anew(self, state: Mapping[str, Any], rank: int) -> None:
        """Go to the place of rank 0, on a rank that has saved none; as ``load_state_dict``, which says what differs."""
        del rank
        self.load_state_dict(state)

    def position(self, unseen: int = 0) -> Position:
        """The place, as a value.

        Args:
            unseen: how many of the last batches were not used, and are to be given again: at most ``looks_ahead``.
        """
        place, last = self._now(), self.ended()
        if unseen and not place.begun and last is not None:
            place = last  # the last batch of the epoch was taken, and that it is the last was seen
        return place.without(unseen)

    def left(self) -> Position:
        """The place behind an epoch that was broken off for good: between that one and the next."""
        epoch = order.epoch_of(order.sampler_of(self))
        return dataclasses.replace(self._now().at_end(), warm=order.is_warm(self), sampler_epoch=epoch)

    def pending(self) -> Position | None:
        """The place that the next iteration goes to; None where it begins an epoch."""
        return self._pending if self._pending is not None and self._pending.begun else None

    def begin_anew(self) -> None:
        """Have the next iteration begin an epoch, not at the place that was loaded."""
        self._pending = None
        self._place = self._place.at_end()

    def ended(self) -> Position | None:
        """The end of the last epoch, as a place in it; None once the next one has begun."""
        return self._ended if self._pending is None else None

    def _now(self) -> Position:
        if self._pending is not None:
            return self._pending
        place, now = self._place, order.own_as_text(self)
        if not place.begun:
            warm, epoch = order.is_warm(self), order.epoch_of(order.sampler_of(self))
            return dataclasses.replace(place, now=now, warm=warm, sampler_epoch=epoch, facts=order.facts_of(self))
        given = self._given
        if given is None:  # of a copy: see __reduce__
            return dataclasses.replace(place, now=now)
        # Under a framework no loop goes on after an error.
        if given.failed and not self.looks_ahead and given.is_over():
            given.passed()
        drawn = {name: one if isinstance(one, str) else rng.generator_to_text(one) for name, one in self._drawn.items()}
        return dataclasses.replace(
            place,
            batches=place.batches + given.count,
            now=now,
            generators=drawn,
            turn=given.turn,
            workers={worker: plain_state(state) for worker, state in given.workers.items()},
            undo=tuple(given.undo),
        )

    def __iter__(self) -> Iterator[Any]:
        pending = self._pending
        if pending is not None and pending is self._offered and pending.begun and order.is_map(self):
            can_tell = pending.first_sample == pending.first_batch * pending.each
            # If nothing is left of the epoch, another loader that is read beside it was at its end, too: nothing was asked of
            # this one.
            if can_tell and pending.batches == len(self):  # type: ignore[arg-type]
                self.begin_anew()
        self._offered = self._pending
        return Batches(self)

    def beside(self, batches: Batches) -> Iterator[Any] | None:
        """For an iteration that looks at a batch while another one trains: it has no part in the place, as with torch's loader.

        None for the one that trains, and where that is not known.
        """
        reading = self.reading() if self.reading is not None else ()
        if not reading or any(one is batches for one in reading):
            return None
        if order.is_placed(self) and not self.__dict__["num_workers"] and not self._told:
            self._told = True
            logger.warning("%s: what is read of its stream beside training is missing in training", order.name_of(self))
        kind: Any = type(self).__bases__[1]
        stock: Any = kind.__new__(kind)
        stock.__dict__.update(self.__dict__ | {"_iterator": None})
        looking: Iterator[Any] = iter(stock)
        return looking

    @property
    def _index_sampler(self) -> Any:
        given: Any = super()._index_sampler  # type: ignore[misc]
        return given if not order.is_map(self) else Remaining(self, given)

    def _get_iterator(self) -> Any:
        """As torch's, with stand-ins where samples are made and put together."""
        own: dict[str, Any] = self.__dict__
        dataset, collate, in_worker = own["dataset"], own["collate_fn"], own["num_workers"] > 0
        before, self._restored = self._restored, None
        if (in_worker or order.is_placed(self)) and self.skip != "read":
            maker = workers.Maker(before.workers if before is not None else {}, watched=in_worker)
            kind = workers.PlacedDataset if order.is_placed(self) else workers.WatchedDataset
            own["dataset"] = kind(dataset, maker)
            own["collate_fn"] = workers.Collate(collate, maker)
        begin, own["worker_init_fn"] = own["worker_init_fn"], functools.partial(workers.outlive, own["worker_init_fn"])
        try:
            iterator = self._iterator_of(before)
        finally:
            own["dataset"], own["collate_fn"], own["worker_init_fn"] = dataset, collate, begin
        workers.end_otherwise(getattr(iterator, "_workers", ()))
        return iterator

    def _iterator_of(self, before: Position | None) -> Any:
        kind: Any = type(self)
        if kind.__bases__[1]._get_iterator is not DataLoader._get_iterator:
            return super()._get_iterator()  # type: ignore[misc]
        count = self.__dict__["num_workers"]
        if not count:
            return workers.Alone(self)
        self._in_vain = self._undo is not None
        self.check_worker_number_rationality()  # type: ignore[attr-defined]
        if before is None:
            return workers.Workers(self, None, 0)
        turn = before.batches if order.is_map(self) else before.turn
        return workers.Workers(self, before.base_seed, turn % count if before.begun and self.skip != "read" else 0)

    def __reduce__(self) -> tuple[Any, ...]:
        # The class was made at run time: another process makes it again.
        kind = type(self)
        passing: dict[str, Any] = {"_iterator": None, "_given": None, "_undo": None, "_restored": None, "reading": None}
        if self._given is not None:
            passing["_place"] = self._now()
        return make, (kind.__bases__[1], self.__dict__ | passing, kind.skip, kind.__bases__[0])

    def _begin(self, given: Counter) -> Iterator[Any]:
        """The batches of torch, from the place on. Called when the first one is asked for."""
        pending = self._pending
        try:
            return self._begun(given)
        except BaseException:
            self._pending = pending  # the next try begins there, too
            raise

    def _begun(self, given: Counter) -> Iterator[Any]:
        pending, self._pending, self._ended = self._pending, None, None
        if pending is not None and not order.is_still_meant(self, pending):
            pending = pending.at_end()  # what draws is where it was, as without a resume
        if pending is not None and not pending.begun:
            order.put_back(self, pending.now)
        if pending is not None and pending.warm and not order.is_warm(self):
            # Workers that went on running would not have been seeded again: what that draws is put back.
            own = order.own_generators(self) if not pending.begun else {}
            self._undo = {rng.TORCH: torch.get_rng_state()} | {name: one.get_state() for name, one in own.items()}
        self._given, self._found, self._restored = given, False, pending
        if pending is not None:
            given.before, given.workers, given.turn = pending.batches, dict(pending.workers), pending.turn
        elif order.is_warm(self) and not self._place.begun:
            given.workers = dict(self._place.workers)
        batches = self._resumed(pending, given) if pending is not None and pending.begun else self._started()
        self._restored, given.taken = None, pending.again if pending is not None else 0
        if self._undo is not None and not order.is_map(self):
            self._take_back_draws()
        if self.__dict__["num_workers"]:
            seed = getattr(batches, "_base_seed", None)
            self._place = dataclasses.replace(self._place, base_seed=seed, rank=world_rank())
        return batches

    def _asked_in_vain(self) -> bool:
        """Whether this order is none: new workers have it asked for twice, and those that went on running had it once."""
        vain, self._in_vain = self._in_vain, False
        return vain

    def _take_back_draws(self) -> None:
        """Put back what torch drew to begin with, and would not have drawn in an uninterrupted run."""
        undo, self._undo = self._undo, None
        if undo is None:
            return
        torch.set_rng_state(undo[rng.TORCH])
        for name, one in order.own_generators(self).items():
            one.set_state(undo[name])

    def _end(self, given: Counter) -> None:
        if self._given is given:  # else another iteration has begun since
            if given.failed:
                given.passed()
            self._ended = self._now()
            self._place, self._given, self._drawn = self._ended.at_end(), None, {}

    def _started(self) -> Iterator[Any]:
        sampler, last = order.sampler_of(self), self._place
        self._drawn = {name: one.get_state() for name, one in order.own_generators(self).items()}
        self._place = Position(
            epoch=last.epoch + last.begun,  # an epoch that was broken off counts
            begun=True,
            each=order.each_of(self),
            most=order.most_of(self),
            sampler_epoch=order.epoch_of(sampler),
            warm=order.is_warm(self) or self._undo is not None,
            stay=order.stays(self),
            num_workers=self.__dict__["num_workers"],
            facts=order.facts_of(self),
        )
        if self.skip == "read":
            self._drawn = {**self._drawn, _READ: rng.all_to_text()}
        return super().__iter__()  # type: ignore[misc, no-any-return]

    def _resumed(self, pending: Position, given: Counter) -> Iterator[Any]:
        order.put_back(self, pending.generators)
        if self._undo is not None:
            own = {name: one.get_state() for name, one in order.own_generators(self).items()}
            self._undo = {**self._undo, **own}
        self._drawn = dict(pending.generators)
        again = self.skip == "read"
        self._place = dataclasses.replace(
            pending,
            again=0,
            before=(),
            first_batch=0 if again else pending.batches,
            first_sample=0 if again else pending.samples,
            each=order.each_of(self),
            most=order.most_of(self),
            stay=order.stays(self),
            num_workers=self.__dict__["num_workers"],
            facts=order.facts_of(self),
        )
        if again:
            return self._read_up_to(pending, given)
        with rng.borrowed():  # what torch draws to start an epoch was drawn before the save
            return again_from(super().__iter__(), pending, given)  # type: ignore[misc]

    def _read_up_to(self, pending: Position, given: Counter) -> Iterator[Any]:
        began_s = time.monotonic()
        with rng.borrowed():
            rng.put_all_back(pending.generators[_READ])
            batches: Iterator[Any] = super().__iter__()  # type: ignore[misc]
            for _ in shown(pending.batches, f"{order.name_of(self)}: reading up to its place"):
                with contextlib.suppress(Exception):  # as training went on after it
                    next(batches, None)
            batches = again_from(batches, pending, given)
        took_s = time.monotonic() - began_s
        message = "%s: read %d batches again in %.1f s to find its place"
        logger.info(message, order.name_of(self), pending.batches, took_s)
        return batches

    def _can_go_to_a_place(self) -> bool:
        return order.is_map(self) or order.is_placed(self) or self.skip == "read"


def resumable(loader: Loader, *, skip: Skip = None) -> Loader:
    """Make the place of a DataLoader in its data resumable. Returns a loader that stands in for it, of a subclass of its class.

    It gives the same batches in the same order as the loader itself. It draws what that draws, when the first batch is asked
    for. Its place is an item of a checkpoint (``state={"loader": loader, ...}``), and a resume within an epoch goes on with the
    next batch. Nothing is read to find it. The state of each worker's generators is saved, if it draws, so that a resume with
    as many workers is exact.

    Args:
        loader: a ``torch.utils.data.DataLoader``.
        skip: "read": a resume within an epoch reads what was used up again, and drops it. For an ``IterableDataset`` without
            ``state_dict`` and ``load_state_dict``.

    Raises:
        TypeError: it is not a DataLoader, or one whose place cannot be told: with ``in_order=False``, or of a class that
            knows its place itself.

    Example:
        ```python
        loader = resumable(DataLoader(dataset, batch_size=8, shuffle=True))
        with Checkpointer("runs/epoch") as ckpt:
            ckpt.resume({"model": model, "loader": loader})
            for number, batch in enumerate(loader):  # goes on with the batch after the last save
                if number == 2:
                    ckpt.save(number, {"model": model, "loader": loader})
        ```
    """
    return made_of(loader, skip, Resumable)


def made_of(loader: Loader, skip: Skip, mixin: type[Resumable]) -> Loader:
    """See ``resumable``; with a mixin of one's own."""
    if not isinstance(loader, DataLoader):
        raise TypeError(f"resumable() takes a DataLoader, got {type(loader).__name__}")
    kind: Any = type(loader)
    if issubclass(kind, Resumable):
        if (kind.skip, kind.__bases__[0]) == (skip, mixin):
            return loader
        kind = kind.__bases__[1]
    elif hasattr(kind, "state_dict"):
        raise TypeError(f"resumable(): a {kind.__name__} knows its place itself: save it as it is")
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise TypeError("resumable() needs in_order=True: which batches have come cannot be told otherwise")
    if skip == "read" and loader.num_workers and loader.persistent_workers:
        raise TypeError(
            "resumable(): skip='read' needs persistent_workers=False: what workers drew before is not known"
        )
    found = make(kind, loader.__dict__ | {"_iterator": None}, skip, mixin)
    if not found._can_go_to_a_place():
        logger.warning("%s: %s", order.name_of(found), _CANNOT)
    elif skip is None and order.loses_its_buffer(found):
        logger.warning("%s: %s", order.name_of(found), _LOSES)
    return found  # type: ignore[no-any-return]


def make(kind: type[Any], state: dict[str, Any], skip: Skip, mixin: type[Resumable]) -> Any:
    """A loader of a subclass of ``kind``, with this state."""
    facts = {"__module__": __name__, "skip": skip}
    subclass: Any = type(f"Resumable{kind.__name__}", (mixin, kind), facts)
    made = subclass.__new__(subclass)
    # Past DataLoader's guard against changing attributes: these are the ones it was built with.
    made.__dict__.update(state)
    return made
