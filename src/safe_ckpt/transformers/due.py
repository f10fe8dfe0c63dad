"""With ``checkpoint_every = "auto"`` the Trainer saves when it is time to, beside what ``save_strategy`` asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from safe_ckpt.adapters import Engine
from safe_ckpt.ledger.pace import pace_of


class SaveWhenDue(TrainerCallback):
    """Asks behind each step. All processes ask. Behind the last step it saves, as ``save_strategy="steps"`` does.

    Args:
        engine: where they meet.
        directory: has the record of earlier runs.
    """

    def __init__(self, engine: Engine, directory: Path) -> None:
        self._pace = pace_of(engine, directory)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 (names of the Trainer's)
        """See ``TrainerCallback``."""
        control.should_save |= self._pace.due() or state.global_step >= state.max_steps
