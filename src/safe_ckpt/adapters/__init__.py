"""The adapter interface: all that a framework adapter may import, in one place.

The names here are what every adapter needs; ``docs/design.md`` explains them with an adapter of 51 lines.
The modules have the rest; ``extras`` passes on what is the core's.
"""

from safe_ckpt.adapters.handle import AttachedHandle
from safe_ckpt.adapters.patch import Patch
from safe_ckpt.adapters.planning import Attempt, Planned, torch_file
from safe_ckpt.adapters.saver import Saver
from safe_ckpt.core.formats.file_plan import FilePlan
from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.saving.handle import OpenSave
from safe_ckpt.core.saving.request import OnCommit

__all__ = [
    "AttachedHandle",
    "Attempt",
    "CheckpointInfo",
    "Engine",
    "FilePlan",
    "OnCommit",
    "OpenSave",
    "Patch",
    "Planned",
    "Saver",
    "torch_file",
]
