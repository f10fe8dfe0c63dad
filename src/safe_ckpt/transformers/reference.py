"""TRL's reference model where it follows the trained one (``sync_ref_model``). TRL's own checkpoints have none of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from safe_ckpt.adapters.extras import presence
from safe_ckpt.transformers import strategies

logger = logging.getLogger(__name__)
_FILE = "reference_model.pth"


def save(trainer: Any, folder: str) -> None:
    """Write its weights, where each process has all of them."""
    model = _followed(trainer)
    if model is not None and trainer.args.should_save and not strategies.is_shared(trainer):
        torch.save(model.state_dict(), f"{folder}/{_FILE}")


def load(trainer: Any, path: Path) -> None:
    """Restore them; say so where there are none."""
    model = _followed(trainer)
    if model is None:
        return
    if presence.is_there(path / _FILE):
        model.load_state_dict(torch.load(path / _FILE, map_location="cpu", weights_only=True))
    else:
        logger.warning(
            "%s has no weights of the reference model (sync_ref_model): it begins as it was at the first start, and the loss "
            "differs from that of a run that never stopped",
            path,
        )


def _followed(trainer: Any) -> Any:
    return getattr(trainer, "ref_model", None) if getattr(trainer.args, "sync_ref_model", False) else None
