"""Random numbers that belong to a sample: what a data set draws for it depends on nothing that came before.

The index of a sample carries the epoch's token to the worker. There, before the sample is made, the generators of that process
are set by token and index. What puts a batch together draws on after its last sample.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import xxhash
from torch.utils.data import get_worker_info

from safe_ckpt.data import generators

logger = logging.getLogger(__name__)
_MASK = (1 << 64) - 1
_LOOKS = 4


class Batch(list[Any]):
    """Indices of a batch that carry the token of their epoch."""

    token: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _batch, (list(self), self.token)


class One:
    """An index without a batch, which carries the token of its epoch."""

    def __init__(self, index: Any, token: int) -> None:
        self.index = index
        self.token = token


def _batch(indices: Sequence[Any], token: int) -> Batch:
    made = Batch(indices)
    made.token = token
    return made


def marked(given: Iterator[Any], token: int, *, batched: bool) -> Iterator[Any]:
    """The same indices, carrying the token.

    Args:
        given: lists of indices, or indices.
        token: the epoch's.
        batched: whether they are lists.
    """
    for indices in given:
        yield _batch(indices, token) if batched else One(indices, token)


class _StandIn:
    """Looks like a data set where its samples are made: attributes, length and ``isinstance`` are the data set's."""

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
        """What ``isinstance`` in a ``worker_init_fn`` should see."""
        return type(self.__dict__.get("_inner", self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _stand_in, (type(self), dict(self.__dict__))  # a worker that was not forked makes it again

    def __len__(self) -> int:
        return len(self._inner)


class SeededDataset(_StandIn):
    """Stands in for a data set where its samples are made.

    Args:
        inner: the data set.
        own_process: whether that is a worker. Elsewhere training uses the same generators, so they are given back.
    """

    def __init__(self, inner: Any, *, own_process: bool) -> None:
        super().__init__(inner, _own_process=own_process)

    def __getitem__(self, index: One) -> Any:
        if self._own_process:
            return self._one(index)
        with generators.borrowed():
            return self._one(index)

    def __getitems__(self, indices: Batch) -> list[Any]:
        if self._own_process:
            return [self._made(index, indices.token) for index in indices]
        with generators.borrowed():
            return [self._made(index, indices.token) for index in indices]

    def _one(self, index: One) -> Any:
        return self._made(index.index, index.token)

    def _made(self, index: Any, token: int) -> Any:
        set_seed(token, index)
        return self._inner[index]


class WatchedDataset(_StandIn):
    """Stands in for a data set in a worker: looks whether its first samples draw random numbers, and says so once.

    Args:
        inner: the data set.
        what: the loader, for the message.
    """

    def __init__(self, inner: Any, what: str) -> None:
        super().__init__(inner, _what=what, _looks=_LOOKS)

    def __getitem__(self, index: Any) -> Any:
        return self._watched(lambda: self._inner[index])

    def __getitems__(self, indices: Any) -> Any:
        if hasattr(self._inner, "__getitems__"):
            return self._watched(lambda: self._inner.__getitems__(indices))
        return [self[index] for index in indices]

    def _watched(self, make: Callable[[], Any]) -> Any:
        own: dict[str, Any] = self.__dict__
        if own["_looks"] <= 0:
            return make()
        own["_looks"] -= 1
        before = generators.fingerprint()
        made = make()
        if generators.fingerprint() != before:
            own["_looks"] = 0
            _say(own["_what"])
        return made


def _say(what: str) -> None:
    info = get_worker_info()
    if info is None or info.id == 0:
        # Not a warning of Python: where those are errors, torch would end the training with it.
        logger.warning(
            "%s: its data set draws random numbers in worker processes. After a resume within an epoch it draws others than an "
            "uninterrupted run would. resumable(loader, worker_seeding='per_sample') makes them the same",
            what,
        )


def _stand_in(kind: type[Any], state: dict[str, Any]) -> Any:
    made: Any = object.__new__(kind)
    made.__dict__.update(state)
    return made


def set_seed(token: int, index: Any) -> None:
    """Set the generators of this process, by token and index."""
    name = index if isinstance(index, int) else xxhash.xxh3_64_intdigest(repr(index).encode())
    seed = mixed(token, int(name))
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def mixed(token: int, number: int) -> int:
    """As ``SplitMix64`` (Steele, Lea and Flood, 2014): neighbouring numbers give seeds that have nothing in common."""
    value = (token + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
