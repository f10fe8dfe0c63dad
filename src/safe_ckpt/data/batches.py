"""The batches of an epoch as training is given them: counted, and what came along with them kept; from any place on."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import BatchSampler

from safe_ckpt.core.coordination.process_groups import world_rank
from safe_ckpt.core.state import rng
from safe_ckpt.data import order
from safe_ckpt.data.order import draws_itself, is_map, name_of
from safe_ckpt.data.position import Position
from safe_ckpt.data.workers import Delivered
from safe_ckpt.errors import RestoreError

Undo = tuple[int, str, Mapping[str, Any] | None, Mapping[str, Any] | None]
_GLOBAL = "process"
_END = object()
_LOOKED_BACK = 3  # a framework has given training one batch less than it took, or two


class Counter:
    """Counts the batches that were handed out since an epoch began, or was resumed, and keeps their workers' state after them.

    One that could not be made was handed to nobody. torch has left it behind if the data set raised. Then it counts once the
    caller goes on: that error is handled, or a later batch is handed out.

    Args:
        looked_back: how many batches may have to be given again.

    Attributes:
        before: how many of the epoch were given before.
        taken: how many batches torch has left behind it, if its iterator is one of ours.
        failed: how often none could be made since the last one.
        lost: whether one may be among them that could have been made.
        again: what the generators of this process were before those were made that were made again, and are still to be given.
        workers: what they are at.
        turn: which of them makes the next batch.
        undo: what it was before the last batches: see ``Position``.
    """

    __slots__ = ("_aside", "_error", "again", "before", "count", "failed", "lost", "taken", "turn", "undo", "workers")

    def __init__(self, looked_back: int = _LOOKED_BACK) -> None:
        self.before = self.count = self.turn = self.taken = self.failed = 0
        self.lost, self._error = False, 0
        self._aside: list[Delivered] = []
        self.workers: dict[str, Mapping[str, Any]] = {}
        self.undo: deque[Undo] = deque(maxlen=looked_back)
        self.again: deque[Mapping[str, Any]] = deque()

    def fail(self, error: BaseException) -> None:
        """Note that no batch came, but this error."""
        self.failed += 1
        self.lost |= not isinstance(error, Exception)
        self._error = id(error)  # not itself: its traceback holds the loop

    def is_over(self) -> bool:
        """Whether the caller has handled the error of a data set, and so leaves that batch out."""
        active, seen = sys.exc_info()[1], set[int]()
        while active is not None and id(active) not in seen:
            if id(active) == self._error:
                return False
            seen.add(id(active))
            active = active.__cause__ or active.__context__
        return not self.lost

    def passed(self) -> None:
        """Let training go on behind what could not be made."""
        self.count = max(self.count, self.taken) if self.taken else self.count + self.failed
        self.failed, self.lost = 0, False
        for delivered in self._aside:
            self._note(delivered)
        self._aside.clear()

    def took(self, delivered: Delivered, drawn: Mapping[str, Any] | None) -> Any:
        """The batch that has just been counted, and what the generators of this process were before."""
        worker = str(delivered.worker)
        self.undo.append((self.before + self.count, worker, self.workers.get(worker), drawn))
        self._note(delivered)
        return delivered.batch

    def refuse(self, delivered: Delivered, error: ExceptionWrapper) -> None:
        """Raise what came in the place of a batch. Its worker went on, but nobody was given that batch."""
        self._aside.append(delivered)
        try:
            error.reraise()  # type: ignore[no-untyped-call]
        except BaseException as raised:
            self.fail(raised)
            raise

    def _note(self, delivered: Delivered) -> None:
        self.workers[str(delivered.worker)] = delivered.state
        self.turn = delivered.worker + 1


class Batches:
    """The batches of an epoch. As Lightning has it for those of a DataLoader, none go along in a copy of a Trainer.

    The loader does not hold it, so that workers end with the last reference to either.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._inner: Iterator[Any] | None = None
        self._beside: Iterator[Any] | None = None
        self._counter = Counter(max(_LOOKED_BACK, loader.looks_ahead))
        self._noted = bool(loader.looks_ahead) and not loader.__dict__["num_workers"]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        inner = self._inner
        if inner is None and self._beside is None:
            self._beside = self._loader.beside(self)
        if self._beside is not None:
            return next(self._beside)
        if inner is None:
            # Not in ``__iter__``: a framework's hooks before the first batch have run by now.
            inner = self._inner = self._loader._begin(self._counter)
            resumed = self._loader._place.first_batch > 0
            batch = self._given(inner)
            if resumed and is_map(self._loader) and not self._loader._found:
                message = "its class has an iteration of its own, so that its place cannot be found again"
                raise RestoreError(key=name_of(self._loader), message=message)
            return batch
        if self._loader._pending is not None:
            message = (
                "a place was loaded within a loop over it, which goes on elsewhere: leave the loop, and begin a new one"
            )
            raise RestoreError(key=name_of(self._loader), message=message)
        return self._given(inner)

    def _given(self, inner: Iterator[Any]) -> Any:
        counter = self._counter
        drawn: Mapping[str, Any] | None = rng.snapshot() if self._noted else None
        if drawn is not None and counter.again:
            drawn = counter.again.popleft()
        try:
            batch = next(inner)
        except StopIteration:
            self._loader._end(counter)
            raise
        except BaseException as error:
            counter.fail(error)
            raise
        delivered = batch if type(batch) is Delivered else None
        if delivered is not None and isinstance(delivered.batch, ExceptionWrapper):
            counter.refuse(delivered, delivered.batch)
        counter.count += 1
        if counter.failed:
            counter.passed()
        if delivered is not None:
            return counter.took(delivered, drawn)
        if drawn is not None:
            counter.undo.append((counter.before + counter.count, "0", None, drawn))
        return batch

    def __reduce__(self) -> tuple[Any, ...]:
        return iter, ((),)


def again_from(batches: Iterator[Any], pending: Position, counter: Counter) -> Iterator[Any]:
    """The same batches; those that were taken and not used are made at once, as they were made then. ``counter`` notes how."""
    if not pending.again:
        return batches
    made = []
    for number in range(pending.again):
        if number < len(pending.before):
            rng.put_snapshot_back(pending.before[number])
        counter.again.append(rng.snapshot())
        made.append(next(batches))
    return itertools.chain(made, batches)


def shown(batches: int, what: str) -> Iterable[int]:
    """Numbers to go through, with a progress bar on rank 0 where tqdm is installed."""
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return range(batches)
    bar: Iterable[int] = tqdm(range(batches), desc=what, unit="batch", disable=world_rank() != 0)
    return bar


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
        at_once = type(given) is not BatchSampler and not order.can_repeat(given)
        return self._from_the_place(loader) if at_once else self._lazily()

    def _lazily(self) -> Iterator[Any]:
        """A generator, as torch's own samplers are: they draw when the first index is asked for."""
        loader = self._loader()
        if loader is not None:
            indices = self._from_the_place(loader)
            del loader  # a generator that waits must not keep it
            yield from indices

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
        return iter(BatchSampler(indices, given.batch_size, given.drop_last)) if plain else indices

    def _drawn(self, loader: Any, sampler: Any, start: int) -> Iterator[Any]:
        """From the generators of this process, as they were when the epoch began."""
        name = rng.TORCH if order.can_repeat(sampler) else _GLOBAL
        saved = loader._place.generators.get(name)
        if saved is None:
            before = _state(name)
            indices = order.indices(sampler, start)
            if before == _state(name):  # it draws when the first index is asked for
                return self._noting(indices, name)
            loader._drawn = {**loader._drawn, name: before}
            return indices
        with rng.borrowed():
            rng.generator_from_text(torch.default_generator, saved) if name == rng.TORCH else rng.put_all_back(saved)
            indices = order.indices(sampler, start)
            return _borrowing(indices, rng.snapshot())

    def _noting(self, indices: Iterator[Any], name: str) -> Iterator[Any]:
        """The same, once it was noted what the generators were before the first one."""
        loader = self._loader()
        if loader is not None:
            loader._drawn = {**loader._drawn, name: _state(name)}
        del loader
        yield from indices


def _borrowing(indices: Iterator[Any], then: Mapping[str, Any]) -> Iterator[Any]:
    """The same, the first one drawn with the generators at ``then``. torch asks for two orders, and uses one of them only."""
    with rng.borrowed():
        rng.set_to(then)
        first = next(indices, _END)
    if first is not _END:
        yield first
        yield from indices


def _state(name: str) -> str:
    return rng.generator_to_text(torch.get_rng_state()) if name == rng.TORCH else rng.all_to_text()
