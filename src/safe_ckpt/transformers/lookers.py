"""Who looks at a checkpoint's folder right after its save: it must be committed by then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import integration_utils

from safe_ckpt.transformers.stopping import StopAtSignal

JUDGED: Mapping[str, tuple[str, Callable[[Any], bool]] | None] = {
    "ClearMLCallback": ("_log_model", bool),
    "DVCLiveCallback": ("_log_model", lambda value: value == "all"),
    "FlyteCallback": ("sync_checkpoints", bool),
    "MLflowCallback": ("_log_artifacts", bool),
    "NeptuneCallback": ("_log_checkpoints", lambda value: value is not None),
    "SwanLabCallback": None,
    "TrackioCallback": None,
    "WandbCallback": ("_log_model", lambda value: value == "checkpoint"),
}
"""Transformers' callbacks with an ``on_save``: an attribute, and whether its value means that the folder is used."""

_SAVE = "_save_checkpoint"
_DONE_BEFORE = ("transformers", "trl", "safe_ckpt")
"""Packages whose ``_save_checkpoint`` does nothing to the folder behind the save."""


def looks(callback: Any) -> bool:
    """Whether a callback's ``on_save`` may use the folder. One that is not known does."""
    function = getattr(callback.on_save, "__func__", callback.on_save)
    if function in (TrainerCallback.on_save, StopAtSignal.on_save):
        return False
    home = next((kind for kind in type(callback).__mro__ if vars(kind).get("on_save") is function), None)
    if home is None or home.__module__ != integration_utils.__name__ or home.__name__ not in JUDGED:
        return True
    switch = JUDGED[home.__name__]
    if switch is None:
        return False
    name, uses = switch
    return not hasattr(callback, name) or uses(getattr(callback, name))


def anyone_looks(trainer: Any) -> bool:
    """Whether a callback, the hub, or a method that the user overrides may use a checkpoint's folder right after its save."""
    return (
        trainer.args.push_to_hub
        or any(map(looks, trainer.callback_handler.callbacks))
        or any(
            vars(owner)[_SAVE].__module__.partition(".")[0] not in _DONE_BEFORE
            for owner in (trainer, *type(trainer).__mro__)
            if _SAVE in vars(owner)
        )
    )
