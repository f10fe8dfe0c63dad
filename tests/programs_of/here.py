"""Starts of a program in this process: what one tells, where it is stopped by an exception, and which of its saves fail."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch

from programs_of.processes import Started
from safe_ckpt.core.writer import sink
from safe_ckpt.testing import inline_saves


class StoppedError(Exception):
    """Where a start is told to stop. Between processes this is a kill."""


class HereInProcess:
    """As ``start.Here``, without a process of its own.

    Args:
        out: the folder for its checkpoints.
        stop: which moment to stop at, and the how-manieth; "" for none.

    Attributes:
        events: position, text.
        results: name -> value at the end.
        notes: name -> values.
    """

    stock, rank, number = False, 0, 0

    def __init__(self, out: Path, stop: tuple[str, int] = ("", 0), **more: Any) -> None:
        self.out, self._stop, self.more = out, stop, more
        self.events: list[tuple[int, str]] = []
        self.results: dict[str, Any] = {}
        self.notes: dict[str, list[Any]] = {}
        self._met = 0

    def meets(self, what: str) -> None:
        """Stops there if it was told to."""
        self._met += what == self._stop[0]
        if what == self._stop[0] and self._met == self._stop[1]:
            raise StoppedError(what)

    def event(self, position: int, text: str) -> None:
        """As there."""
        self.events.append((position, text))

    def result(self, name: str, value: Any) -> None:
        """As there."""
        self.results[name] = value

    def note(self, name: str, value: Any) -> None:
        """As there."""
        self.notes.setdefault(name, []).append(value)

    def started(self, said: str) -> Started:
        """As a start in a process of its own that came to its end, or was stopped."""
        told: list[dict[str, Any]] = [{"position": at, "event": text} for at, text in self.events]
        told += [{"result": name, "value": value} for name, value in self.results.items()]
        return Started(codes=(0,), lines={}, told={0: told}, said=said)


def seed(number: int) -> None:
    """Of the generators of this process."""
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def drawn() -> int:
    """What the generators of this process are at, as a number."""
    found = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()
    return zlib.crc32(repr(found).encode())


@contextlib.contextmanager
def full_disk(is_full: Callable[[], bool]) -> Iterator[None]:
    """Within, this process writes its saves itself, and has no space for one that begins while the disk is full.

    What frameworks collect then is what came since: going through all that a process of the tests has takes most of the time.
    """
    write = sink.write_file

    def written(*given: Any) -> Any:
        if is_full():
            raise OSError(errno.ENOSPC, "the disk is full")
        return write(*given)

    gc.freeze()
    try:
        with inline_saves(), mock.patch.object(sink, "write_file", written):
            yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing is logged: on purpose much goes wrong."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def first_difference(whole: Sequence[tuple[int, str]], found: Sequence[tuple[int, str]], behind: int) -> str:
    """Of the events behind a position: the first that is another one, as far as both go."""
    ours, theirs = ([text for at, text in events if at > behind] for events in (whole, found))
    for number, (expected, came) in enumerate(zip(ours, theirs, strict=False)):
        if expected != came:
            kind = "event" if expected.split()[0] != came.split()[0] else "what a hook sees"
            return f"{kind}: {came} instead of {expected}, {number} behind step {behind}"
    return f"more: {theirs[len(ours)]} behind the end" if len(theirs) > len(ours) else ""
