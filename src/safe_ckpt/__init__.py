"""Safe checkpoints: whole or not at all, within deadlines.

The everyday names; importing this imports neither torch nor any framework, the names are loaded when they are first used.
"""

from __future__ import annotations

import gc
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from safe_ckpt._version import __version__

if TYPE_CHECKING:
    from safe_ckpt.checkpointer import Checkpointer
    from safe_ckpt.config import (
        CheckpointConfig,
        Health,
        Mirror,
        Network,
        Retention,
        StorageConfig,
        Telemetry,
        Timeouts,
        Unchanged,
        WriterConfig,
    )
    from safe_ckpt.core.formats.manifest import CheckpointInfo
    from safe_ckpt.core.saving.handle import SaveHandle
    from safe_ckpt.core.saving.set_up import set_up_directory
    from safe_ckpt.core.sharding.gather import iter_full_tensors
    from safe_ckpt.core.sharding.timeouts import lengthy_timeouts
    from safe_ckpt.core.state.items import PerRank
    from safe_ckpt.core.state.rng import RngState
    from safe_ckpt.errors import SafeCheckpointError
    from safe_ckpt.following import Followed, best, checkpoints, follow, pin
    from safe_ckpt.offload.consolidate import consolidate_offloaded
    from safe_ckpt.offload.restore import restore_offloaded
    from safe_ckpt.publishing import publishing
    from safe_ckpt.reading import load, newest

_HOMES = {
    "CheckpointConfig": "safe_ckpt.config",
    "CheckpointInfo": "safe_ckpt.core.formats.manifest",
    "Checkpointer": "safe_ckpt.checkpointer",
    "PerRank": "safe_ckpt.core.state.items",
    "Retention": "safe_ckpt.config",
    "RngState": "safe_ckpt.core.state.rng",
    "SafeCheckpointError": "safe_ckpt.errors",
    "SaveHandle": "safe_ckpt.core.saving.handle",
    "Health": "safe_ckpt.config",
    "Mirror": "safe_ckpt.config",
    "Network": "safe_ckpt.config",
    "StorageConfig": "safe_ckpt.config",
    "Unchanged": "safe_ckpt.config",
    "Telemetry": "safe_ckpt.config",
    "Timeouts": "safe_ckpt.config",
    "WriterConfig": "safe_ckpt.config",
    "Followed": "safe_ckpt.following",
    "best": "safe_ckpt.following",
    "checkpoints": "safe_ckpt.following",
    "consolidate_offloaded": "safe_ckpt.offload.consolidate",
    "follow": "safe_ckpt.following",
    "iter_full_tensors": "safe_ckpt.core.sharding.gather",
    "lengthy_timeouts": "safe_ckpt.core.sharding.timeouts",
    "load": "safe_ckpt.reading",
    "newest": "safe_ckpt.reading",
    "pin": "safe_ckpt.following",
    "publishing": "safe_ckpt.publishing",
    "restore_offloaded": "safe_ckpt.offload.restore",
    "set_up_directory": "safe_ckpt.core.saving.set_up",
}

__all__ = [
    "CheckpointConfig",
    "CheckpointInfo",
    "Checkpointer",
    "Followed",
    "Health",
    "Mirror",
    "Network",
    "PerRank",
    "Retention",
    "RngState",
    "SafeCheckpointError",
    "SaveHandle",
    "StorageConfig",
    "Telemetry",
    "Timeouts",
    "Unchanged",
    "WriterConfig",
    "__version__",
    "best",
    "checkpoints",
    "consolidate_offloaded",
    "follow",
    "iter_full_tensors",
    "lengthy_timeouts",
    "load",
    "newest",
    "pin",
    "publishing",
    "restore_offloaded",
    "set_up_directory",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the writer process imports this package and must not pay for torch.
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_imported(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # What a notebook completes: the names that are not loaded yet, too.
    return sorted({*globals(), *__all__})


def _imported(home: str) -> ModuleType:
    # Behind ``import torch`` a full collection is due, which takes longer than this and would find nothing: it comes later.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return import_module(home)
    finally:
        if collecting:
            gc.enable()
