"""Loops over a loader: the last one is still a place in its data, or was left for good, such as an evaluation of a few batches.

A loop that somebody goes on with is one. So is one that was broken off in training, as by a signal: it is told by a step of an
optimizer while it ran. ``break`` and ``next(iter(loader))`` in an evaluation leave none: the next one begins at its beginning.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

_steps = 0
_hooked = False


class Loop:
    """One loop over a loader.

    Args:
        batches: what it goes through; held by the loop alone, so that it ends with it.
        resumed: whether it began at a place that was loaded: then it is a place, whatever comes.
        left: whether it is over already, as another place was loaded.
    """

    def __init__(self, batches: Iterator[Any] | None = None, *, resumed: bool = False, left: bool = False) -> None:
        global _hooked  # noqa: PLW0603 - the hook is the process's
        if batches is not None and not _hooked:
            register_optimizer_step_post_hook(_after_step)  # for good: see ``core.state.overlap``
            _hooked = True
        self._steps = _steps
        self._left = left
        self._resumed = resumed
        self._batches = weakref.ref(batches, self._end) if batches is not None else None

    def is_left(self) -> bool:
        """Whether nobody goes on with it, and nobody trained in it."""
        return self._left and not self._resumed

    def is_new(self) -> bool:
        """Whether somebody goes through it now, and from the beginning of an epoch."""
        return not self._resumed and self._is_gone_through()

    def is_place(self) -> bool:
        """Whether somebody goes through it now, or it began at a place that was loaded."""
        return self._resumed or self._is_gone_through()

    def _is_gone_through(self) -> bool:
        return self._batches is not None and self._batches() is not None

    def _end(self, _: object) -> None:
        self._left = self._steps == _steps

    def __reduce__(self) -> tuple[Any, ...]:
        return Loop, ()  # of a copy of the loader nothing is known


def is_within(loader: Any) -> bool:
    """Whether a loop is iterating over a prepared loader."""
    active = getattr(getattr(loader, "gradient_state", None), "dataloader_references", ())
    return any(one is loader for one in active)


def _after_step(*_: object) -> None:
    global _steps  # noqa: PLW0603
    _steps += 1
