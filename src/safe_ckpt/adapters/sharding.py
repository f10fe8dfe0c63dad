"""States of which every rank has a part: planned in the layout of ``torch.distributed.checkpoint``, or gathered whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from safe_ckpt.core.sharding.gather import gather_nested

if TYPE_CHECKING:
    from safe_ckpt.core.saving.engine import Engine
    from safe_ckpt.core.sharding.dcp_plan import ShardPlanner


def shard_planner(engine: Engine) -> ShardPlanner:
    """What plans the shards of state dicts of the framework's own making. On any rank."""
    from safe_ckpt.core.sharding.dcp_plan import ShardPlanner  # DCP takes a while to import

    return ShardPlanner(engine.coordinator, barrier_s=engine.config.timeouts.barrier_s, strict=False)


def gather_whole(engine: Engine, states: Mapping[str, Any]) -> dict[str, Any] | None:
    """The whole states on rank 0, None elsewhere. Every rank calls this.

    Raises:
        SafeCheckpointError: a rank was lost or left, on every rank.
    """
    return gather_nested(states, engine.config.timeouts.lengthy_s, engine.group)
