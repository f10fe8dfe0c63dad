"""What of Accelerate is covered, and how its own settings become ours."""

from __future__ import annotations

import dataclasses
from typing import Any

from accelerate.utils import DistributedType

from safe_ckpt.config import CheckpointConfig, Retention
from safe_ckpt.errors import ConfigError

_OTHERS = ("MEGATRON_LM", "XLA")
"""They write checkpoints of their own kind, past what is replaced here."""


def check(accelerator: Any, config: CheckpointConfig) -> None:
    """Refuse what is not covered.

    Raises:
        ConfigError: names the setting.
    """
    kind = accelerator.distributed_type
    if kind in [getattr(DistributedType, name, None) for name in _OTHERS]:
        message = (
            f"{kind} writes its checkpoints itself and is not covered yet; save_state stays as it is without register"
        )
        raise ConfigError(key="accelerator.distributed_type", message=message)
    if kind == DistributedType.DEEPSPEED and config.snapshot == "overlapped":
        message = 'DeepSpeed\'s optimizers are not known to change parameters only in step(): use "eager" or "auto"'
        raise ConfigError(key="snapshot", message=message)
    if kind == DistributedType.FSDP and not getattr(accelerator, "is_fsdp2", False):
        message = "FSDP of version 1 is not covered: use FullyShardedDataParallelPlugin(fsdp_version=2)"
        raise ConfigError(key="fsdp_plugin.fsdp_version", message=message)
    if kind == DistributedType.FSDP:
        form = str(getattr(accelerator.state.fsdp_plugin.state_dict_type, "name", "?"))
        if form not in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            message = f"expected SHARDED_STATE_DICT or FULL_STATE_DICT, got {form}"
            raise ConfigError(key="fsdp_plugin.state_dict_type", message=message)
    project = accelerator.project_configuration
    if project.save_on_each_node:
        message = (
            "is not supported: safe_ckpt commits one checkpoint that all ranks see. Use a file system that they share"
        )
        raise ConfigError(key="ProjectConfiguration.save_on_each_node", message=message)
    if project.automatic_checkpoint_naming and accelerator.project_dir is None:
        message = "automatic_checkpoint_naming needs it: it is where the checkpoints go"
        raise ConfigError(key="ProjectConfiguration.project_dir", message=message)


def retention(accelerator: Any, config: CheckpointConfig) -> Retention:
    """What to keep: ``total_limit`` is ``keep_last``, beside the other rules of ``config``.

    Raises:
        ConfigError: both are given and differ.
    """
    limit = accelerator.project_configuration.total_limit
    if limit is None or not accelerator.project_configuration.automatic_checkpoint_naming:
        return config.retention
    if limit < 1:
        raise ConfigError(key="ProjectConfiguration.total_limit", message=f"expected at least 1, got {limit!r}")
    if config.retention.keep_last not in (None, limit):
        message = (
            f"is {config.retention.keep_last} and ProjectConfiguration.total_limit is {limit}: give one of the two"
        )
        raise ConfigError(key="retention.keep_last", message=message)
    return dataclasses.replace(config.retention, keep_last=limit)
