"""The extensions of a job. Their order is fixed: at every moment they are asked in it."""

from __future__ import annotations

from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.saving.extension import Extension
from safe_ckpt.extensions.health.extension import HealthExtension
from safe_ckpt.extensions.mirror.extension import Mirroring
from safe_ckpt.extensions.record import RecordExtension
from safe_ckpt.extensions.trained import Trained
from safe_ckpt.extensions.unchanged import UnchangedExtension


def assemble(config: CheckpointConfig) -> list[Extension]:
    """The extensions for these settings."""
    mirrors = [Mirroring()] if config.mirror.url is not None else []
    return [RecordExtension(), UnchangedExtension(), HealthExtension(), Trained(), *mirrors]
