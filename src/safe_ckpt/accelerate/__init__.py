"""Safe checkpoints for Hugging Face Accelerate: ``register(accelerator)`` on every rank."""

from __future__ import annotations

from safe_ckpt import versions

versions.refuse_old_releases("accelerate")  # before what fails on an older one

from safe_ckpt.accelerate.handle import Handle  # noqa: E402
from safe_ckpt.accelerate.registration import SafeCheckpointPlugin, register  # noqa: E402

__all__ = ["Handle", "SafeCheckpointPlugin", "register"]
