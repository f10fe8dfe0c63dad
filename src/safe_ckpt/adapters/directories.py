"""Directories of checkpoints, as adapters use them: hold one, list what is committed in it, number, verify and retain."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from safe_ckpt.adapters.pickles import refuse_code
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, Manifest, read_manifest
from safe_ckpt.core.formats.verify import is_marked, verify_if_ours, verify_share
from safe_ckpt.core.home import candidates as catalog
from safe_ckpt.core.home.candidates import WEIGHTS
from safe_ckpt.core.home.file_home import Workspace
from safe_ckpt.core.home.home import HIDDEN, HIDDEN_TOO, NAMES, Candidate
from safe_ckpt.core.home.retention import DeleteListed, KeepNewest, policy_of
from safe_ckpt.core.home.standing import Catalog, is_of, named_by, standing_of
from safe_ckpt.core.home.visibility import listed
from safe_ckpt.core.resuming import resume
from safe_ckpt.core.resuming.candidate import FileReader
from safe_ckpt.core.resuming.mirror_resume import Mirrored
from safe_ckpt.core.saving.homes import HeldDirectories, open_folder, refuse
from safe_ckpt.core.saving.save import Content, Destination, Facts, OnCommit, SaveRequest
from safe_ckpt.core.storage import durable, presence
from safe_ckpt.core.storage.inside import checked_name, really_inside
from safe_ckpt.core.transfer.fetching import is_copy_of
from safe_ckpt.core.writer import commit_order
from safe_ckpt.layouts.table import Kind

if TYPE_CHECKING:
    from safe_ckpt.core.formats.manifest import CheckpointInfo
    from safe_ckpt.core.saving.engine import Engine
    from safe_ckpt.core.saving.save import SaveHandle

__all__ = [
    "HIDDEN",
    "HIDDEN_TOO",
    "MANIFEST_NAME",
    "NAMES",
    "WEIGHTS",
    "Candidate",
    "Catalog",
    "DeleteListed",
    "FileReader",
    "HeldDirectories",
    "KeepNewest",
    "Manifest",
    "OpenDirectory",
    "Workspace",
    "candidates_in",
    "catalog",
    "checked_name",
    "commit_order",
    "durable",
    "fetch",
    "folder_for_others",
    "is_marked",
    "is_of",
    "listed",
    "manifest_of",
    "named_by",
    "policy_of",
    "presence",
    "read_manifest",
    "really_inside",
    "refuse",
    "resume",
    "standing_of",
    "verify",
    "verify_if_ours",
    "verify_share",
    "warn_if_foreign",
]

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class OpenDirectory:
    """A directory of checkpoints that is held. ``engine.close()`` gives it back.

    Attributes:
        workspace: its lock, its pending saves and its order of commits.
        catalog: what is committed in it; known on rank 0 only.
    """

    workspace: Workspace
    catalog: Catalog = field(default_factory=Catalog)

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
            candidates = listed(find, engine.config.timeouts)
            taken.catalog = Catalog(candidates)
            taken.workspace.start_after(catalog.newest_sequence(candidates))

        engine.take_stock(taken.workspace, {"directory": folder}, look)
        return taken

    def newest(self, engine: Engine, find: Callable[[], Sequence[Candidate]]) -> CheckpointInfo | None:
        """The newest checkpoint that every rank has verified a share of. Every rank calls this.

        A corrupt one is passed over, and moved into quarantine once an older one was found good.

        Args:
            engine: where the ranks meet.
            find: lists the candidates; called on rank 0.

        Returns:
            None when there never was one.

        Raises:
            NoValidCheckpointError: there are checkpoints and none is usable.
            SafeCheckpointError: one could not be read; on every rank.
        """
        chosen = resume.choose(
            engine, self.workspace, find, FileReader(engine, lambda path: _verify_share(engine, path))
        )
        return chosen.info if chosen is not None else None

    def save(
        self,
        engine: Engine,
        path: Path,
        content: Content,
        *,
        step: int,
        notes: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        must_match: Mapping[str, str] | None = None,
        on_commit: OnCommit,
    ) -> SaveHandle:
        """Save a checkpoint that is a directory. Returns when the copy is taken; every rank calls this.

        Args:
            engine: what saves.
            path: the final name.
            content: what this rank writes.
            step: the training step.
            notes: further entries of the manifest.
            metrics: numbers that retention may look at.
            must_match: what must be equal on all ranks besides step and path.
            on_commit: what is done at the commit; the catalog is added here.

        Raises:
            SafeCheckpointError: see ``Engine.save``.
        """
        return engine.save(
            SaveRequest(
                destination=Destination(workspace=self.workspace, path=path, kind="directory"),
                content=content,
                facts=Facts(step=step, metrics=metrics or {}, notes=notes),
                must_match=must_match or {},
                on_commit=dataclasses.replace(on_commit, catalog=self.catalog),
            )
        )


def candidates_in(folder: Path, adapter: str, kind: Kind | None = None) -> list[Candidate]:
    """The checkpoints in ``folder`` that ``adapter`` may resume from, unordered. On rank 0.

    Args:
        folder: the directory.
        adapter: its name under ``"adapter"`` in the manifest's notes.
        kind: the layout of the framework, whose own checkpoints count as well; None for ours alone.

    Raises:
        OSError: it could not be listed.
    """
    number_of, problem = (kind.number_of, kind.problem) if kind is not None else (lambda _: None, None)
    listed = catalog.list_directories(folder, number_of, problem)
    return [c for c in listed if c.manifest is None or c.manifest.notes.get("adapter") == adapter]


@contextlib.contextmanager
def folder_for_others(engine: Engine, workspace: Workspace, path: Path) -> Iterator[Path]:
    """A folder for files of a checkpoint that the framework or its hooks write. Every rank enters this.

    Give the folder to ``OnCommit`` as ``prefilled``, and start the save within.

    Args:
        engine: where the ranks meet.
        workspace: the directory that is held.
        path: the final name of the checkpoint.

    Raises:
        DirectoryError: it could not be made, on every rank.
    """
    key = engine.agree("save", must_match={"path": path}, decide=lambda _: uuid.uuid4().hex)
    folder = open_folder(engine.coordinator, workspace, key, engine.config.timeouts.barrier_s)
    try:
        yield folder
    except BaseException:
        if engine.rank == 0:
            workspace.drop_pending(key)
        raise


def fetch(engine: Engine, workspace: Workspace, find: Callable[[], Sequence[Candidate]], name: str | None) -> None:
    """With a mirror, bring what is newer there into a directory that is held, or one by its name. Every rank calls this.

    Args:
        engine: where the ranks meet.
        workspace: the directory.
        find: lists what is in it; called on rank 0.
        name: which one, relative to the directory; None for the newest.

    Raises:
        SafeCheckpointError: it is needed, and the mirror gives no answer; on every rank.
    """
    if name is None:
        Mirrored(engine, workspace, find, None).fetch_newer()
    else:
        path = workspace.path / name
        Mirrored(
            engine, workspace, find, lambda one: one.manifest is not None and is_copy_of(one.manifest, path, workspace)
        ).fetch_named()


def manifest_of(path: Path) -> Manifest | None:
    """The manifest of a checkpoint that is a directory; None where another tool wrote it.

    Raises:
        SafeCheckpointError: it cannot be read, or is damaged.
    """
    return read_manifest(path) if presence.is_there(path / MANIFEST_NAME) else None


def verify(engine: Engine, path: Path) -> None:
    """Verify one checkpoint, each rank a share. One of another tool has no digests to compare. Every rank calls this.

    Raises:
        CorruptCheckpointError: it is damaged; on every rank.
        HostileCheckpointError: it would run code; on every rank.
        SafeCheckpointError: it could not be read; on every rank.
    """
    resume.check(engine, path, lambda there: _verify_share(engine, there))


def warn_if_foreign(engine: Engine, path: Path) -> None:
    """Log, once, that a checkpoint carries no checksums."""
    if engine.rank == 0 and not presence.is_there(path / MANIFEST_NAME):
        logger.warning("%s was not written by safe_ckpt: it is loaded without verification", path)


def _verify_share(engine: Engine, path: Path) -> None:
    rank, size = engine.rank, engine.coordinator.size
    verify_share(path, rank, size)
    refuse_code(path, rank, size)
