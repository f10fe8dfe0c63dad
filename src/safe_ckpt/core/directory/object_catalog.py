"""Which checkpoints there are in an object store: the folders with a manifest that are not being deleted."""

from __future__ import annotations

import logging
from collections.abc import Callable

from safe_ckpt.core.directory import retention
from safe_ckpt.core.directory.catalog import Candidate, Catalog
from safe_ckpt.core.directory.object_folders import folders_of, hidden_in, in_parallel, is_gravestone
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, CheckpointInfo, parse_manifest
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.errors import CorruptCheckpointError, UnsupportedFormatError

logger = logging.getLogger(__name__)
OnError = Callable[[ObjectPath, Exception], None]


def list_objects(path: ObjectPath, on_error: OnError | None = None) -> list[Candidate]:
    """The checkpoints below ``path``, in no order. Needs no ownership.

    Args:
        path: where to look.
        on_error: called with a checkpoint that cannot be looked at, which is then left out; None to raise instead.

    Raises:
        OSError: the store gave no answer.
        UnsupportedFormatError: one is of a newer format version.
    """
    hidden = hidden_in(path)
    folders = [folder for folder in folders_of(path) if folder.name not in hidden]

    def look(folder: ObjectPath) -> Candidate | None:
        try:
            return _look(folder)
        except (OSError, UnsupportedFormatError) as error:
            if on_error is None:
                raise
            on_error(folder, error)
            return None

    return [candidate for candidate in in_parallel(look, folders) if candidate is not None]


def _look(folder: ObjectPath) -> Candidate | None:
    try:
        data, _ = folder.bucket.read((folder / MANIFEST_NAME).key)
    except FileNotFoundError:
        return None  # of a save that is under way, or failed
    if is_gravestone(data):
        return None
    try:
        return Candidate(path=folder, manifest=parse_manifest(data, folder))
    except CorruptCheckpointError as error:
        return Candidate(path=folder, problem=f"{MANIFEST_NAME} {error.message}", damaged=True)
    except UnsupportedFormatError as error:
        if "newer" in error.message:
            raise
        return Candidate(path=folder, foreign=True, problem="its manifest was not written by safe_ckpt")


class ObjectCatalog(Catalog):
    """The committed checkpoints of one directory in an object store, as rank 0 knows them."""

    def add(self, new: CheckpointInfo) -> list[Place]:
        """``new`` was committed. Returns the folders of those that were replaced: the same name, in an earlier folder.

        Also by a job that died before it could delete them. A folder under another name is the user's copy.
        """
        self._committed = [*(info for info in self._committed if info.path != new.path), new]
        ours = [info for info in self._committed if retention.is_under_its_name(info)]
        # A marked one does not replace a healthy one.
        newest = {(info.name, info.marked): info for info in sorted(ours, key=lambda info: info.sequence)}
        replaced = [info.path for info in ours if info is not newest[info.name, info.marked]]
        self.forget(replaced)
        return replaced

    def still_ours(self, new: CheckpointInfo) -> list[CheckpointInfo]:
        """All of them: a folder has one save in its life."""
        del new
        return list(self._committed)
