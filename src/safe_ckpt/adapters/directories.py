"""Directories of checkpoints, as adapters use them: hold one, list what is committed in it, number, verify and retain."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import Self

from safe_ckpt.adapters.layouts import Kind
from safe_ckpt.core.directory import catalog, commit_order, extra_files, retention
from safe_ckpt.core.directory.catalog import WEIGHTS, Candidate, Catalog, is_of
from safe_ckpt.core.directory.workspace import HIDDEN, Workspace
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, read_manifest
from safe_ckpt.core.formats.verify import verify_entry, verify_if_ours, verify_share
from safe_ckpt.core.saving import one_shot, resume
from safe_ckpt.core.saving.held_directories import NAMES, HeldDirectories, refuse
from safe_ckpt.core.storage import durable, presence
from safe_ckpt.core.storage.durable import sync_directory

if TYPE_CHECKING:
    from safe_ckpt.core.formats.manifest import CheckpointInfo
    from safe_ckpt.core.saving.engine import Engine

__all__ = [
    "HIDDEN",
    "MANIFEST_NAME",
    "NAMES",
    "WEIGHTS",
    "Candidate",
    "Catalog",
    "HeldDirectories",
    "OpenDirectory",
    "Workspace",
    "candidates_in",
    "catalog",
    "commit_order",
    "durable",
    "extra_files",
    "is_of",
    "newest",
    "one_shot",
    "read_manifest",
    "refuse",
    "resume",
    "retention",
    "sync_directory",
    "verify",
    "verify_entry",
    "verify_if_ours",
    "verify_share",
    "warn_if_foreign",
]

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class OpenDirectory:
    """A directory of checkpoints that is held. ``engine.close()`` gives it back.

    Attributes:
        workspace: what a ``SaveRequest`` wants of it.
        ledger: what is committed in it; known on rank 0 only.
    """

    workspace: Workspace
    ledger: Catalog = field(default_factory=Catalog)

    @classmethod
    def take(
        cls, engine: Engine, folder: Path, find: Callable[[], Sequence[Candidate]], *, hidden: Path | None = None
    ) -> Self:
        """Take a directory: lock it, list it, and go on with its order of commits. Every rank calls this.

        Args:
            engine: where the ranks meet.
            folder: the directory; created when missing.
            find: lists what is in it; called on rank 0.
            hidden: where the lock and unfinished saves lie; None for in it.

        Raises:
            DirectoryError: it cannot be used; on every rank.
            DirectoryInUseError: a live job holds it.
        """
        taken = cls(workspace=engine.hold(folder, hidden=hidden))

        def look() -> None:
            candidates = resume.listed(find, engine.config.timeouts)
            taken.ledger = Catalog(candidates)
            taken.workspace.start_after(catalog.newest_sequence(candidates))

        engine.take_stock(taken.workspace, {"directory": folder}, look)
        return taken


def candidates_in(folder: Path, adapter: str, kind: Kind | None = None) -> list[Candidate]:
    """What is in ``folder`` that ``adapter`` may resume from, in no order. On rank 0.

    Args:
        folder: the directory.
        adapter: what its saves put under ``"adapter"`` in the manifest's notes.
        kind: the layout of the framework, whose own checkpoints count as well; None for ours alone.

    Raises:
        OSError: it could not be listed.
    """
    number_of, problem = (kind.number_of, kind.problem) if kind is not None else (lambda _: None, None)
    listed = catalog.list_directories(folder, number_of, problem)
    return [c for c in listed if c.manifest is None or c.manifest.notes.get("adapter") == adapter]


def newest(engine: Engine, directory: OpenDirectory, find: Callable[[], Sequence[Candidate]]) -> CheckpointInfo | None:
    """The newest checkpoint that every rank has verified a share of; None when there never was one. Every rank calls this.

    A corrupt one is passed over, and moved into quarantine once an older one was found good.

    Raises:
        NoValidCheckpointError: there are checkpoints and none is usable.
        SafeCheckpointError: one could not be read; on every rank.
    """
    chosen = resume.choose(engine, directory.workspace, find, lambda path: _verify_share(engine, path))
    return chosen.info if chosen is not None else None


def verify(engine: Engine, path: Path) -> None:
    """Verify one checkpoint, each rank a share; one that another tool wrote is taken as it is. Every rank calls this.

    Raises:
        CorruptCheckpointError: it is damaged; on every rank.
        SafeCheckpointError: it could not be read; on every rank.
    """
    resume.check(engine, path, lambda there: _verify_share(engine, there))


def warn_if_foreign(engine: Engine, path: Path) -> None:
    """Log, once, that a checkpoint carries no checksums."""
    if engine.rank == 0 and not presence.is_there(path / MANIFEST_NAME):
        logger.warning("%s was not written by safe_ckpt: it is loaded without verification", path)


def _verify_share(engine: Engine, path: Path) -> None:
    verify_share(path, engine.rank, engine.coordinator.size)
