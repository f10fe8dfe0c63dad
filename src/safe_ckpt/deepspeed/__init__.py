"""Safe checkpoints for DeepSpeed: ``install(engine)`` on every rank."""

from __future__ import annotations

from safe_ckpt import versions

versions.refuse_old_releases("deepspeed")  # before what fails on an older one

from safe_ckpt.deepspeed.handle import Handle, install  # noqa: E402

__all__ = ["Handle", "install"]
