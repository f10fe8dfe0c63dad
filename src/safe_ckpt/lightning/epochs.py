"""Whether an epoch ended or was broken off, and what the random generators were when it was broken off.

``max_steps``, ``should_stop``, a Timer and EarlyStopping can end ``fit`` in the middle of an epoch. Lightning counts that epoch
as processed, as it does one that ended, and runs the hooks at the end of an epoch. What tells the two apart is
``batch_progress.is_last_batch``: whether the data, or ``limit_train_batches``, had nothing more to give after that batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safe_ckpt.adapters import get_rng_state
from safe_ckpt.lightning import stand_ins


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

        stand_ins.put(epoch_loop, "on_advance_end", on_advance_end)

    @staticmethod
    def forget(trainer: Any) -> None:
        """Let the loop be as it was."""
        stand_ins.take_away(trainer.fit_loop.epoch_loop, "on_advance_end")


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
