"""Safe checkpoints for torchtitan: ``checkpoint=SafeCheckpointManager.Config(...)`` in the Trainer's Config."""

from __future__ import annotations

from safe_ckpt import versions

versions.refuse_old_releases("torchtitan")  # before what fails on an older one

from safe_ckpt.torchtitan.manager import SafeCheckpointManager  # noqa: E402

__all__ = ["SafeCheckpointManager"]
