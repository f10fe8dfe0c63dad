"""Continuing bit for bit: what Lightning's own checkpoint leaves out, gathered from all ranks and put back.

The generators of every rank, and the states of its stateful loaders, stand in the checkpoint under one key that stock Lightning
ignores. On a resume they are put back where the save was taken: after ``on_train_start``, before anything else of the loop.

``max_steps``, ``should_stop``, a Timer and EarlyStopping can end ``fit`` in the middle of an epoch. Lightning counts that epoch
as processed, as it does one that ended, and runs the hooks at the end of an epoch. What tells the two apart is
``batch_progress.is_last_batch``: whether the data, or ``limit_train_batches``, had nothing more to give after that batch.
"""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from safe_ckpt.adapters import patch
from safe_ckpt.adapters.extras import get_rng_state, set_rng_state
from safe_ckpt.lightning import dataloader

logger = logging.getLogger(__name__)
KEY = "safe_ckpt"


def capture(trainer: Any, broken_off: dict[str, Any] | None) -> dict[str, Any]:
    """What this rank contributes at a save.

    Args:
        trainer: in ``fit``.
        broken_off: what the generators were where this epoch was broken off; None where it was not.
    """
    loop = trainer.fit_loop
    ended = at_end(loop)
    rng = get_rng_state() if broken_off is None or ended else broken_off
    states, own = [], []
    if loop._combined_loader is not None:
        own = dataloader.own_generators(loop._combined_loader) if ended else []
        unseen = unprocessed(vars(loop.epoch_loop.batch_progress.current)) + _ahead(loop)
        states = dataloader.states(loop._combined_loader, ended=ended, unseen=unseen, now=rng)
    due = not ended and broken_off is None and _is_validation_due(trainer)
    return {"rng": rng, "loaders": states, "generators": own, "mid_epoch": not ended, "validation_due": due}


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


@dataclass
class Continuation:
    """What is to be done before the loop goes on.

    Attributes:
        mine: what this rank contributed at the save; None for a checkpoint of stock Lightning, or of fewer ranks.
        mid_epoch: whether the epoch of the checkpoint had not ended.
        finish_epoch: whether it was saved after the last batch of an epoch, before what follows that.
        broken_off: whether it was saved after an epoch was broken off.
    """

    mine: dict[str, Any] | None
    mid_epoch: bool
    finish_epoch: bool
    broken_off: bool


def prepare(checkpoint: dict[str, Any], rank: int, size: int) -> Continuation | None:
    """At ``on_load_checkpoint``: give this rank its own loaders' states, and have the loops know where they were.

    Args:
        checkpoint: what was loaded; changed in place.
        rank: this process's.
        size: the number of ranks.

    Returns:
        What is left to be done; None where there is no state of the loops.
    """
    fit_loop: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
    if "epoch_loop.batch_progress" not in fit_loop:
        return None
    saved: Sequence[dict[str, Any]] = checkpoint.get(KEY, {}).get("ranks", [])
    if saved and len(saved) != size and rank == 0:
        logger.warning(
            "the checkpoint was saved by %d ranks and is resumed by %d: the order of the data and the random numbers "
            "are not those of an uninterrupted run",
            len(saved),
            size,
        )
    state, batch = fit_loop.get("state_dict", {}), fit_loop["epoch_loop.batch_progress"]
    mid_epoch = bool(saved[0]["mid_epoch"]) if saved else not ended(batch)
    if mid_epoch:
        batch["is_last_batch"] = False  # an exception came while that batch was trained on: it is to be done again
    if saved:
        mine = saved[rank] if rank < len(saved) else None
    else:
        mine = _of_stock(state.get("combined_loader", []), batch["current"]) if size == 1 else None
    if mine is not None and "state_dict" in fit_loop:
        state["combined_loader"] = mine["loaders"]
    if not mid_epoch and "combined_loader" in state:
        state["combined_loader"] = [dataloader.at_end(one) for one in state["combined_loader"]]
    return Continuation(
        mine=mine,
        mid_epoch=mid_epoch,
        finish_epoch=_let_epoch_end(fit_loop),
        broken_off=mid_epoch and go_on_within(fit_loop),
    )


def _of_stock(states: Sequence[Any], batches: Mapping[str, int]) -> dict[str, Any] | None:
    """What a loader of ours said to stock Lightning: where it was, and what the generators were."""
    rng = dataloader.generators(states)
    if rng is None:
        return None
    unseen = unprocessed(batches)
    return {"rng": rng, "loaders": [dataloader.at_batch(state, unseen=unseen) for state in states]}


def let_next_epoch_begin(fit_loop: Any) -> None:
    """At ``on_load_checkpoint``: after a save at the end of an epoch the loop begins the next one.

    With ``max_steps`` Lightning takes such a run for one that was interrupted within the epoch, trains one batch too many and
    ends the epoch a second time. With ``max_epochs`` it does what is arranged here.
    """

    def begin_next(reset: Callable[[], None]) -> None:
        counts = fit_loop.epoch_progress.current
        # An epoch that was broken off is not counted as processed any more: ``go_on_within``.
        if fit_loop.restarting and counts.ready == counts.started == counts.processed:
            fit_loop._restarting = False
            fit_loop.epoch_loop.restarting = False
        reset()

    patch.once(fit_loop, "reset", begin_next)


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


def continue_from(trainer: Any, continuation: Continuation) -> None:
    """At ``on_train_start``: arrange that the loop goes on as it would have gone on."""
    fit_loop, mine = trainer.fit_loop, continuation.mine
    dataloader.refuse_unused(fit_loop)
    if mine is not None:
        _put_generators_back(fit_loop, mine["rng"])
    if not continuation.mid_epoch:
        if mine is not None and fit_loop._combined_loader is not None:
            dataloader.put_own_back(fit_loop._combined_loader, mine.get("generators", []))
            dataloader.load_again(fit_loop, mine["loaders"])
        _start_epoch_with(fit_loop.epoch_loop, finish=continuation.finish_epoch)
        return
    if continuation.broken_off:
        _train_at_once(fit_loop.epoch_loop)
    elif mine is not None and mine.get("validation_due"):
        _validate_at_once(fit_loop.epoch_loop)


def let_schedulers_step(trainer: Any) -> None:
    """At ``on_train_epoch_end``: also in the epoch that was resumed, schedulers that follow a metric step, if it is known.

    Lightning leaves them out there, because a checkpoint has no metrics: the learning rate would be another one from then on.
    """
    fit_loop, known = trainer.fit_loop, trainer.callback_metrics
    follow = [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    if fit_loop.restarting and follow and all(name in known for name in follow):
        fit_loop._restarting = False


def _put_generators_back(fit_loop: Any, rng: Mapping[str, Any]) -> None:
    def put_back(on_advance_start: Callable[[], None]) -> None:
        set_rng_state(rng)
        on_advance_start()

    patch.once(fit_loop, "on_advance_start", put_back)


def _train_at_once(epoch_loop: Any) -> None:
    """What follows a batch was done before the epoch was broken off: the validation, if it was due, and the schedulers."""

    def begin(on_run_start: Callable[[Any], None], data_fetcher: Any) -> None:
        on_run_start(data_fetcher)
        epoch_loop.restarting = False

    patch.once(epoch_loop, "on_run_start", begin)


def _validate_at_once(epoch_loop: Any) -> None:
    """The save came before a validation within the epoch. Lightning would leave that validation out."""

    def leave_out_the_batch(_: Callable[[Any], None], __: Any) -> None:
        epoch_loop.val_loop.restarting = False
        if not epoch_loop._should_accumulate():
            epoch_loop._batches_that_stepped -= 1  # counted once already, for the restart

    patch.once(epoch_loop, "advance", leave_out_the_batch)


def _is_validation_due(trainer: Any) -> bool:
    """Whether a validation within the epoch follows the batch that was trained on last."""
    loop = trainer.fit_loop.epoch_loop
    counts = loop.batch_progress.current
    before = counts.ready == counts.processed == counts.completed + 1
    return bool(before and not trainer.validating and loop._should_check_val_fx(trainer.fit_loop._data_fetcher))


def _start_epoch_with(epoch_loop: Any, *, finish: bool) -> None:
    def begin(on_run_start: Callable[[Any], None], data_fetcher: Any) -> None:
        validation_due = epoch_loop.restarting and epoch_loop._should_check_val_fx(data_fetcher)
        if finish and validation_due:
            patch.once(epoch_loop, "on_advance_end", validate_too)
        elif finish:
            epoch_loop.restarting = False  # else the loop would ask for one more batch
        elif not validation_due and not epoch_loop.done:
            # Lightning made this epoch's iterator before the generators were put back, and makes no other on a restart.
            iter(data_fetcher)
        on_run_start(data_fetcher)

    def validate_too(on_advance_end: Callable[[Any], None], data_fetcher: Any) -> None:
        epoch_loop._skip_next_val = False
        on_advance_end(data_fetcher)

    patch.once(epoch_loop, "on_run_start", begin)


def at_end(fit_loop: Any) -> bool:
    """Whether the loop has trained on the last batch of an epoch, and has not begun the next one."""
    # A loader that gives fewer batches than its length says ends an epoch without a last batch.
    fetcher, batches = fit_loop._data_fetcher, fit_loop.epoch_loop.batch_progress
    last = batches.is_last_batch or (fetcher is not None and fetcher.done)
    return bool(last) and not unprocessed(vars(batches.current))


def ended(batch_progress: Mapping[str, Any]) -> bool:
    """The same of the state of a loop, as far as it tells."""
    return bool(batch_progress["is_last_batch"]) and not unprocessed(batch_progress["current"])


def unprocessed(batches: Mapping[str, int]) -> int:
    """How many batches were fetched and not trained on: one where an exception came in between."""
    return max(0, batches["ready"] - batches["processed"])


def _ahead(fit_loop: Any) -> int:
    """How many batches the fetcher has taken and not handed on: one, of loaders that have no length.

    It drops that one where the next one cannot be fetched.
    """
    fetcher = fit_loop._data_fetcher
    dropped = fetcher.fetched - fit_loop.epoch_loop.batch_progress.current.ready if fetcher is not None else 0
    return max(len(getattr(fetcher, "batches", ())), dropped)


def go_on_within(fit_loop: dict[str, Any]) -> bool:
    """In the state of a loop that broke an epoch off, count that epoch as one that goes on.

    Stock Lightning would train the rest of it under the number of the next one, so that a DistributedSampler shuffles anew, or
    with ``max_epochs`` leave the rest out.

    Args:
        fit_loop: of a checkpoint whose epoch has not ended.

    Returns:
        Whether it was broken off.
    """
    epoch, batch = fit_loop.get("epoch_progress"), fit_loop.get("epoch_loop.batch_progress")
    if not epoch or not batch or batch["is_last_batch"] or not batch["current"]["ready"]:
        return False
    current = epoch["current"]
    if not current["processed"] or current["processed"] != current["ready"]:
        return False
    for count in (epoch["total"], current):
        count["processed"] -= 1
        count["completed"] = count["processed"]
    return True


class BreakingOff:
    """Notes what the random generators are when an epoch is broken off.

    What follows is not part of a run that goes on: the hooks at the end of an epoch, and the validation that Lightning adds
    when it was told to stop. All of them may be random, and a validation loader is.

    Attributes:
        rng: what they were; None while the epoch goes on.
    """

    def __init__(self) -> None:
        self.rng: dict[str, Any] | None = None

    def watch(self, trainer: Any) -> None:
        """Note it from now on, until ``forget``."""
        epoch_loop = trainer.fit_loop.epoch_loop
        original = epoch_loop.on_advance_end

        def on_advance_end(data_fetcher: Any) -> None:
            self.rng = get_rng_state() if _adds_a_validation(trainer, data_fetcher) else None
            original(data_fetcher)
            if self.rng is None and epoch_loop.done and not at_end(trainer.fit_loop):
                self.rng = get_rng_state()

        patch.put(epoch_loop, "on_advance_end", on_advance_end)

    @staticmethod
    def forget(trainer: Any) -> None:
        """Let the loop be as it was."""
        patch.take_away(trainer.fit_loop.epoch_loop, "on_advance_end")


def _adds_a_validation(trainer: Any, data_fetcher: Any) -> bool:
    """Whether Lightning validates at this batch only because it was told to stop."""
    loop = trainer.fit_loop
    if not trainer.should_stop or not loop._can_stop_early or at_end(loop):
        return False
    trainer.should_stop = False
    try:
        return not loop.epoch_loop._should_check_val_fx(data_fetcher)
    finally:
        trainer.should_stop = True
