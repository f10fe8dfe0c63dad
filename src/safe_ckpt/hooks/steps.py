"""How many steps the optimizers of this process have made, counted by torch's own hook."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_lock = threading.RLock()
_hooked = False
_count = 0
_stepped: set[int] = set()
_waiting: tuple[Callable[[], None], ...] = ()


def begin_counting(at_a_step: Callable[[], None]) -> None:
    """Count from now on, for good, and call this once, on the thread that trains, behind the next step."""
    global _hooked, _waiting  # noqa: PLW0603 - the hook is the process's
    from torch.optim.optimizer import register_optimizer_step_post_hook  # takes a while to import

    with _lock:
        if not _hooked:
            register_optimizer_step_post_hook(_after_step)  # for good: see ``core.state.overlap``
            _hooked = True
        _waiting = (*_waiting, at_a_step)


def forget(at_a_step: Callable[[], None]) -> None:
    """Do not call this any more."""
    global _waiting  # noqa: PLW0603
    with _lock:
        _waiting = tuple(one for one in _waiting if one != at_a_step)


def taken() -> int:
    """The steps so far. Optimizers that take turns, such as those of a GAN, make one step together."""
    return _count


def _after_step(optimizer: Any, *_: object) -> None:
    global _count, _waiting  # noqa: PLW0603
    number = id(optimizer)
    if number in _stepped or not _stepped:
        _stepped.clear()
        _count += 1
    _stepped.add(number)
    if _waiting:
        with _lock:
            waiting, _waiting = _waiting, ()
        for one in waiting:
            one()
