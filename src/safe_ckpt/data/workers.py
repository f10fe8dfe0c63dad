"""The makers of batches, and the state that only they know: random generators, and the place of an iterable data set.

This state comes along with each batch, as it was right after the batch was made. So the saved state belongs to the last batch
that training was given, however far ahead the workers are. After a resume the workers go on from there.
"""

from __future__ import annotations

import copy
import functools
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from safe_ckpt.core.state import rng

RNG, DATA, ENDED = "rng", "data", "ended"
_LOOKS, _EVERY = 8, 64
_END = signal.SIGRTMAX - 3
_PATIENCE_S = 5.0
# datasets.IterableDataset begins each epoch of that number there, not only the first.
_OF_DATASETS = "_starting_state_dict"
_ALL = (rng.TORCH, rng.PYTHON, rng.NUMPY)


def outlive(then: Callable[[int], None] | None, worker: int) -> None:
    """Let this worker outlive SIGTERM, which schedulers and shells send to all processes of a job. Before anything is made.

    What the loop needs for the rest of its step is still made then, and the save can be committed. A handler, not SIG_IGN:
    programs that it starts would inherit that.

    Args:
        then: the loader's own ``worker_init_fn``.
        worker: its number.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(_END, lambda *_: os._exit(0))
    if then is not None:
        then(worker)


def end_otherwise(workers: Iterable[Any]) -> None:
    """Let torch and the end of the program, which end workers by SIGTERM, end these."""
    for worker in workers:
        worker._popen.terminate = functools.partial(_end, worker)


def _end(worker: Any) -> None:
    if worker.exitcode is None:  # asked of the system now: later its number may be another process's
        os.kill(worker.pid, _END)
    worker.join(_PATIENCE_S)
    if worker.is_alive():
        worker.kill()


class Delivered:
    """A batch, with the state of the worker that made it, right after that.

    Args:
        batch: what training gets.
        worker: its number; 0 where there are no workers.
        state: the state.
    """

    def __init__(self, batch: Any, worker: int, state: Mapping[str, Any]) -> None:
        self.batch = batch
        self.worker = worker
        self.state = state

    def pin_memory(self) -> Delivered:
        """As torch does it with the batch itself. Not run: no machine with a GPU was at hand."""
        return Delivered(pin_memory(self.batch), self.worker, self.state)  # type: ignore[no-untyped-call]


class Maker:
    """Knows, where batches are made, which state has to come along with them.

    A worker whose data set draws no random numbers sends nothing of them. Whether it does is looked at after each of its first
    batches, and then after each 64th: looking takes as long as making a trivial batch.

    Args:
        states: what to begin with, by worker.
        watched: whether random generators are this process's own, so that their state is to come along.
    """

    def __init__(self, states: Mapping[str, Mapping[str, Any]], *, watched: bool) -> None:
        self._states = dict(states)
        self._watched = watched
        self._drawn: set[str] = set()
        self._first: Mapping[str, Any] | None = None
        self._made = 0
        self.worker = 0
        self.inner: Any = None
        self.ended = False

    def begin(self) -> None:
        """Set the generators before the first sample."""
        if self._first is not None:
            return
        info = get_worker_info()
        self.worker = info.id if info is not None else 0
        self._first = rng.snapshot() if self._watched else {}
        if self._watched:
            drawn = self._states.get(str(self.worker), {}).get(RNG, {})
            rng.put_snapshot_back(drawn)
            self._drawn = set(drawn)

    def place(self) -> Mapping[str, Any]:
        """The state with which the data set is to begin; given once."""
        return self._states.pop(str(self.worker), {})

    def after(self) -> dict[str, Any]:
        """The state that comes along with the batch that has just been made."""
        state: dict[str, Any] = {}
        if self._watched:
            self._made += 1
            if self._made <= _LOOKS or self._made % _EVERY == 0:
                others = [name for name in _ALL if name not in self._drawn]
                now, first = rng.snapshot(others), self._first or {}
                self._drawn |= {name for name in others if now.get(name) != first.get(name)}
            if self._drawn:
                state[RNG] = rng.snapshot(self._drawn)
        if self.inner is not None:
            state[DATA] = copy.deepcopy(self.inner.state_dict())
            if self.ended:
                state[ENDED] = True
        return state

    def failed(self) -> Delivered:
        """The error that stands for a batch that could not be made, with the state: training may go on with the next batch.

        Raises:
            Exception: the one that is being handled, where there is no state.
        """
        state = self.after()
        if not state or get_worker_info() is None:
            raise  # noqa: PLE0704 - called while it is handled
        error = ExceptionWrapper(where=f"in DataLoader worker process {self.worker}")  # type: ignore[no-untyped-call]
        return Delivered(error, self.worker, state)


class WorkerStandIn:
    """Looks like a data set where its samples are made: attributes, length and ``isinstance`` are the data set's.

    Args:
        inner: the data set.
        own: attributes of the stand-in itself.
    """

    def __init__(self, inner: Any, **own: Any) -> None:
        self.__dict__.update(_inner=inner, **own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._inner, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that ``isinstance`` in a ``worker_init_fn`` should see."""
        return type(self.__dict__.get("_inner", self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), dict(self.__dict__))  # a worker that was not forked makes it again

    def __len__(self) -> int:
        return len(self._inner)


def _again(kind: type[Any], state: dict[str, Any]) -> Any:
    made: Any = object.__new__(kind)
    made.__dict__.update(state)
    return made


class WatchedDataset(WorkerStandIn):
    """Stands in for a data set with indices, in a worker.

    Args:
        inner: the data set.
        maker: of this worker.
    """

    def __init__(self, inner: Any, maker: Maker) -> None:
        super().__init__(inner, _maker=maker)

    def __getitem__(self, index: Any) -> Any:
        self._maker.begin()
        try:
            return self._inner[index]
        except Exception:
            return self._maker.failed()

    def __getitems__(self, indices: Any) -> Any:
        self._maker.begin()
        inner = self._inner
        try:
            if getattr(inner, "__getitems__", None):
                return inner.__getitems__(indices)
            return [inner[index] for index in indices]
        except Exception:
            return self._maker.failed()


class PlacedDataset(WorkerStandIn):
    """Stands in for an iterable data set that knows its place.

    Args:
        inner: the data set.
        maker: of this worker, or process.
    """

    def __init__(self, inner: Any, maker: Maker) -> None:
        super().__init__(inner, _maker=maker)

    def __iter__(self) -> Iterator[Any]:
        maker, inner = self._maker, self._inner
        maker.begin()
        place = maker.place()
        maker.inner, maker.ended = inner, bool(place.get(ENDED))
        if maker.ended:
            return iter(())
        if DATA in place:
            inner.load_state_dict(place[DATA])
        return _ToTheEnd(iter(inner), inner, maker)


class _ToTheEnd:
    """The samples of an iterable data set. Not a generator: that would be over after an exception."""

    def __init__(self, samples: Iterator[Any], inner: Any, maker: Maker) -> None:
        self._samples, self._inner, self._maker = samples, inner, maker

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._samples)
        except StopIteration:
            if not self._maker.ended:
                self._maker.ended = True
                if getattr(self._inner, _OF_DATASETS, None) is not None:
                    self._inner.load_state_dict(None)
            raise


class Collate:
    """Puts a batch together as the loader does, and sends along what belongs to it.

    Args:
        collate: the loader's own.
        maker: of this worker, or process.
    """

    def __init__(self, collate: Any, maker: Maker) -> None:
        self._collate = collate
        self._maker = maker

    def __call__(self, samples: Any) -> Any:
        """A batch, or a ``Delivered`` with it."""
        if type(samples) is Delivered:
            return samples  # in the place of samples that could not be made
        try:
            batch = self._collate(samples)
        except Exception:
            return self._maker.failed()
        state = self._maker.after()
        return Delivered(batch, self._maker.worker, state) if state else batch


class Alone(_SingleProcessDataLoaderIter):
    """Makes batches in this process, and counts those that it has left behind, made or not.

    Args:
        loader: the loader.
    """

    def __init__(self, loader: Any) -> None:
        self._counter = loader._given
        super().__init__(loader)

    def _next_index(self) -> Any:
        index = super()._next_index()  # type: ignore[no-untyped-call]
        self._counter.taken += 1
        return index


class Workers(_MultiProcessingDataLoaderIter):
    """The workers of a loader, seeded as they were, and asked in turn from a certain one on.

    Args:
        loader: the loader.
        seed: the number from which torch derives the seeds of workers; None to draw one, as ever.
        turn: which worker makes the first batch.
    """

    def __init__(self, loader: Any, seed: int | None, turn: int) -> None:
        self._given_seed, self._turn = seed, turn
        super().__init__(loader)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._counter = loader._given
        super()._reset(loader, first_iter)

    def _process_data(self, *args: Any) -> Any:
        self._counter.taken += 1
        return super()._process_data(*args)  # type: ignore[no-untyped-call]

    @property
    def _base_seed(self) -> int:
        return self._seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        self._seed = drawn if self._given_seed is None else self._given_seed

    def _try_put_index(self) -> None:
        turn, self._turn = self._turn, 0
        for _ in range(turn):
            next(self._worker_queue_idx_cycle)
        try:
            super()._try_put_index()
        except BaseException:
            self._counter.lost = True  # torch drops the batch that it was about to give
            raise
