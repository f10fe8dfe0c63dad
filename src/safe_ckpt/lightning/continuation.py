"""Continuing bit for bit: what Lightning's own checkpoint leaves out, gathered from all ranks and put back.

The generators of every rank, and the states of its stateful loaders, stand in the checkpoint under one key that stock Lightning
ignores. On a resume they are put back where the save was taken: after ``on_train_start``, before anything else of the loop.
"""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from safe_ckpt.core.rng import get_rng_state, set_rng_state
from safe_ckpt.lightning import loader

logger = logging.getLogger(__name__)
KEY = "safe_ckpt"


def capture(trainer: Any) -> dict[str, Any]:
    """What this rank contributes at a save."""
    loop = trainer.fit_loop
    at_end = bool(loop.epoch_loop.batch_progress.is_last_batch)
    loaders = loop._combined_loader
    states = [] if loaders is None else loaders._state_dicts()
    if at_end:
        states = [loader.at_end(state) for state in states]
    return {"rng": get_rng_state(), "loaders": states, "mid_epoch": not at_end}


def to_text(contribution: Mapping[str, Any]) -> str:
    """For the way to rank 0."""
    buffer = io.BytesIO()
    torch.save(dict(contribution), buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def assemble(texts: Mapping[int, str]) -> dict[str, Any]:
    """On rank 0: what goes into the checkpoint."""
    # Written by the ranks of this job a moment ago: trusted as far as they are.
    ranks = [torch.load(io.BytesIO(base64.b64decode(texts[rank])), weights_only=False) for rank in sorted(texts)]
    return {"version": 1, "ranks": ranks}


def put_loaders_back(checkpoint: dict[str, Any], rank: int, size: int) -> dict[str, Any] | None:
    """At ``on_load_checkpoint``: give this rank its own loaders' states. Returns this rank's contribution, if there is one."""
    saved: Sequence[dict[str, Any]] = checkpoint.get(KEY, {}).get("ranks", [])
    if not saved:
        return None
    if len(saved) != size and rank == 0:
        logger.warning(
            "the checkpoint was saved by %d ranks and is resumed by %d: the order of the data and the random numbers "
            "are not those of an uninterrupted run",
            len(saved),
            size,
        )
    if rank >= len(saved):
        return None
    mine = saved[rank]
    fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
    if "state_dict" in fit_loop:
        fit_loop["state_dict"]["combined_loader"] = mine["loaders"]
    return {**mine, "finish_epoch": _let_epoch_end(fit_loop)}


def let_next_epoch_begin(fit_loop: Any) -> None:
    """At ``on_load_checkpoint``: after a save at the end of an epoch the loop begins the next one.

    With ``max_steps`` Lightning takes such a run for one that was interrupted within the epoch, trains one batch too many and
    ends the epoch a second time. With ``max_epochs`` it does what is arranged here.
    """

    def reset() -> None:
        del fit_loop.reset
        counts = fit_loop.epoch_progress.current
        if fit_loop.restarting and counts.ready == counts.started == counts.processed:
            fit_loop._restarting = False
            fit_loop.epoch_loop.restarting = False
        fit_loop.reset()

    fit_loop.reset = reset


def _let_epoch_end(fit_loop: dict[str, Any]) -> bool:
    """Change the progress of a save after the last batch of an epoch so that the end of that epoch is not left out.

    Lightning would go straight to the next epoch, without validation and without the hooks at the end of one epoch and the
    start of the next. Counting that batch as completed, which is what happens next in a run that goes on, brings them back.
    """
    progress = fit_loop.get("epoch_loop.batch_progress")
    if not progress or not progress.get("is_last_batch"):
        return False
    due = bool(progress["total"]["completed"] == progress["total"]["processed"] - 1)
    if due:
        for count in (progress["total"], progress["current"]):
            count["completed"] = count["processed"]
    return due


def continue_from(trainer: Any, contribution: Mapping[str, Any]) -> None:
    """At ``on_train_start``: arrange that the loop goes on as it would have gone on."""
    fit_loop = trainer.fit_loop

    def on_advance_start() -> None:
        del fit_loop.on_advance_start
        set_rng_state(contribution["rng"])
        fit_loop.on_advance_start()

    fit_loop.on_advance_start = on_advance_start
    if contribution["mid_epoch"]:
        _warn_if_inexact(trainer, contribution)
        return
    _start_epoch_with(fit_loop.epoch_loop, finish=contribution["finish_epoch"])


def _start_epoch_with(epoch_loop: Any, *, finish: bool) -> None:
    def on_run_start(data_fetcher: Any) -> None:
        del epoch_loop.on_run_start
        validation_due = epoch_loop.restarting and epoch_loop._should_check_val_fx(data_fetcher)
        if finish and validation_due:
            epoch_loop.on_advance_end = on_advance_end
        elif finish:
            epoch_loop.restarting = False  # else the loop would ask for one more batch
        elif not validation_due and not epoch_loop.done:
            # Lightning made this epoch's iterator before the generators were put back, and makes no other on a restart.
            iter(data_fetcher)
        epoch_loop.on_run_start(data_fetcher)

    def on_advance_end(data_fetcher: Any) -> None:
        del epoch_loop.on_advance_end
        epoch_loop._skip_next_val = False
        epoch_loop.on_advance_end(data_fetcher)

    epoch_loop.on_run_start = on_run_start


def _warn_if_inexact(trainer: Any, contribution: Mapping[str, Any]) -> None:
    loaders = trainer.fit_loop._combined_loader
    if trainer.global_rank == 0 and (loaders is None or len(contribution["loaders"]) < len(loaders.flattened)):
        logger.warning(
            "resumed in mid-epoch with a loader that cannot tell where it was: some batches of this epoch will be seen "
            "again and the run will differ from an uninterrupted one. Use safe_ckpt.lightning.resumable(loader), a "
            "torchdata StatefulDataLoader, or save at the ends of epochs"
        )
