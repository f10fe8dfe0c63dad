"""The starts of epochs, for a loader that knows no place: their numbers, and what their order is drawn from.

Accelerate saves none of it: after a resume a loader with a generator of its own (Accelerate gives it one on several processes),
or with a seedable sampler, would begin with the order of the first epoch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from typing_extensions import Self

from safe_ckpt.accelerate.loops import Loop, is_within
from safe_ckpt.adapters import Patch
from safe_ckpt.adapters.data_position import DataPosition
from safe_ckpt.data.order import is_warm, own_as_text, put_back


def seed(loader: Any) -> dict[str, int]:
    """Return the seed of each epoch's order, where Accelerate gave a prepared loader a seedable sampler."""
    found = getattr(loader.get_sampler(), "initial_seed", None)
    return {"seed": found} if isinstance(found, int) else {}


def seed_as(loader: Any, state: Mapping[str, Any]) -> None:
    """Give the loader the seed of the save: a script may begin with another one."""
    if "seed" in state and seed(loader):
        loader.get_sampler().initial_seed = state["seed"]


class Watch(DataPosition):
    """The record of one loader. All Accelerators that prepared it share this; the last one to forget it restores the loader.

    Args:
        loader: a prepared one.

    Attributes:
        base: the loader within it.
        iterate: begins an epoch of that as it does by itself.
    """

    def __init__(self, loader: Any) -> None:
        self._users = 0
        self.loader = loader
        self.base = loader.base_dataloader
        self.iterate: Callable[[], Iterator[Any]] = self.base.__iter__
        self._loop = Loop()
        self._was_warm = False
        # Accelerate calls __iter__ as an attribute of the inner loader, so one of the instance is called.
        self._patch = Patch(self.base, {"__iter__": self._begin})

    @classmethod
    def on(cls, loader: Any) -> Self:
        """The record of ``loader``, which another Accelerator may have made. Call ``forget`` once for each call of this."""
        replacement = vars(loader.base_dataloader).get("__iter__")
        present = getattr(replacement, "__self__", None)
        watch = present if isinstance(present, cls) else cls(loader)
        watch._users += 1
        return watch

    def forget(self) -> None:
        """Leave the loader as it was."""
        self._users -= 1
        if not self._users:
            self._patch.give_back()

    def _begin(self) -> Iterator[Any]:
        raise NotImplementedError

    @contextlib.contextmanager
    def drawing_nothing(self, there: bool) -> Iterator[None]:
        """Have the start of an iterator that was there before the epoch began draw nothing from the generators."""
        own, self._was_warm = self.base.generator, False
        if there:
            self.base.generator = torch.Generator()
        try:
            yield
        finally:
            self.base.generator = own


class Epochs(Watch):
    """The epochs of one loader. After a save within an epoch that epoch comes next; the script may leave out batches of it."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._reading = loader
        self._begun: Mapping[str, str] = {}
        self._resumed: Mapping[str, Any] = {}

    def state(self) -> dict[str, Any]:
        """See ``DataPosition``."""
        now = own_as_text(self.base)
        # zip leaves the second one before its end is seen.
        over = getattr(self._reading, "end_of_dataloader", False) and not self._loop.is_place()
        within = is_within(self._reading) and not over and not self._loop.is_left()
        return {
            "epoch": getattr(self.loader, "iteration", None),
            "over": within and bool(self._reading.end_of_dataloader),
            "begun": self._begun if within else now,
            "now": now,
            "warm": self._was_warm or is_warm(self.base),
            **seed(self.loader),
        }

    def resume(self, state: dict[str, Any]) -> None:
        """See ``DataPosition``. Of what was told of a loader of another kind the number and the seed count."""
        number, over = state.get("epoch", state.get("iteration")), bool(state.get("over"))
        if number is not None:
            self.loader.iteration = number + over  # scripts count steps, and begin the next epoch then
            seed_as(self.loader, state)
        self._resumed = {**state, "next": getattr(self.loader, "iteration", None)} if "epoch" in state else {}
        self._reading, self._begun = self.loader, self._resumed.get("now" if over else "begun", {})
        self._loop, self._was_warm = Loop(left=True), bool(self._resumed.get("warm"))
        put_back(self.base, self._begun)

    def begins(self, loop: Any) -> None:
        """A loop begins: over the loader, or over one that leaves out batches of it."""
        resumed, self._resumed = self._resumed, {}
        number = getattr(loop, "iteration", None)
        if resumed and resumed["over"] and _gives_nothing(loop):
            number = resumed["epoch"]  # the script leaves out all batches of that epoch
            put_back(self.base, resumed["begun"])
        elif resumed and number != resumed["next"]:  # set_epoch was called for another one
            put_back(self.base, resumed["now"])
        if resumed and loop is not self.loader and number is not None:
            self._patch.once(loop, "end", functools.partial(self._is_over, number))
        self._reading, self._begun, self._loop = loop, own_as_text(self.base), Loop(resumed=True)

    def _is_over(self, number: int, end: Callable[[], None]) -> None:
        self.loader.iteration = number + 1  # else the next epoch would have the number of this one
        end()

    def _begin(self) -> Iterator[Any]:
        with self.drawing_nothing(self._was_warm):
            batches = _handed_on(self.iterate())
        self._loop = Loop(batches)
        return batches


def _gives_nothing(loop: Any) -> bool:
    try:
        return len(loop) <= 0
    except TypeError:  # a stream
        return False


def _handed_on(batches: Iterator[Any]) -> Iterator[Any]:
    """Hand the batches on. This iterator ends with the loop, while that of workers that stay does not."""
    yield from batches
