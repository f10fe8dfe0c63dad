"""Whether parameters may be copied while a Trainer goes on: only where everything that changes them is known.

In Lightning forward and backward run inside ``optimizer.step``, as its closure; the gate waits behind the closure. What is
left is whatever else may change a parameter between a save and the end of the next closure: hooks and callbacks.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Literal

import torch

from safe_ckpt.core.overlap import Deferral, is_known

_CALLBACKS = frozenset(
    {
        "DeviceStatsMonitor",
        "EarlyStopping",
        "GradientAccumulationScheduler",
        "LearningRateMonitor",
        "ModelCheckpoint",
        "ModelSummary",
        "OnExceptionCheckpoint",
        "RichModelSummary",
        "RichProgressBar",
        "SafeCheckpointCallback",
        "TQDMProgressBar",
        "ThroughputMonitor",
        "Timer",
    }
)
_STRATEGIES = frozenset({"SingleDeviceStrategy", "DDPStrategy"})
_PLUGINS = frozenset({"Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision", "BitsandbytesPrecision"})
_HOMES = ("lightning", "pytorch_lightning", "safe_ckpt", "torch", "torchmetrics")
_SIGNS = frozenset({"data", "no_grad", "inference_mode", "parameters", "named_parameters", "load_state_dict", "set_"})
"""Names whose use in a module's own code may mean that it changes parameters by hand."""


def deferral(trainer: Any, mode: Literal["auto", "eager", "overlapped"]) -> Deferral | None:
    """What of a Trainer's state may be copied after ``save`` has returned; None for nothing.

    Args:
        trainer: in ``fit``.
        mode: ``CheckpointConfig.snapshot``.
    """
    if mode == "eager" or (mode == "auto" and (reason(trainer))):
        return None
    return Deferral([trainer.lightning_module], trainer.optimizers) or None


def reason(trainer: Any) -> str:
    """Why parameters might change in a way that is not known; empty when all ways are."""
    module = trainer.lightning_module
    for kind, allowed in ((trainer.strategy, _STRATEGIES), (trainer.precision_plugin, _PLUGINS)):
        if not _is_one_of(type(kind), allowed):
            return f"{type(kind).__name__} is not known"
    for callback in trainer.callbacks:
        if not _is_one_of(type(callback), _CALLBACKS):
            return f"the callback {type(callback).__name__} may change parameters"
    if not module.automatic_optimization:
        return "with manual optimization"
    for optimizer in trainer.optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer) or not is_known(optimizer):
            return f"{type(optimizer).__name__} is not known"
    for part in module.modules():
        if part._forward_pre_hooks or part._forward_hooks or part._backward_hooks:
            return f"{type(part).__name__} has hooks"
    return next((f"{name} looks as if it changed parameters" for name in _suspects(module)), "")


def _is_one_of(kind: type, names: frozenset[str]) -> bool:
    return kind.__name__ in names and kind.__module__.split(".")[0] in _HOMES


def _suspects(module: torch.nn.Module) -> Iterator[str]:
    """Functions of the modules' own classes that use a name which edits of parameters need."""
    for kind in dict.fromkeys(base for part in module.modules() for base in type(part).__mro__):
        if kind.__module__.split(".")[0] in (*_HOMES, "builtins"):
            continue
        for name, member in vars(kind).items():
            function = getattr(member, "__func__", member)
            if name.startswith(("__", "configure_")) or not isinstance(function, types.FunctionType):
                continue
            if any(sign in _SIGNS or _edits_in_place(sign) for sign in _names(function.__code__)):
                yield f"{kind.__name__}.{name}"


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _edits_in_place(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_")
