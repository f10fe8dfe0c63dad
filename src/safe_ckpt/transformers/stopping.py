"""After a signal of ``save_on_signals`` on any process all of them save at one step, and ``train()`` returns."""

from __future__ import annotations

import logging
import math
from typing import Any

from transformers import TrainerCallback

from safe_ckpt.adapters import Engine

logger = logging.getLogger(__name__)
_JIT = "CheckpointManager"


class StopAtSignal(TrainerCallback):
    """The Trainer's last callback: at the end of each step it asks whether the processes are to stop. All of them ask.

    An evaluation that is due at that step comes first, as without the signal. In an epoch that is broken off nothing is logged,
    evaluated or saved for the end of the epoch.

    Args:
        engine: knows of the signals.

    Attributes:
        stopped: whether training was stopped before its end.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.stopped = False
        self._save_due = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 (names of the Trainer's)
        """See ``TrainerCallback``."""
        if self._engine.stop_requested() and state.global_step < state.max_steps:
            self.stopped = True
            # At the end of an epoch the save comes behind what that brings.
            self._save_due = not _is_at_epoch_end(state)
            control.should_save |= self._save_due

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 (names of the Trainer's)
        """See ``TrainerCallback``."""
        if self.stopped and _is_at_epoch_end(state):
            self._save_due = control.should_save = True
        elif self.stopped:
            control.should_log = control.should_evaluate = control.should_save = False

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 (names of the Trainer's)
        """See ``TrainerCallback``. Not before: what is saved says whether a callback wants training to be over."""
        control.should_training_stop |= self._save_due

    def saves(self, is_best: Any) -> Any:
        """Return whether the Trainer saves behind an evaluation, with ``save_strategy="best"``."""
        return is_best or self._save_due


def without_jit(handler: Any) -> Any:
    """The handler that runs besides ours: not that of ``enable_jit_checkpoint``, which would save on each process alone."""
    if type(getattr(handler, "__self__", None)).__name__ != _JIT:
        return handler
    logger.warning(
        "enable_jit_checkpoint is left aside at SIGTERM, which save_on_signals has: all processes save at one step, and stop"
    )
    return None


def _is_at_epoch_end(state: Any) -> bool:
    return bool(state.epoch) and math.isclose(state.epoch, round(state.epoch), abs_tol=1e-9)
