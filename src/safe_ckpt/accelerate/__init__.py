"""Safe checkpoints for Hugging Face Accelerate: ``register(accelerator)`` on every rank."""

from __future__ import annotations

from safe_ckpt import compatibility

compatibility.check("accelerate")  # before what may fail on an older one

from safe_ckpt.accelerate.handle import Handle, SafeCheckpointPlugin, register

__all__ = ["Handle", "SafeCheckpointPlugin", "register"]
