"""How a save gets its name in an object store: announced, uploaded, then its manifest is created. On rank 0, but for two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from safe_ckpt.core.formats.manifest import CheckpointInfo, FileEntry
from safe_ckpt.core.home.object_home import ObjectRoot, UndecidedError
from safe_ckpt.core.saving.save import SaveJob
from safe_ckpt.core.storage.objects.place import ObjectPath
from safe_ckpt.errors import (
    CommitOutcomeUnknown,
    DirectoryError,
    DirectoryInUseError,
    SafeCheckpointError,
    SaveError,
)


class ObjectPublication:
    """See ``Publication``.

    Args:
        job: the save.
        root: the directory that is held.
        folder: where the objects go.
    """

    def __init__(self, job: SaveJob, root: ObjectRoot, folder: ObjectPath) -> None:
        self._job = job
        self._root = root
        self._folder = folder

    @property
    def directories(self) -> list[str]:
        """See ``Publication``. An object is durable when its upload is over."""
        return []

    def prepare(self) -> None:
        """See ``Publication``."""
        self._root.announce(self._folder, self._job.manifest.sequence)

    def await_place(self, rank: int, left_s: Callable[[], float]) -> None:
        """See ``Publication``. There is nothing to wait for."""

    def commit(
        self, entries: tuple[FileEntry, ...], said: Mapping[str, Any], look_around: Callable[[], None]
    ) -> CheckpointInfo:
        """See ``Publication``."""
        self._check_uploaded(entries)
        look_around()
        manifest = dataclasses.replace(self._job.manifest, files=entries, **said)
        self._root.commit(self._folder, manifest.to_bytes())
        return CheckpointInfo.of(manifest, self._folder, sum(entry.size_bytes for entry in entries))

    def drop(self) -> None:
        """See ``Publication``."""
        self._root.drop(self._folder)

    def taken_over(self, error: BaseException) -> DirectoryInUseError | None:
        """See ``Publication``."""
        if not isinstance(error, Exception) or isinstance(error, DirectoryInUseError | UndecidedError):
            return None
        return self._root.taken_over()

    def named(self, error: OSError, *, rank: int, phase: str) -> SafeCheckpointError:
        """See ``Publication``."""
        name = self._job.name
        if isinstance(error, UndecidedError):
            cause = f"the store did not say whether the manifest was created: {error.strerror}"
            return CommitOutcomeUnknown(name=name, cause=cause, rank=rank, phase="commit", code=error.errno or 0)
        path = str(error.filename or self._folder)
        return DirectoryError.of(error, path=path, rank=rank, phase=f"saving {name}: {phase}")

    def _check_uploaded(self, entries: tuple[FileEntry, ...]) -> None:
        """What is there must be what was reported: another rank's store may be another one."""
        for folder in (self._folder, self._folder.afresh()):
            there = {entry.key: entry.size_bytes for entry in folder.bucket.entries(folder.key)}
            sizes = {entry: there.get((folder / entry.path).key, -1) for entry in entries}
            wrong = [entry for entry, size in sizes.items() if size != entry.size_bytes]
            if not wrong:
                return
        entry, size = wrong[0], sizes[wrong[0]]
        cause = f"{entry.path}, uploaded by rank {entry.rank} with {entry.size_bytes} bytes, "
        cause += "is not there" if size < 0 else f"has {size} bytes in {self._folder}"
        raise SaveError(name=self._job.name, cause=cause, rank=entry.rank, phase="commit")
