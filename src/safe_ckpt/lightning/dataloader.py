"""A loader whose position in the data survives a restart in mid-epoch, exactly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from safe_ckpt.adapters.extras import get_rng_state, set_rng_state

_Loader = TypeVar("_Loader", bound="DataLoader[Any]")
_KEY = "safe_ckpt.position"


class _Batches:
    """The batches of an epoch. As Lightning has it for those of a DataLoader, none go along in a copy of the Trainer."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def __reduce__(self) -> tuple[Any, ...]:
        return iter, ((),)


class _Resumable:
    """Mixed into the class of a DataLoader by ``resumable``.

    After a restart the epoch is started with the generators as they were when it began, the batches that were used up are
    fetched again and dropped, and the generators are set to where they were at the save. So the next batch, and everything
    random after it, is the same.
    """

    _begun: dict[str, Any] | None = None
    _fetched = 0
    _pending: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is. Called on every rank at a save."""
        return {_KEY: {"begun": self._begun, "fetched": self._fetched, "now": get_rng_state()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there at the start of the next iteration."""
        position = state.get(_KEY)
        # Without a beginning there is nothing to skip: the next epoch starts afresh.
        self._pending = position if position and position["begun"] is not None and position["fetched"] else None

    def __iter__(self) -> Iterator[Any]:
        pending, self._pending = self._pending, None
        return _Batches(self._go_on(pending))

    def __reduce__(self) -> tuple[Any, ...]:
        # The class was made at run time: another process makes it again.
        return _make, (type(self).__mro__[2], self.__dict__)

    def _go_on(self, pending: dict[str, Any] | None) -> Iterator[Any]:
        # A generator: all this happens when the first batch is asked for, after the hooks before it have run.
        if pending is not None:
            set_rng_state(pending["begun"])
        self._begun = get_rng_state()
        self._fetched = 0
        batches = super().__iter__()  # type: ignore[misc]
        if pending is not None:
            unseen = pending.get("unseen", 0)
            for _ in range(pending["fetched"] - unseen):
                next(batches)
            again = [next(batches) for _ in range(unseen)]
            self._fetched = pending["fetched"] - unseen
            set_rng_state(pending["now"])
            batches = itertools.chain(again, batches)
        for batch in batches:
            self._fetched += 1
            yield batch
        self._begun, self._fetched = None, 0


def at_end(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a loader after the last batch of an epoch. Lightning does not ask for more, so the loader cannot know."""
    return {_KEY: {**state[_KEY], "begun": None}} if _KEY in state else state


def generators(states: Sequence[Any]) -> dict[str, Any] | None:
    """What the generators were at a save, as far as one of these states of loaders says."""
    ours = (state[_KEY]["now"] for state in states if isinstance(state, dict) and _KEY in state)
    return next(ours, None)


def at_batch(state: dict[str, Any], *, unseen: int, now: dict[str, Any]) -> dict[str, Any]:
    """The state of a loader within an epoch.

    Args:
        state: what the loader says.
        unseen: how many of the batches that it gave were not trained on; they are given again.
        now: what the generators were when training stopped, which may be a while ago.
    """
    if _KEY not in state:
        return state
    return {_KEY: {**state[_KEY], "unseen": unseen, "now": now}}


def resumable(loader: _Loader) -> _Loader:
    """Make a DataLoader resumable in mid-epoch. Returns a loader that stands in for it, of a subclass of its class.

    Resuming fetches the used-up batches of the epoch again, which costs their loading time once. The data order is exact as
    long as the dataset, the sampler and the number of workers are what they were. For very long epochs use torchdata's
    ``StatefulDataLoader``, whose workers can skip.

    Args:
        loader: a ``torch.utils.data.DataLoader``.

    Raises:
        TypeError: it is not a DataLoader, or it has no length: Lightning fetches ahead of such a one, uncounted.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"resumable() takes a DataLoader, got {type(loader).__name__}")
    try:
        len(loader)
    except TypeError:
        message = "resumable() needs a loader with a length: give the dataset a __len__, or save at the ends of epochs"
        raise TypeError(message) from None
    made: _Loader = loader if isinstance(loader, _Resumable) else _make(type(loader), loader.__dict__)
    return made


def _make(kind: type[Any], state: dict[str, Any]) -> Any:
    subclass: Any = type(f"Resumable{kind.__name__}", (_Resumable, kind), {"__module__": __name__})
    made = subclass.__new__(subclass)
    # Past DataLoader's guard against changing attributes: these are the ones it was built with.
    made.__dict__.update(state)
    return made
