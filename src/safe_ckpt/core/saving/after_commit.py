"""Deletions after a commit: the rules decide which and when, and an extension may need a checkpoint for longer."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from safe_ckpt import events
from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.core.home import retention
from safe_ckpt.core.home.candidates import is_still, stamp_of
from safe_ckpt.core.home.holders import refuse_held_below
from safe_ckpt.core.home.home import Home
from safe_ckpt.core.home.retention import Decision, Unjudged
from safe_ckpt.core.saving.extension import Extensions
from safe_ckpt.core.saving.save import SaveJob
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.presence import Stamp
from safe_ckpt.core.storage.source import frees_bytes
from safe_ckpt.errors import SafeCheckpointError
from safe_ckpt.hooks.emitter import Emitter

logger = logging.getLogger(__name__)
_NAMES_REPORTED = 10
_told: dict[str, Unjudged] = {}  # by directory: of which missing metric this process has warned


class AfterCommit:
    """Deletes what is not kept any more. On rank 0, in the background.

    Args:
        rank: this rank.
        emit: receives what happens.
        extensions: may need a checkpoint for longer.
    """

    def __init__(self, rank: int, emit: Emitter, extensions: Extensions) -> None:
        self._rank = rank
        self._emit = emit
        self._extensions = extensions
        self._marked: list[CheckpointInfo] = []  # the newest that this job committed
        self._deferred: list[tuple[Home, Place, Stamp | None]] = []  # to be deleted, and not gone yet
        self._told: set[Place] = set()  # which are kept because they are held
        self._has_kept = False  # an extension needed one for longer

    def apply_rules(self, job: SaveJob, info: CheckpointInfo) -> None:
        """``info`` was committed: delete what the rules do not keep. What fails is logged, for the save is committed.

        Args:
            job: the save.
            info: what was committed.
        """
        on_commit, begun = job.request.on_commit, time.monotonic()
        try:
            decision = retention.decide_deletions(info, on_commit.catalog, on_commit.retention, marked=self._marked)
            if decision is None and any(root is job.home for root, *_ in self._deferred):
                decision = Decision(to_delete=())
            if on_commit.catalog is not None and not info.marked:  # what is still to be deleted was chosen again
                self._deferred = [one for one in self._deferred if one[0] is not job.home]
            if decision is not None:
                _warn_once(str(info.path.parent), decision.unjudged)
                gone = self._carry_out(decision, job.home, begun)
                if on_commit.catalog is not None:
                    on_commit.catalog.drop_deleted(gone)
        except Exception:  # the save is committed, and must not fail because of the cleaning up
            logger.warning("could not remove old checkpoints after %s", info.path, exc_info=True)
        if info.marked:
            self._marked = [info]
        job.publication.clean_up()

    def _carry_out(self, decision: Decision, root: Home, begun: float) -> Sequence[Place]:
        rank = self._rank
        to_delete = self._due(root, decision.to_delete)
        if to_delete:
            root.confirm()
        freed = frees_bytes(to_delete, decision.sizes)
        gone = self._discard(root, to_delete)
        for path in gone:
            self._emit(events.Removed(rank=rank, path=str(path)))
        self._emit(
            events.Retained(
                rank=rank,
                kept=tuple(decision.kept[-_NAMES_REPORTED:]),
                kept_count=len(decision.kept),
                removed=tuple(str(path) for path in gone),
                freed_bytes=freed if gone else 0,
                seconds=time.monotonic() - begun,
            )
        )
        return gone

    def _due(self, root: Home, paths: Sequence[Place]) -> list[Place]:
        """Return what may be deleted now: of ``paths``, and of earlier ones that an extension needed or that could not go."""
        asked = {path: stamp for other, path, stamp in self._deferred if other is root and is_still(path, stamp)}
        for path in paths:
            asked.setdefault(path, stamp_of(path))
        held = self._extensions.kept(root, list(asked))
        self._has_kept |= bool(held)
        others = [one for one in self._deferred if one[0] is not root]
        self._deferred = [*others, *((root, path, stamp) for path, stamp in asked.items())]
        pinned = root.pinned([path for path in asked if path not in held])
        for path, why in pinned.items():
            self._tell_kept(path, why, logging.INFO)  # readers are no trouble
        return [path for path in asked if path not in held and path not in pinned and not self._is_held_below(path)]

    def _tell_kept(self, path: Place, why: object, level: int = logging.WARNING) -> None:
        if path not in self._told:
            logger.log(level, "%s is not deleted: %s", path, why)
        self._told.add(path)

    def _is_held_below(self, path: Place) -> bool:
        """Whether another job saves into a checkpoint that is to be deleted: it waits until that is over."""
        try:
            refuse_held_below(path)
        except (SafeCheckpointError, OSError) as error:
            self._tell_kept(path, error)
            return True
        return False

    def _discard(self, root: Home, paths: Sequence[Place]) -> Sequence[Place]:
        gone = root.discard(paths)
        self._deferred = [one for one in self._deferred if one[1] not in gone]
        self._told.difference_update(gone)
        if gone:
            self._extensions.ask("a deletion", lambda one: one.deleted(root, gone))
        return gone

    def delete_deferred(self) -> None:
        """Delete what an extension needed, when it has ended. On rank 0, after ``close``. What fails is logged."""
        for root in {id(one): one for one, *_ in self._deferred}.values() if self._has_kept else ():
            try:
                due = self._due(root, [])
                root.confirm()
                self._discard(root, due)
            except Exception:  # the directories are given back all the same
                logger.warning("could not remove old checkpoints in %s", root.path, exc_info=True)


def _warn_once(folder: str, missing: Unjudged | None) -> None:
    """Warn once of a metric that no checkpoint there has; again when there are other metrics."""
    if missing is not None and _told.get(folder) != missing:
        _told[folder] = missing
        message = "%s: keep_best cannot choose: %s. Correct retention.metric, or pass metrics={%r: ...} when saving"
        logger.warning(message, folder, missing, missing.metric)
