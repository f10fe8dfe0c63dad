"""Which checkpoints ``save_total_limit`` lets go. Pure: values in, values out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safe_ckpt.adapters import CheckpointInfo


def to_delete(infos: Sequence[CheckpointInfo], limit: int | None, best: Path | None) -> list[CheckpointInfo]:
    """The oldest ones above ``limit``, as ``transformers.trainer_utils.rotate_checkpoints`` chooses them.

    Args:
        infos: the committed checkpoints.
        limit: how many to keep; None or less than 1 for all.
        best: never among them, nor is the newest.
    """
    if limit is None or limit < 1:
        return []
    by_age = sorted(infos, key=lambda info: info.sequence)
    spared = {info.path for info in by_age[-1:]} | ({best} if best in {info.path for info in by_age} else set())
    surplus = len(by_age) - max(limit, len(spared))
    return [info for info in by_age if info.path not in spared][: max(0, surplus)]
