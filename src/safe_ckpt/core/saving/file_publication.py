"""How a save gets its name in a file system: built in ``pending``, durable, then renamed. On rank 0, but for two methods."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safe_ckpt.config import Timeouts
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, CheckpointInfo, FileEntry
from safe_ckpt.core.formats.verify import is_marked, refuse_unreadable
from safe_ckpt.core.home import extra_files
from safe_ckpt.core.home.file_home import Workspace
from safe_ckpt.core.saving.save import SaveJob
from safe_ckpt.core.saving.set_up import Patience, await_visible
from safe_ckpt.core.storage import durable as commit
from safe_ckpt.core.storage.durable import sync_directory
from safe_ckpt.errors import (
    CommitOutcomeUnknown,
    DirectoryError,
    DirectoryInUseError,
    DirectoryNotSharedError,
    SafeCheckpointError,
    SaveError,
)

_VISIBLE_S = 60.0
_UNHEALTHY = "unhealthy-"  # in front: Lightning takes what begins with "last" for the last one


class FilePublication:
    """See ``Publication``.

    Args:
        job: the save.
        workspace: the directory that is held.
        path: the final name.
        folder: the directory into which files are written.
        timeouts: how long to wait.
    """

    def __init__(self, job: SaveJob, workspace: Workspace, path: Path, folder: Path, timeouts: Timeouts) -> None:
        self._job = job
        self._workspace = workspace
        self._final = path
        self._timeouts = timeouts
        self._folder = folder
        self._staged = workspace.pending / job.op_id / job.name

    @property
    def directories(self) -> list[str]:
        """See ``Publication``."""
        return [str(folder) for folder in self._folders()]

    def prepare(self) -> None:
        """See ``Publication``."""
        job = self._job
        why = "Earlier checkpoints are deleted only after the new one is committed, so both must fit."
        commit.require_space(self._workspace.path, job.needed_bytes, why)
        self._workspace.make_pending(job.op_id)
        if job.request.destination.kind == "directory":
            if job.request.on_commit.prefilled is not None:
                extra_files.enter(job.request.on_commit.prefilled, self._staged)
            else:
                self._staged.mkdir()
            for name in job.request.content.folders:
                (self._staged / name).mkdir(exist_ok=True)  # a hook may have made it
            sync_directory(str(self._staged.parent))

    def await_place(self, rank: int, left_s: Callable[[], float]) -> None:
        """See ``Publication``."""
        if not all(await_visible(folder, min(_VISIBLE_S, left_s())) for folder in self._folders()):
            raise DirectoryNotSharedError(path=str(self._workspace.path), rank=rank, ranks=(rank,))

    def commit(
        self, entries: tuple[FileEntry, ...], said: Mapping[str, Any], look_around: Callable[[], None]
    ) -> CheckpointInfo:
        """See ``Publication``."""
        job, on_commit = self._job, self._job.request.on_commit
        self._check_staged(entries, look_around)
        marked = bool(said["health"].get("marked"))
        if marked and os.path.lexists(self._final) and not is_marked(self._final):
            self._final = self._final.with_name(f"{_UNHEALTHY}{self._final.name}")
        if job.request.destination.kind == "file":
            return self._commit_file(entries, said["health"])
        if on_commit.prefilled is not None:
            entries = (*entries, *extra_files.adopt(self._staged, {entry.path for entry in entries}))
        if on_commit.carry is not None:
            extra_files.carry(self._final, self._staged, on_commit.carry)
        manifest = dataclasses.replace(job.manifest, name=self._final.name, files=entries, **said)
        commit.write_durably(self._staged / MANIFEST_NAME, manifest.to_bytes())
        self._publish()
        self._link(marked=marked)
        self._point(marked=marked)
        return CheckpointInfo.of(manifest, self._final, sum(entry.size_bytes for entry in entries))

    def drop(self) -> None:
        """See ``Publication``."""
        self._workspace.drop_pending(self._job.op_id)
        if self._job.request.on_commit.prefilled is not None:
            self._workspace.drop_pending(self._job.request.on_commit.prefilled.parent.name)

    def taken_over(self, error: BaseException) -> DirectoryInUseError | None:
        """See ``Publication``."""
        unknown = DirectoryInUseError | commit.HalfCommittedError | CommitOutcomeUnknown
        if isinstance(error, Exception) and not isinstance(
            error, unknown
        ):  # its files were swept away, in whatever phase
            try:
                self._workspace.confirm()
            except DirectoryInUseError as taken:
                return taken
            except OSError:
                pass
        return None

    def named(self, error: OSError, *, rank: int, phase: str) -> SafeCheckpointError:
        """See ``Publication``."""
        name = self._job.name
        if isinstance(error, commit.HalfCommittedError):
            cause = f"it has its name, but the disk did not confirm that: {error}"
            return CommitOutcomeUnknown(name=name, cause=cause, rank=rank, phase="commit", code=error.errno or 0)
        folder, needed = self._workspace.path, self._job.needed_bytes
        path = str(error.filename or folder)
        facts = {"path": path, "message": f"Saving {name}: {error.strerror}.", "rank": rank, "phase": phase}
        full = commit.out_of_space(error, folder, needed_bytes=needed, **facts)
        if full is not None:
            return full
        return DirectoryError.of(error, path=path, rank=rank, phase=f"saving {name}: {phase}")

    def _folders(self) -> list[Path]:
        """Every directory into which files are written, the innermost first."""
        return [*(self._folder / name for name in self._job.request.content.folders), self._folder]

    def _commit_file(self, entries: tuple[FileEntry, ...], health: Mapping[str, Any]) -> CheckpointInfo:
        """Without a file written, only names are given to, or taken from, what is there already."""
        if entries:
            refuse_unreadable(self._staged)
            self._publish()
        self._link(marked=bool(health.get("marked")))
        manifest = dataclasses.replace(self._job.manifest, health=health)
        return CheckpointInfo.of(manifest, self._final, sum(entry.size_bytes for entry in entries))

    def _publish(self) -> None:
        """Give it its name, if the directory is still this job's."""
        commit.make_directory(self._final.parent)
        aside = self._aside(self._final)
        self._workspace.confirm()
        commit.publish(self._staged, self._final, aside)

    def _link(self, *, marked: bool) -> None:
        """A name such as ``last`` stays with what it names, rather than to go to a marked checkpoint."""
        if marked:
            return
        for number, link in enumerate(self._job.request.on_commit.links):
            staged = self._staged.parent / f"link{number}-{link.path.name}"
            aside = self._aside(link.path)
            self._workspace.confirm()
            commit.publish_link(self._final, staged, link, aside)

    def _point(self, *, marked: bool) -> None:
        for pointer in self._job.request.on_commit.pointers:
            if marked and pointer.is_for_resume:
                continue
            staged = self._staged.parent / f"pointer-{pointer.path.name}"
            try:
                commit.write_durably(staged, pointer.data)
                if pointer.mode is not None:
                    staged.chmod(pointer.mode)
                commit.publish_file(staged, pointer.path)
            except OSError as error:
                raise commit.HalfCommittedError(error.errno, f"{pointer.path}: {error.strerror}") from error

    def _aside(self, path: Path) -> Callable[[], Path]:
        job, workspace = self._job, self._workspace
        if job.request.destination.kind != "directory" and not os.path.lexists(path):
            return lambda: workspace.aside(job.op_id, path)  # a file is replaced in one step
        made = workspace.aside(job.op_id, path)

        def durable() -> Path:
            if made.parent.parent == workspace.trash and os.path.lexists(path):
                for folder in (workspace.trash, workspace.hidden):  # both are made when they are needed
                    sync_directory(str(folder))
            return made

        return durable

    def _check_staged(self, entries: tuple[FileEntry, ...], look_around: Callable[[], None]) -> None:
        # The files on disk must be those that were reported: another rank's file may have vanished, or lie on another disk.
        # Caches of network file systems lag behind, so rank 0 waits for a file that it does not see yet, or with an old size.
        patience = Patience(self._timeouts)
        for entry in entries:
            size = patience.until_sized(self._folder / entry.path, entry.size_bytes, look_around)
            if size != entry.size_bytes:
                cause = f"{entry.path}, written by rank {entry.rank} with {entry.size_bytes} bytes, "
                cause += "is not there" if size < 0 else f"has {size} bytes here"
                self._workspace.confirm()  # a job that took over has swept it away
                raise SaveError(name=self._job.name, cause=cause, rank=entry.rank, phase="commit")
