"""What a Trainer goes on without after a resume, told in warnings."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from safe_ckpt.layouts.table import TRAINER_STATE

logger = logging.getLogger(__name__)


def state_in(folder: Path) -> dict[str, Any] | None:
    """The Trainer's record in a checkpoint; None where there is none."""
    file = folder / TRAINER_STATE
    return dict(json.loads(file.read_bytes())) if file.is_file() else None


def warn(folder: Path, arguments: Any) -> None:
    """Say what differs from a run that was not stopped.

    Args:
        folder: the checkpoint.
        arguments: of the Trainer.
    """
    state = state_in(folder) if not arguments.process_index else None
    if state is None:
        return
    rows, step = state["log_history"], state["global_step"]
    wanted = {"evaluation": ("eval_strategy", "eval_"), "row of the log": ("logging_strategy", "loss")}
    lost = [
        what
        for what, (name, key) in wanted.items()
        if getattr(arguments, name) == "epoch"
        and not any(key in word for row in rows if row.get("step") == step for word in row)
    ]
    if lost and (float(state["epoch"] or 0).is_integer() or step >= state["max_steps"]):
        logger.warning(
            "%s was saved in the last step of an epoch, before what is done at its end: the %s of that epoch is missing, and "
            "what follows from it. Give saves, evaluations and logging one strategy",
            *(folder, " and the ".join(lost)),
        )
    if arguments.dataloader_persistent_workers and any("eval_loss" in row for row in rows):
        logger.warning(
            "the workers of evaluations, which stay (dataloader_persistent_workers), begin anew: from the next evaluation on "
            "the random numbers of this process are other ones"
        )
