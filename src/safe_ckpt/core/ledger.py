"""The committed checkpoints of one directory as rank 0 knows them, and which of them are let go after a commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safe_ckpt.core.manifest import CheckpointInfo
from safe_ckpt.core.select import Candidate

Choose = Callable[[Sequence[CheckpointInfo]], Sequence[CheckpointInfo]]
"""Which of the committed checkpoints to delete."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a rule says after a commit.

    Attributes:
        doomed: what is to be deleted now.
        kept: names of what stays, oldest first, where that is known.
    """

    doomed: Sequence[Path]
    kept: Sequence[str] = ()


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

    def retain(self, new: CheckpointInfo, choose: Choose | None) -> Decision | None:
        """``new`` was committed. Returns what ``choose`` lets go now; without it None. Called on the background thread."""
        known = [*(info for info in self._committed if info.path != new.path and info.path.exists()), new]
        doomed = choose(known) if choose is not None else []
        self._committed = [info for info in known if info not in doomed]
        if choose is None:
            return None
        kept = sorted(self._committed, key=lambda info: info.sequence)
        return Decision(doomed=[info.path for info in doomed], kept=[info.path.name for info in kept])
