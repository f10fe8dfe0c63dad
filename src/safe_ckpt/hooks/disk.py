"""Warns before a directory from which nothing is deleted has filled its disk."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from safe_ckpt import events

logger = logging.getLogger(__name__)
_FEW = 10
_FROM = 3  # commits: by then whoever deletes has deleted


class DiskHook:
    """One warning, once the disk will hold fewer than ten more checkpoints and none was deleted so far. On rank 0."""

    def __init__(self) -> None:
        self._over = False
        self._paths: set[str] = set()

    def __call__(self, event: events.Event) -> None:
        """Take one event."""
        if isinstance(event, events.Removed | events.Retained):
            self._over = True
        elif isinstance(event, events.Committed) and event.size_bytes and not event.weights_only and not self._over:
            self._look(event)

    def _look(self, event: events.Committed) -> None:
        if len(self._paths) < _FROM:
            self._paths.add(event.path)
        if len(self._paths) < _FROM or "://" in event.path:
            return
        try:
            more = shutil.disk_usage(Path(event.path).parent).free // event.size_bytes
        except OSError:
            return
        if more < _FEW:
            self._over = True
            logger.warning(
                "%s: the disk will hold %d more checkpoints of %d bytes, and nothing deletes old ones. Keep three: "
                "CheckpointConfig(retention=Retention(keep_last=3)); in Lightning save_top_k=3, in the Trainer "
                "save_total_limit=3",
                Path(event.path).parent,
                more,
                event.size_bytes,
            )
