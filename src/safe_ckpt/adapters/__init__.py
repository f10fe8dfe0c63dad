"""The adapter interface: all that a framework adapter may import, in one place.

The names here are what every adapter needs; ``docs/start/write-an-adapter.md`` explains them with an adapter of 60 lines.
Beside them: ``directories`` (hold a directory, list, number, verify and retain what is in it), ``layouts`` (how the frameworks
name their checkpoints), ``requests`` (what one save asks for), ``patch``, ``tracking``, and for some adapters only
``weights`` and ``offload``.

Names are imported when they are first used, so that ``adapters.layouts`` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safe_ckpt.core.coordination.agreed_config import config_of_all, refused_retention
    from safe_ckpt.core.coordination.coordinator import open_coordinator
    from safe_ckpt.core.coordination.log_entry import refuse_differences, reraise
    from safe_ckpt.core.formats import file_plan, safetensors, torch_archive
    from safe_ckpt.core.formats.file_plan import FilePlan, LazyTensor
    from safe_ckpt.core.formats.manifest import CheckpointInfo
    from safe_ckpt.core.saving.engine import Engine
    from safe_ckpt.core.saving.job import SaveHandle
    from safe_ckpt.core.sharding.dcp_plan import ShardPlanner
    from safe_ckpt.core.staging.buffer import SharedBuffer
    from safe_ckpt.core.staging.overlap import OverlapPlan
    from safe_ckpt.core.state import plan
    from safe_ckpt.core.state.rng import get_rng_state, set_rng_state
    from safe_ckpt.core.storage import presence
    from safe_ckpt.core.storage.copier import FileCopy

__all__ = [
    "CheckpointInfo",
    "Engine",
    "FileCopy",
    "FilePlan",
    "LazyTensor",
    "OverlapPlan",
    "SaveHandle",
    "ShardPlanner",
    "SharedBuffer",
    "config_of_all",
    "file_plan",
    "get_rng_state",
    "open_coordinator",
    "plan",
    "presence",
    "refuse_differences",
    "refused_retention",
    "reraise",
    "safetensors",
    "set_rng_state",
    "torch_archive",
]

_HOMES = {
    "CheckpointInfo": "formats.manifest",
    "Engine": "saving.engine",
    "FileCopy": "storage.copier",
    "FilePlan": "formats.file_plan",
    "LazyTensor": "formats.file_plan",
    "OverlapPlan": "staging.overlap",
    "SaveHandle": "saving.job",
    "ShardPlanner": "sharding.dcp_plan",
    "SharedBuffer": "staging.buffer",
    "config_of_all": "coordination.agreed_config",
    "file_plan": "formats",
    "get_rng_state": "state.rng",
    "open_coordinator": "coordination.coordinator",
    "plan": "state",
    "presence": "storage",
    "refuse_differences": "coordination.log_entry",
    "refused_retention": "coordination.agreed_config",
    "reraise": "coordination.log_entry",
    "safetensors": "formats",
    "set_rng_state": "state.rng",
    "torch_archive": "formats",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = f"safe_ckpt.core.{_HOMES[name]}"
    value = (
        import_module(f"{home}.{name}")
        if name in ("file_plan", "plan", "presence", "safetensors", "torch_archive")
        else getattr(import_module(home), name)
    )
    globals()[name] = value
    return value
