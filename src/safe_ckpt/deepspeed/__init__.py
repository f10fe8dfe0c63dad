"""Safe checkpoints for DeepSpeed: ``install(engine)`` on every rank, or ``SafeCheckpointEngine`` in the place of its own."""

from __future__ import annotations

from safe_ckpt import compatibility

compatibility.check("deepspeed")  # before what may fail on an older one

from safe_ckpt.deepspeed.decoupled import SafeCheckpointEngine
from safe_ckpt.deepspeed.handle import Handle, install

__all__ = ["Handle", "SafeCheckpointEngine", "install"]
