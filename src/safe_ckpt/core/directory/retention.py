"""Which checkpoints to delete. Pure: values in, values out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from safe_ckpt.config import Retention
from safe_ckpt.core.formats.manifest import CheckpointInfo


def to_delete(infos: Sequence[CheckpointInfo], policy: Retention) -> list[CheckpointInfo]:
    """The committed checkpoints that no rule keeps, oldest first. The newest is never among them.

    Args:
        infos: all committed checkpoints of one directory.
        policy: the rules; a checkpoint that any of them keeps stays. Without any rule all stay.
    """
    if not has_rules(policy):
        return []
    # Under another name than it was saved under it is a copy that somebody made, or a link: that is theirs to delete.
    by_age = sorted((info for info in infos if info.path.name == info.name), key=lambda info: info.sequence)
    kept = {info.sequence for info in by_age[-(policy.keep_last or 1) :]}
    if policy.keep_best is not None and policy.metric is not None:
        kept |= {info.sequence for info in best(by_age, policy)[: policy.keep_best]}
    if policy.keep_every_steps is not None:
        kept |= {info.sequence for info in by_age if info.step % policy.keep_every_steps == 0}
    return [info for info in by_age if info.sequence not in kept]


def has_rules(policy: Retention) -> bool:
    """Whether anything is ever deleted."""
    return not (policy.keep_last is None and policy.keep_best is None and policy.keep_every_steps is None)


def chooser(policy: Retention) -> Callable[[Sequence[CheckpointInfo]], list[CheckpointInfo]] | None:
    """``to_delete`` for one policy; None when it has no rule."""
    return (lambda infos: to_delete(infos, policy)) if has_rules(policy) else None


def best(infos: Sequence[CheckpointInfo], policy: Retention) -> list[CheckpointInfo]:
    """Those with the policy's metric, best first; of equals the newer first. NaN is worse than anything."""
    sign = 1 if policy.mode == "min" else -1
    rated = [info for info in infos if policy.metric in info.metrics]

    def rank(info: CheckpointInfo) -> tuple[float, int]:
        value = info.metrics[policy.metric or ""]
        return (math.inf if math.isnan(value) else sign * value, -info.sequence)

    return sorted(rated, key=rank)
