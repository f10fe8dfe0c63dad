"""Safe checkpoints for Ray Train: ``RayCheckpointer`` in the workers of a ``TorchTrainer``, ``SafeRunConfig`` in its driver."""

from __future__ import annotations

from safe_ckpt import versions

versions.refuse_old_releases("ray")  # before what fails on an older one

from safe_ckpt.ray.run_config import SafeRunConfig  # noqa: E402
from safe_ckpt.ray.worker import RayCheckpointer  # noqa: E402

__all__ = ["RayCheckpointer", "SafeRunConfig"]
