"""Safe checkpoints for the Trainer of Hugging Face Transformers: ``class MyTrainer(SafeCheckpointMixin, Trainer)``."""

from __future__ import annotations

from safe_ckpt import compatibility

compatibility.check("transformers", "accelerate")  # before what may fail on an older one

from safe_ckpt.transformers.mixin import SafeCheckpointMixin

__all__ = ["SafeCheckpointMixin"]
