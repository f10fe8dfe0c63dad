"""Safe checkpoints for Lightning, ``lightning.pytorch`` and ``pytorch_lightning`` alike, and for Fabric."""

from __future__ import annotations

from safe_ckpt import versions

versions.check_either("lightning", "pytorch-lightning")  # before what fails on an older one

from safe_ckpt.config import CheckpointConfig  # noqa: E402
from safe_ckpt.lightning.callback import SafeCheckpointCallback  # noqa: E402
from safe_ckpt.lightning.checkpoint_io import SafeCheckpointIO  # noqa: E402
from safe_ckpt.lightning.dataloader import resumable  # noqa: E402
from safe_ckpt.settings.texts import complete_docstring  # noqa: E402

complete_docstring(CheckpointConfig)  # the --help of LightningCLI knows no other texts

__all__ = ["SafeCheckpointCallback", "SafeCheckpointIO", "resumable"]
