"""Safe checkpoints for the Trainer of Hugging Face Transformers: ``class MyTrainer(SafeCheckpointMixin, Trainer)``."""

from __future__ import annotations

from safe_ckpt import versions

versions.refuse_old_releases("transformers", "accelerate")  # before what fails on an older one

from safe_ckpt.transformers.mixin import SafeCheckpointMixin  # noqa: E402

__all__ = ["SafeCheckpointMixin"]
