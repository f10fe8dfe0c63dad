"""Random numbers that belong to a sample: what a data set draws for it depends on nothing that came before.

The index of a sample carries the epoch's token to the worker. There, before the sample is made, the generators of that process
are set by token and index. What puts a batch together draws on after its last sample.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import xxhash

from safe_ckpt.core.state import rng
from safe_ckpt.data.workers import StandIn

_MASK = (1 << 64) - 1


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


class SeededDataset(StandIn):
    """Stands in for a data set where its samples are made.

    Args:
        inner: the data set.
        own_process: whether that is a worker. Elsewhere training uses the same generators, so they are given back.
    """

    def __init__(self, inner: Any, *, own_process: bool) -> None:
        super().__init__(inner, _own_process=own_process, _left=None)

    def __getitem__(self, index: One) -> Any:
        if self._own_process:
            return self._one(index)
        with rng.borrowed():
            made = self._one(index)
            self.__dict__["_left"] = rng.snapshot()
        return made

    def __getitems__(self, indices: Batch) -> list[Any]:
        if self._own_process:
            return [self._made(index, indices.token) for index in indices]
        with rng.borrowed():
            made = [self._made(index, indices.token) for index in indices]
            self.__dict__["_left"] = rng.snapshot()
        return made

    @property
    def left(self) -> Any:
        """What the generators were after the last sample."""
        return self._left

    def _one(self, index: One) -> Any:
        return self._made(index.index, index.token)

    def _made(self, index: Any, token: int) -> Any:
        set_seed(token, index)
        return self._inner[index]


class SeededCollate:
    """Stands in for what puts a batch together, outside of workers: it draws on where the last sample left off.

    Args:
        collate: the loader's own.
        dataset: makes the samples.
    """

    def __init__(self, collate: Any, dataset: SeededDataset) -> None:
        self._collate = collate
        self._dataset = dataset

    def __call__(self, samples: Any) -> Any:
        """A batch."""
        with rng.borrowed():
            rng.set_to(self._dataset.left)
            return self._collate(samples)


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
