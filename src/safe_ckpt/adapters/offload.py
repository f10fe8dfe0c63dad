"""Folders of files of all ranks, such as swap files on NVMe, as a part of a checkpoint: for frameworks that offload."""

from __future__ import annotations

from safe_ckpt.core.offload.consolidate import OffloadPlan, agree_parts, own_part
from safe_ckpt.core.offload.restore import Part, give_back, parts_of

__all__ = ["OffloadPlan", "Part", "agree_parts", "give_back", "own_part", "parts_of"]
