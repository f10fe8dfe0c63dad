"""The committed checkpoints of one directory as rank 0 knows them, and which of them are let go after a commit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safe_ckpt.core.directory.catalog import Candidate
from safe_ckpt.core.formats.manifest import CheckpointInfo, Manifest, read_manifest
from safe_ckpt.errors import SafeCheckpointError

logger = logging.getLogger(__name__)

Choose = Callable[[Sequence[CheckpointInfo]], Sequence[CheckpointInfo]]
"""Which of the committed checkpoints to delete."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a rule says after a commit.

    Attributes:
        doomed: what is to be deleted now.
        kept: names of what stays, oldest first, where that is known.
    """

    to_delete: Sequence[Path]
    kept: Sequence[str] = ()


class Catalog:
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
        there = [*(info for info in self._committed if info.path != new.path and info.path.exists()), new]
        known = [info for info in there if info is new or _still_has_its_name(info)] if choose is not None else there
        to_delete = choose(known) if choose is not None else []
        self._committed = [info for info in there if info not in to_delete]
        if choose is None:
            return None
        kept = sorted((info for info in known if info not in to_delete), key=lambda info: info.sequence)
        return Decision(to_delete=[info.path for info in to_delete], kept=[info.path.name for info in kept])


def is_of(info: CheckpointInfo, manifest: Manifest) -> bool:
    """Whether ``manifest`` is that of the checkpoint ``info``, and not of another one under the same name."""
    return (manifest.op_id, manifest.sequence) == (info.op_id, info.sequence)


def _still_has_its_name(info: CheckpointInfo) -> bool:
    # Where names are held one by one another job may have saved under this one since.
    try:
        return is_of(info, read_manifest(info.path))
    except (SafeCheckpointError, OSError) as error:
        logger.warning("%s is left alone, because nobody can tell whose it is: %s", info.path, error)
        return False
