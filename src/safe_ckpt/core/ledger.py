"""The committed checkpoints of one directory as rank 0 knows them, and which of them retention lets go."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from safe_ckpt.config import Retention
from safe_ckpt.core import retention
from safe_ckpt.core.manifest import CheckpointInfo
from safe_ckpt.core.select import Candidate


class Ledger:
    """Begins with what was found and learns of every commit.

    Args:
        policy: what to keep.
        found: what was found; those without a manifest of ours are never let go.
    """

    def __init__(self, policy: Retention, found: Iterable[Candidate] = ()) -> None:
        self._policy = policy
        self._committed = [info for info in (candidate.info for candidate in found) if info is not None]

    @property
    def committed(self) -> list[CheckpointInfo]:
        """What there is."""
        return list(self._committed)

    def retain(self, new: CheckpointInfo) -> list[Path]:
        """``new`` was committed. Returns what is to be deleted now. Called on the background thread."""
        known = [info for info in self._committed if info.path != new.path and info.path.exists()]
        self._committed = [*known, new]
        doomed = retention.to_delete(self._committed, self._policy)
        self._committed = [info for info in self._committed if info not in doomed]
        return [info.path for info in doomed]
