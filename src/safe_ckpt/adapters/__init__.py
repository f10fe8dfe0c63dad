"""The adapter interface: all that a framework adapter may import, in one place.

The names here are what every adapter needs; ``docs/start/write-an-adapter.md`` explains them with an adapter of 59 lines.
The modules ``directories``, ``handle``, ``layouts``, ``patch`` and ``planning`` have the rest; ``extras`` has what one or two
adapters need.

Names are imported when they are first used, so that ``adapters.layouts`` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safe_ckpt.adapters.directories import OpenDirectory
    from safe_ckpt.adapters.handle import AttachedHandle
    from safe_ckpt.adapters.patch import Patch
    from safe_ckpt.adapters.planning import Attempt, Planned, torch_file
    from safe_ckpt.adapters.tracking import Tracking
    from safe_ckpt.core.coordination.agreed_config import config_and_more, config_of_all
    from safe_ckpt.core.formats.file_plan import FilePlan
    from safe_ckpt.core.formats.manifest import CheckpointInfo
    from safe_ckpt.core.saving.engine import Engine
    from safe_ckpt.core.saving.save import OnCommit, SaveHandle

__all__ = [
    "AttachedHandle",
    "Attempt",
    "CheckpointInfo",
    "Engine",
    "FilePlan",
    "OnCommit",
    "OpenDirectory",
    "Patch",
    "Planned",
    "SaveHandle",
    "Tracking",
    "config_and_more",
    "config_of_all",
    "torch_file",
]

_HOMES = {
    "AttachedHandle": "adapters.handle",
    "Attempt": "adapters.planning",
    "CheckpointInfo": "core.formats.manifest",
    "Engine": "core.saving.engine",
    "FilePlan": "core.formats.file_plan",
    "OnCommit": "core.saving.save",
    "OpenDirectory": "adapters.directories",
    "Patch": "adapters.patch",
    "Planned": "adapters.planning",
    "SaveHandle": "core.saving.save",
    "Tracking": "adapters.tracking",
    "config_and_more": "core.coordination.agreed_config",
    "config_of_all": "core.coordination.agreed_config",
    "torch_file": "adapters.planning",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"safe_ckpt.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
