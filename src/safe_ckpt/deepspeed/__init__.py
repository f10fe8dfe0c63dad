"""Safe checkpoints for DeepSpeed: ``install(engine)`` on every rank, or ``SafeCheckpointEngine`` in the place of its own."""

from __future__ import annotations

from safe_ckpt import versions

versions.check("deepspeed")  # before what fails on an older one

from safe_ckpt.deepspeed.checkpoint_engine import SafeCheckpointEngine  # noqa: E402
from safe_ckpt.deepspeed.handle import Handle, install  # noqa: E402

__all__ = ["Handle", "SafeCheckpointEngine", "install"]
