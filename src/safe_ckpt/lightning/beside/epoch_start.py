"""Settings from the start of an epoch, for a process that resumes within it: ``on_train_epoch_start`` is not called again.

Lightning keeps none of them. ``accumulate_grad_batches`` is saved, and put back. StochasticWeightAveraging's follow from the
state that it saves itself. Nobody knows what other callbacks, and modules, set: a warning names them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch.nn.modules.batchnorm import _BatchNorm

from safe_ckpt.adapters.extras import set_rng_state

if TYPE_CHECKING:
    from safe_ckpt.adapters import Patch

logger = logging.getLogger(__name__)
_HOOK = "on_train_epoch_start"


def set_at_epoch_start(
    trainer: Any, rng: Mapping[str, Any] | None, accumulates: int | None, undo: Patch, *, within: bool
) -> None:
    """At ``on_train_start``: arrange that all is set when the loop goes on; ``undo`` takes back what is left to be done.

    Args:
        trainer: its callbacks have their states.
        rng: what the generators are to be, if that is known.
        accumulates: how many batches made a step at the save; None for as many as the Trainer was told.
        undo: until ``fit`` ends.
        within: whether the epoch is one that was begun by another process.
    """
    name = "StochasticWeightAveraging"
    pairs = [(one, kind) for one in trainer.callbacks for kind in type(one).__mro__ if kind.__name__ == name]
    averaging = [(callback, kind) for callback, kind in pairs if _is_lightnings(kind)]
    for callback, kind in averaging:
        if callback._scheduler_state is not None:
            _average_on(trainer, callback, kind)

    def begin(on_advance_start: Any) -> None:
        told = trainer.accumulate_grad_batches  # GradientAccumulationScheduler has asked what it is by now
        trainer.accumulate_grad_batches = accumulates or told
        if rng is not None:
            set_rng_state(rng)
        _say_what_gradients_are_missing(trainer, [callback for callback, _ in averaging])
        on_advance_start()
        for callback, _ in averaging if within else ():
            if callback._model_contains_batch_norm and trainer.current_epoch == callback.swa_end + 1:
                _count_on(trainer, callback, told)

    undo.once(trainer.fit_loop, "on_advance_start", begin)
    if within and trainer.global_rank == 0:
        _say_what_is_not_set([*trainer.callbacks, trainer.lightning_module])


def _average_on(trainer: Any, callback: Any, kind: Any) -> None:
    """Have a callback schedule the learning rate from here on. Lightning would from the next epoch on, one step behind."""
    view = SimpleNamespace(
        current_epoch=callback._latest_update_epoch,  # there it sets up, and adds nothing to the average
        optimizers=trainer.optimizers,
        max_epochs=trainer.max_epochs,
        lr_scheduler_configs=trainer.lr_scheduler_configs,
    )
    kind.on_train_epoch_start(callback, view, trainer.lightning_module)


def _count_on(trainer: Any, callback: Any, accumulates: int) -> None:
    """Have batch norms go on with their counts in the last epoch, in which it trains nothing and they count anew."""
    trainer.fit_loop.max_batches += 1
    trainer.fit_loop._skip_backward = True
    callback._accumulate_grad_batches, trainer.accumulate_grad_batches = accumulates, trainer.fit_loop.max_batches
    for module in trainer.lightning_module.modules():
        if isinstance(module, _BatchNorm):
            callback.momenta[module], module.momentum = module.momentum, None


def _say_what_gradients_are_missing(trainer: Any, averaging: list[Any]) -> None:
    """Warn of gradients that are in no checkpoint: a validation before the epoch in which batch norms count anew clears them.

    Lightning steps once at the end of that epoch, by gradients that it did not make there.
    """
    over = trainer.current_epoch + trainer.fit_loop.epoch_loop._num_ready_batches_reached()
    if trainer.enable_validation or trainer.global_rank != 0:
        return
    if any(one._model_contains_batch_norm and over > one.swa_end for one in averaging):
        logger.warning(
            "StochasticWeightAveraging: at its end Lightning makes one more optimizer step, by the gradients of the step "
            "before. They are in no checkpoint: here that step changes nothing. Resume from an earlier checkpoint, or "
            "add a validation"
        )


def _say_what_is_not_set(owners: list[Any]) -> None:
    named = ", ".join(type(one).__name__ for one in owners if not _is_lightnings(getattr(one, _HOOK)))
    if named:
        logger.warning(
            "resuming within an epoch: Lightning does not call %s again in it. What that sets in %s is not set before the next "
            "epoch begins, and this epoch may differ from an uninterrupted one. Set it in on_train_start as well, or save at "
            "the ends of epochs",
            _HOOK,
            named,
        )


def _is_lightnings(made: Any) -> bool:
    """Of a class, or a method: Lightning's callbacks are known, those of others are not."""
    return made.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
