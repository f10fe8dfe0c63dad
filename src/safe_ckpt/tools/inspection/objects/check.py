"""Whether the bytes of a checkpoint in an object store are those that were written: read by ranges, several at a time."""

from __future__ import annotations

import contextlib
import errno
import threading
from dataclasses import replace
from functools import partial

from safe_ckpt.core.formats.manifest import MANIFEST_NAME, FileEntry, Manifest
from safe_ckpt.core.formats.verify import UNEQUAL, verify_entry
from safe_ckpt.core.home.object_head import manifest_in
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.core.storage.objects.second_look import look_twice
from safe_ckpt.core.storage.reader import ReadProgress
from safe_ckpt.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsupportedFormatError
from safe_ckpt.tools.inspection.check import (
    Job,
    Judgement,
    Task,
    damaged,
    known,
    of_error,
    plan,
    remark_on_extra,
    unlocated,
    valid,
)
from safe_ckpt.tools.inspection.objects.reach import is_checkpoint

_LARGE_BYTES = 8 << 20
_large = threading.BoundedSemaphore(2)  # each takes memory for some parts while it is read


def plan_any(path: Place, *, follow_symlinks: bool = False) -> Task:
    """As ``inspection.check.plan``, also of a checkpoint in an object store.

    Raises:
        OSError: it could not be read; it is not treated as corrupt.
    """
    return plan_object(path) if isinstance(path, ObjectPath) else plan(path, follow_symlinks=follow_symlinks)


def plan_object(path: ObjectPath) -> Task:
    """Read the manifest and the sizes, and no payload. A problem that they show becomes a job that reports it.

    Args:
        path: a checkpoint.

    Raises:
        OSError: it could not be read, or is not there; it is not treated as corrupt.
    """
    try:
        manifest, data = read_committed(path)
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        judgement = of_error(error, MANIFEST_NAME)
        return Task(path=path, kind="unreadable", size_bytes=0, jobs=[known(judgement)])
    present = {entry.key for entry in path.bucket.entries(path.key)}
    named = {(path / entry.path).key for entry in manifest.files} | {(path / MANIFEST_NAME).key}
    extra = sorted(key[len(path.key) + 1 :] for key in present - named)
    jobs: list[Job] = [
        known(valid(MANIFEST_NAME, len(data))),
        *(partial(_entry, path, entry) for entry in manifest.files),
    ]
    total = sum(entry.size_bytes for entry in manifest.files)
    return Task(path=path, kind="safe_ckpt directory", size_bytes=total, jobs=jobs, remarks=remark_on_extra(extra))


def read_committed(path: ObjectPath) -> tuple[Manifest, bytes]:
    """The manifest of a checkpoint, and its bytes.

    Raises:
        CorruptCheckpointError: damaged.
        UnsupportedFormatError: not ours, of a newer version, or in place of one that was never committed.
        OSError: it could not be read, or is not there.
    """
    found = manifest_in(path)
    if found is None:
        raise UnsupportedFormatError(path=str(path), message="was never committed: a later job has said so")
    return found


def _entry(folder: ObjectPath, entry: FileEntry, progress: ReadProgress | None) -> Judgement:
    with _large if entry.size_bytes > _LARGE_BYTES else contextlib.nullcontext():
        try:
            look_twice(folder, lambda at: verify_entry(at, entry, progress=progress if at is folder else None))
        except IncompleteCheckpointError:
            if not is_checkpoint(folder):
                raise FileNotFoundError(errno.ENOENT, "was deleted meanwhile", str(folder)) from None
            return damaged(entry.path, "is missing", size=entry.size_bytes)
        except CorruptCheckpointError as error:
            if error.message == UNEQUAL:
                return damaged(entry.path, unlocated(entry.path), size=entry.size_bytes)
            return replace(of_error(error, entry.path), size_bytes=entry.size_bytes)
    return valid(entry.path, entry.size_bytes)
