"""What of DeepSpeed is covered."""

from __future__ import annotations

import logging
from typing import Any

from safe_ckpt.config import CheckpointConfig
from safe_ckpt.errors import ConfigError

logger = logging.getLogger(__name__)


def check(engine: Any, config: CheckpointConfig) -> None:
    """Refuse what is not covered.

    Raises:
        ConfigError: names the setting.
    """
    check_engine(engine)
    check_settings(config)
    if engine.use_node_local_storage() and engine.global_rank == 0:
        logger.warning(
            "use_node_local_storage: checkpoints go to a directory that all nodes share all the same; one of each node's own "
            "is refused at the first save (DirectoryNotSharedError)"
        )


def check_engine(engine: Any) -> None:
    """Refuse an engine that writes in a way that is not covered.

    Raises:
        ConfigError: names the setting.
    """
    if engine.zero_nvme_offload_optimizer() and engine.has_moe_layers:
        message = "optimizer states on NVMe together with mixture-of-experts layers are not covered"
        raise ConfigError(key="zero_optimization.offload_optimizer.device", message=message)


def check_settings(config: CheckpointConfig) -> None:
    """Refuse settings that mean nothing here.

    Raises:
        ConfigError: names the setting.
    """
    if config.retention.keep_best is not None:
        message = "save_checkpoint takes no metrics, so there is no best one: use keep_last or keep_every_steps"
        raise ConfigError(key="retention.keep_best", message=message)
    if config.snapshot == "overlapped":
        message = 'DeepSpeed\'s optimizers are not known to change parameters only in step(): use "eager" or "auto"'
        raise ConfigError(key="snapshot", message=message)
