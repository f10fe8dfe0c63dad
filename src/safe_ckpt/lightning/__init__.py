"""Safe checkpoints for Lightning, ``lightning.pytorch`` and ``pytorch_lightning`` alike."""

from __future__ import annotations

from safe_ckpt.lightning.callback import SafeCheckpointCallback
from safe_ckpt.lightning.loader import resumable

__all__ = ["SafeCheckpointCallback", "resumable"]
