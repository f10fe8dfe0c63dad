"""Safe checkpoints for Lightning, ``lightning.pytorch`` and ``pytorch_lightning`` alike."""

from __future__ import annotations

from safe_ckpt import compatibility

compatibility.check_either("lightning", "pytorch-lightning")  # before what may fail on an older one

from safe_ckpt.lightning.callback import SafeCheckpointCallback
from safe_ckpt.lightning.loader import resumable

__all__ = ["SafeCheckpointCallback", "resumable"]
