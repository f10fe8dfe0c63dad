"""Which checkpoints there are in an object store: the folders with a manifest that are not being deleted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from safe_ckpt.core.formats.manifest import MANIFEST_NAME, CheckpointInfo
from safe_ckpt.core.home import retention
from safe_ckpt.core.home.candidates import Candidate
from safe_ckpt.core.home.file_home import HIDDEN
from safe_ckpt.core.home.object_head import HEAD, Head, folders_of, in_parallel, manifest_in, read_head
from safe_ckpt.core.home.standing import Catalog
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.core.storage.objects.second_look import DISAGREED
from safe_ckpt.errors import CorruptCheckpointError, DirectoryError, UnsupportedFormatError
from safe_ckpt.text import listed

logger = logging.getLogger(__name__)
OnError = Callable[[ObjectPath, Exception], None]
_PAUSES_S = (0.1, 0.4, 1.6, None)
_SOMETHING = "checkpoints"


def list_objects(path: ObjectPath, on_error: OnError | None = None) -> list[Candidate]:
    """The checkpoints below ``path``, in no order. Needs no ownership.

    A list that lacks what the head names is an old one. It is looked at again for some seconds.

    Args:
        path: where to look.
        on_error: called with a checkpoint that cannot be looked at, which is then left out; None to raise instead.

    Raises:
        DirectoryError: the lists lack what the head names.
        OSError: the store gave no answer.
        UnsupportedFormatError: one is of a newer format version.
    """
    where, errors = path, dict[ObjectPath, Exception]()
    for pause_s in _PAUSES_S:
        errors.clear()
        found, lacking = _listed(where, errors if on_error is not None else None)
        if lacking and pause_s is None:  # what a live job has deleted since the head was read is not named any more
            named = _named_by(read_head(where))
            lacking = [name for name in lacking if name in named]
        if not lacking:
            for folder, error in errors.items():
                if on_error is not None:
                    on_error(folder, error)
            return found
        if pause_s is not None:
            logger.warning("%s: the list lacks %s, unlike the head: listing it once more", path, listed(lacking))
            time.sleep(pause_s)
            where = path.afresh()
    message = f"{DISAGREED}: its head names {listed(lacking)}, and no list does"
    message += f". If somebody has deleted that, delete {path / HIDDEN / HEAD} as well"
    raise DirectoryError(path=str(path), message=message)


def _listed(path: ObjectPath, errors: dict[ObjectPath, Exception] | None) -> tuple[list[Candidate], list[str]]:
    """What the store lists, and what it should list besides. Without a dict for them, errors are raised."""
    head = read_head(path) or Head()
    hidden = {*head.trash, *head.quarantined}
    folders = [folder for folder in folders_of(path) if folder.name not in hidden]

    def look(folder: ObjectPath) -> Candidate | None:
        try:
            return _look(folder)
        except (OSError, UnsupportedFormatError) as error:
            if errors is None:
                raise
            errors[folder] = error
            return None

    found = [candidate for candidate in in_parallel(look, folders) if candidate is not None]
    seen = {candidate.path.name for candidate in found} | {folder.name for folder in errors or ()}
    lacking = [name for name in head.committed or () if name not in seen | hidden]
    unlisted = set(head.pending) - {folder.name for folder in folders}
    lacking += [name for name in sorted(unlisted) if _look(path / name) is not None]
    if not seen and head.committed is None and head.sequence > 0:
        lacking.append(_SOMETHING)
    return found, lacking


def _named_by(head: Head | None) -> set[str]:
    if head is None:
        return set()
    return {*head.pending, *(head.committed if head.committed is not None else (_SOMETHING,))}


def _look(folder: ObjectPath) -> Candidate | None:
    try:
        found = manifest_in(folder)
    except FileNotFoundError:
        return None  # of a save that is under way, or failed
    except CorruptCheckpointError as error:
        return Candidate(path=folder, problem=f"{MANIFEST_NAME} {error.message}", damaged=True)
    except UnsupportedFormatError as error:
        if "newer" in error.message:
            raise
        return Candidate(path=folder, foreign=True, problem="its manifest was not written by safe_ckpt")
    return None if found is None else Candidate(path=folder, manifest=found[0])


class ObjectCatalog(Catalog):
    """The committed checkpoints of one directory in an object store, as rank 0 knows them."""

    def add(self, new: CheckpointInfo) -> list[Place]:
        """``new`` was committed. Returns the folders of those that were replaced."""
        self._committed = [*(info for info in self._committed if info.path != new.path), new]
        replaced = [info.path for info in retention.replaced_among(self._committed)]
        self.forget(replaced)
        return replaced

    def still_ours(self, new: CheckpointInfo) -> list[CheckpointInfo]:
        """All of them: a folder has one save in its life."""
        del new
        return list(self._committed)
