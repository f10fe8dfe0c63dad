"""The committed checkpoints of one directory as rank 0 knows them, and which of them are let go after a commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from safe_ckpt.core.manifest import CheckpointInfo
from safe_ckpt.core.select import Candidate

Choose = Callable[[Sequence[CheckpointInfo]], Sequence[CheckpointInfo]]
"""Which of the committed checkpoints to delete."""


class Ledger:
    """Begins with what was found and learns of every commit.

    Args:
        found: what was found; those without a manifest of ours are never let go.
    """

    def __init__(self, found: Iterable[Candidate] = ()) -> None:
        self._committed = [info for info in (candidate.info for candidate in found) if info is not None]

    @property
    def committed(self) -> list[CheckpointInfo]:
        """What there is."""
        return list(self._committed)

    def retain(self, new: CheckpointInfo, choose: Choose) -> list[Path]:
        """``new`` was committed. Returns what ``choose`` lets go now. Called on the background thread."""
        known = [*(info for info in self._committed if info.path != new.path and info.path.exists()), new]
        doomed = choose(known)
        self._committed = [info for info in known if info not in doomed]
        return [info.path for info in doomed]
