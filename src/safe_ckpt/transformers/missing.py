"""Warnings of what a Trainer goes on without after a resume."""

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
    if float(state["epoch"] or 0).is_integer() or step >= state["max_steps"]:
        _warn_of_the_end(folder, state, arguments)
    control = state.get("stateful_callbacks", {}).get("TrainerControl", {}).get("args", {})
    if control.get("should_training_stop") and step < state["max_steps"]:
        logger.warning(
            "a callback stopped training at the step of %s: this run goes on until a callback stops it again",
            folder,
        )
    if arguments.dataloader_persistent_workers and any("eval_loss" in row for row in rows):
        logger.warning(
            "the workers of evaluations, which stay (dataloader_persistent_workers), begin anew: from the next evaluation on "
            "the random numbers of this process are other ones"
        )


def warn_of_the_end(folder: Path, arguments: Any) -> None:
    """Say what is done at the end of an epoch, or of a pass over a stream, and was not done yet at this save in its last step.

    Args:
        folder: the checkpoint.
        arguments: of the Trainer.
    """
    if not arguments.process_index and (state := state_in(folder)) is not None:
        _warn_of_the_end(folder, state, arguments)


def _warn_of_the_end(folder: Path, state: dict[str, Any], arguments: Any) -> None:
    words = {word for row in state["log_history"] if row.get("step") == state["global_step"] for word in row}
    done = {"eval_strategy": any(word.startswith("eval_") for word in words), "logging_strategy": "loss" in words}
    names = {"eval_strategy": "evaluation", "logging_strategy": "row of the log"}
    lost = [what for name, what in names.items() if getattr(arguments, name) == "epoch" and not done[name]]
    if lost:
        logger.warning(
            "%s was saved in the last step of an epoch, before what is done at its end: the %s of that epoch is missing, and "
            "what follows from it. Give saves, evaluations and logging one strategy",
            *(folder, " and the ".join(lost)),
        )


def warn_of_no_step(logs: dict[str, Any], arguments: Any) -> None:
    """Say what a row of the log lacks: behind a resume no step was left of the pass over a stream.

    Args:
        logs: the row.
        arguments: of the Trainer.
    """
    if "loss" in logs and "grad_norm" not in logs and arguments.max_grad_norm > 0 and not arguments.process_index:
        logger.warning(
            "no step was left of the pass over the stream: the row of the log at its end has no grad_norm, and the learning "
            "rate of the next step"
        )
