"""A ModelCheckpoint's attributes (``best_model_path``, ...): restored when a save fails, reported when one is committed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any
from weakref import proxy

from safe_ckpt.adapters import CheckpointInfo

logger = logging.getLogger(__name__)
COMMITTED_HOOK = "on_checkpoint_committed"
_FIELDS = (
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "current_score",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
    "_last_global_step_saved",
    "_last_checkpoint_saved",
)


@dataclass(frozen=True)
class SavedCallbackState:
    """The attributes of a callback at one moment."""

    values: dict[str, Any]

    @classmethod
    def of(cls, callback: object) -> SavedCallbackState:
        """Copy the attributes of ``callback``."""
        return cls({name: copy.copy(getattr(callback, name)) for name in _FIELDS if hasattr(callback, name)})

    def restore(self, callback: object) -> None:
        """Give ``callback`` these attributes again."""
        for name, value in self.values.items():
            setattr(callback, name, copy.copy(value))


@dataclass
class PendingActions:
    """The decisions of a ModelCheckpoint within one hook, in order.

    Attributes:
        saves: paths that are to hold the checkpoint of this moment.
        links: symbolic links to make: path -> what it points to.
        removals: paths to delete once the saves are committed.
    """

    saves: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    removals: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.saves or self.links or self.removals)

    @property
    def names(self) -> set[str]:
        """Every path that will exist."""
        return {*self.saves, *self.links}

    @property
    def to_delete(self) -> list[str]:
        """The paths to delete, without those that the same hook writes again."""
        return [path for path in dict.fromkeys(self.removals) if path not in self.names]


@dataclass
class Counts:
    """Of one ``fit`` and one callback.

    Attributes:
        batches: how many were trained on.
        saves: how many files were asked for.
    """

    batches: int = 0
    saves: int = 0

    def warn_without_save(self, callback: Any, trainer: Any) -> None:
        """At the end of ``fit``: say, on rank 0, that batches were trained on and not one save was due."""
        kept = callback.save_top_k != 0 or callback.save_last
        if self.saves or not self.batches or not kept or not trainer.is_global_zero:
            return
        when = "every_n_train_steps", "train_time_interval", "every_n_epochs", "save_on_train_epoch_end"
        asked = {name: getattr(callback, f"_{name}", None) for name in when}
        said = ", ".join(f"{name}={value}" for name, value in asked.items() if value)
        by_hand = ""
        if not trainer.lightning_module.automatic_optimization:
            by_hand = (
                ". With manual optimization Lightning counts the steps of self.optimizers(), not of their .optimizer"
            )
        message = "fit trained on %d batches and saved nothing in %s: no save was due (%s; global_step %d, epoch %d)%s"
        facts = callback.dirpath, said or "never", trainer.global_step, trainer.current_epoch, by_hand
        logger.warning(message, self.batches, *facts)


def reconcile(callback: Any, existing: Collection[str]) -> None:
    """Forget the checkpoints that are gone.

    Args:
        callback: a ModelCheckpoint.
        existing: those of its paths that exist.
    """
    callback.best_k_models = {path: score for path, score in callback.best_k_models.items() if path in existing}
    if callback.last_model_path not in existing:
        callback.last_model_path = ""
    scores = callback.best_k_models
    if callback.kth_best_model_path and callback.kth_best_model_path not in scores:
        callback.kth_best_model_path = ""
        if scores:
            worst = max if callback.mode == "min" else min
            callback.kth_best_model_path = worst(scores, key=scores.get)
            callback.kth_value = scores[callback.kth_best_model_path]
    if callback.best_model_path not in existing:
        best = min if callback.mode == "min" else max
        callback.best_model_path = best(scores, key=scores.get) if scores else ""
        callback.best_model_score = scores.get(callback.best_model_path)


def known_paths(callback: Any) -> list[str]:
    """Every path in a ModelCheckpoint's attributes."""
    paths = [*callback.best_k_models, callback.best_model_path, callback.kth_best_model_path, callback.last_model_path]
    return [path for path in dict.fromkeys(map(str, paths)) if path]


def report_commit(callback: Any, trainer: Any, info: CheckpointInfo) -> None:
    """Report what is committed to the Trainer's loggers, and to callbacks with an ``on_checkpoint_committed``."""
    loggers = trainer.loggers if trainer.is_global_zero else ()
    told: list[Any] = [(log, "after_save_checkpoint", (proxy(callback),)) for log in loggers]
    told += [(other, COMMITTED_HOOK, (trainer, trainer.lightning_module, info)) for other in trainer.callbacks]
    for owner, name, given in told:
        if (hook := getattr(owner, name, None)) is not None:
            try:
                hook(*given)
            except Exception:  # on this rank alone: the other ranks do not wait for this one here
                logger.warning("%s of %r failed", name, owner, exc_info=True)
