"""The gate in front of every optimizer's step: it opens when the copies that are under way are complete.

One hook on all optimizers of the process (``torch.optim.optimizer.register_optimizer_step_pre_hook``): a hook on the
optimizer at hand would miss one that is wrapped, and those that step within backward.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from safe_ckpt.core.staging.overlap import KNOWN
from safe_ckpt.core.staging.snapshot import StagingCopy

if TYPE_CHECKING:
    import torch

_lock = threading.RLock()
_pending: tuple[tuple[StagingCopy, float], ...] = ()
_hooked = False


def close(copy: StagingCopy, timeout_s: float) -> None:
    """From now on every step waits for ``copy``, until it is complete; after ``timeout_s`` the copy is given up instead."""
    global _pending, _hooked  # noqa: PLW0603 - the hook is the process's, so is what it looks at
    with _lock:
        if not _hooked:
            # For good: to take it away while another thread walks through the hooks would break that thread's step.
            register_optimizer_step_pre_hook(_before_step)
            os.register_at_fork(after_in_child=_forget)
            _hooked = True
        _pending = (*_pending, (copy, timeout_s))


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not _pending:
        return None
    # ``args`` begins with the optimizer itself.
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if type(optimizer) not in KNOWN or not callable(closure):
        _pass()
        return None
    # It evaluates the closure, with forward and backward in it, before it changes anything: wait after that.
    wrapped = _then_pass(closure)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": wrapped}
    return (args[0], wrapped, *args[2:]), kwargs


def _then_pass(closure: Callable[[], Any]) -> Callable[[], Any]:
    def evaluate() -> Any:
        result = closure()
        _pass()
        return result

    return evaluate


def _pass() -> None:
    global _pending  # noqa: PLW0603
    waiting = _pending
    for copy, timeout_s in waiting:
        copy.pass_gate(timeout_s)
    with _lock:
        _pending = tuple(entry for entry in _pending if entry not in waiting)


def _forget() -> None:
    # A forked process has no threads that copy, and nothing to save.
    global _pending, _lock
    _pending, _lock = (), threading.RLock()
