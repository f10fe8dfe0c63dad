"""What of a Trainer's state may be copied while it trains on, when that was asked for.

In Lightning forward and backward run inside ``optimizer.step``, as its closure; the gate waits behind the closure. Whatever
else a module or a callback does to parameters in between cannot be known from outside, so ``"auto"`` is eager.
"""

from __future__ import annotations

from typing import Any, Literal

from safe_ckpt.adapters import OverlapPlan

_SWAPPERS = frozenset({"StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging", "ModelPruning"})


def overlap_plan(trainer: Any, mode: Literal["auto", "eager", "overlapped"]) -> OverlapPlan | None:
    """What may be copied after ``save`` has returned; None for nothing.

    Args:
        trainer: in ``fit``.
        mode: ``CheckpointConfig.snapshot``. Also with ``"overlapped"`` nothing is deferred beside callbacks that are known to
            change parameters between steps, nor with DeepSpeed.
    """
    kinds = {base.__name__ for callback in trainer.callbacks for base in type(callback).__mro__}
    if mode != "overlapped" or kinds & _SWAPPERS or hasattr(trainer.strategy, "deepspeed_engine"):
        return None
    return OverlapPlan([trainer.lightning_module], trainer.optimizers) or None
