"""For one or two adapters: weights alone, folders of swap files, random generators."""

from __future__ import annotations

from safe_ckpt.core.coordination.agreed_config import refused_retention
from safe_ckpt.core.coordination.coordinator import open_coordinator
from safe_ckpt.core.formats import hugging_face
from safe_ckpt.core.names import wrapped
from safe_ckpt.core.offload.consolidate import agree_parts, own_part
from safe_ckpt.core.offload.restore import Part, give_back, parts_of
from safe_ckpt.core.saving import export, one_shot
from safe_ckpt.core.saving.export import Exporter
from safe_ckpt.core.sharding import dtensor
from safe_ckpt.core.state.rng import get_rng_state, set_rng_state
from safe_ckpt.core.tensors import is_short, refuse_short

__all__ = [
    "Exporter",
    "Part",
    "agree_parts",
    "dtensor",
    "export",
    "get_rng_state",
    "give_back",
    "hugging_face",
    "is_short",
    "one_shot",
    "open_coordinator",
    "own_part",
    "parts_of",
    "refuse_short",
    "refused_retention",
    "set_rng_state",
    "wrapped",
]
