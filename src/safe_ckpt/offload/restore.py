"""Consolidated tensors, given back: every rank's part goes where the rank wants it, verified on the way, all ranks or none."""

from __future__ import annotations

import errno
import functools
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safe_ckpt.config import Timeouts, WriterConfig
from safe_ckpt.core.coordination.coordinator import Coordinator, open_coordinator
from safe_ckpt.core.coordination.process_groups import ProcessGroup
from safe_ckpt.core.formats.manifest import FileEntry, Manifest, read_manifest
from safe_ckpt.core.home.file_lock import JobLock, read_lock
from safe_ckpt.core.home.home import HIDDEN
from safe_ckpt.core.storage import durable
from safe_ckpt.core.storage.copier import FileCopy, copy_files
from safe_ckpt.core.storage.direct_io import Unwatched, WriteOptions
from safe_ckpt.core.storage.durable import sync_directory
from safe_ckpt.core.storage.objects.options import refuse_url
from safe_ckpt.core.storage.objects.place import absolute
from safe_ckpt.core.storage.presence import Stamp, inside
from safe_ckpt.errors import (
    CorruptCheckpointError,
    DirectoryError,
    DirectoryInUseError,
    RestoreError,
    naming,
)
from safe_ckpt.offload.consolidate import ADAPTER, own_part

logger = logging.getLogger(__name__)
_STAGED = f"{HIDDEN}-restore-"
_FILES = "files"
_LEASE_S = 60.0
_MAKING_S = 2.0
_PAUSE_S = 0.05


def restore_offloaded(
    source: str | os.PathLike[str],
    targets: Mapping[str, str | os.PathLike[str]],
    *,
    group: ProcessGroup | None = None,
    timeout_s: float = 3600.0,
) -> None:
    """Give each rank back what it gave to ``consolidate_offloaded``. Every rank calls this.

    Every file is copied beside its target and compared with the digest that was taken when it was saved. Only when all ranks
    have all of theirs do the files get their names; what has the same name is replaced, other files in the folders stay. A
    rank that is killed in that last moment leaves some replaced: call it again. Folders without a file are not made.

    Args:
        source: what ``consolidate_offloaded`` made.
        targets: name that this rank gave -> folder that gets the files; created when missing. May be empty.
        group: the ranks; None means WORLD, or this process alone without a process group.
        timeout_s: how long a rank waits for the others to have copied theirs.

    Raises:
        CorruptCheckpointError: a file is not what was saved; nothing was replaced.
        RestoreError: ``source`` holds no such part for this rank.
        NotEnoughSpaceError: a target's file system cannot take it.
        DirectoryError: something could not be read or written.
        SafeCheckpointError: whatever else went wrong, on every rank.

    Example:
        ```python
        consolidate_offloaded({"optimizer": "nvme"}, "runs/offloaded")
        restore_offloaded("runs/offloaded", {"optimizer": "nvme-of-the-next-job"})
        print(os.listdir("nvme-of-the-next-job"))
        ```

        ```text
        ['exp_avg.swp']
        ```
    """
    path = absolute(source)
    barrier_s = min(timeout_s, Timeouts().barrier_s)
    coordinator = open_coordinator(group, Timeouts(lengthy_s=timeout_s, barrier_s=barrier_s), observe=False)
    try:
        asked = functools.partial(refuse_url, source, "source")  # here, where all ranks learn of it
        coordinator.agree("restore offloaded", must_match={"source": path}, local=asked, timeout_s=barrier_s)

        def find() -> list[Part]:
            manifest = read_manifest(path)
            if manifest.notes.get("adapter") != ADAPTER:
                raise RestoreError(path=str(path), message="consolidate_offloaded did not make it")
            wanted = {name: Path(os.path.abspath(folder)) for name, folder in targets.items()}
            return files_of_parts(path, manifest, manifest.notes["parts"], wanted, coordinator.rank)

        restore_files(coordinator, find, timeout_s)
    finally:
        coordinator.release(keep=True)


@dataclass(frozen=True, kw_only=True)
class Part:
    """The content of one folder: the checkpoint, its entries for this part, their common prefix, and the folder."""

    checkpoint: Path
    entries: Sequence[FileEntry]
    prefix: str
    target: Path


def files_of_parts(
    checkpoint: Path,
    manifest: Manifest,
    notes: Sequence[Mapping[str, Any]],
    targets: Mapping[str, Path],
    rank: int,
    prefix: str = "",
) -> list[Part]:
    """Which files of a checkpoint this rank gets back.

    Args:
        checkpoint: the directory.
        manifest: its manifest.
        notes: as ``agree_parts`` made them.
        targets: name that this rank gave -> folder.
        rank: this rank.
        prefix: as given to ``agree_parts``.

    Raises:
        RestoreError: there is no such part for this rank.
    """
    parts = []
    for asked, target in targets.items():
        name = own_part(notes, asked, rank)
        if name is None:
            message = f"rank {rank} stored nothing under that name in it; was it saved with as many ranks?"
            raise RestoreError(path=str(checkpoint), key=repr(asked), message=message)
        below = f"{prefix}{name}/"
        entries = [entry for entry in manifest.files if entry.path.startswith(below)]
        parts.append(Part(checkpoint=checkpoint, entries=entries, prefix=below, target=target))
    return parts


def restore_files(coordinator: Coordinator, find: Callable[[], list[Part]], timeout_s: float) -> None:
    """Copy, verify, agree, and only then give the files their names. Every rank calls this.

    Args:
        coordinator: where the ranks meet.
        find: what this rank gets; what it raises, all ranks raise.
        timeout_s: the most that either half may take.

    Raises:
        SafeCheckpointError: see ``restore_offloaded``.
    """
    staged: list[tuple[Path, Path]] = []
    locks: list[JobLock] = []
    copying, placing = "offloaded tensors copied", "offloaded tensors in place"

    def copy() -> None:
        with naming(rank=coordinator.rank, phase=copying):
            for part in find():
                durable.make_directory(part.target)
                _sweep(part.target)
                _refuse_in_the_way(part)
                folder = part.target / f"{_STAGED}{uuid.uuid4().hex}"
                folder.mkdir()
                staged.append((folder, part.target))
                locks.append(JobLock(folder, subject=part.target, lease_s=_LEASE_S, owner="restore_offloaded"))
                locks[-1].acquire()
                (folder / _FILES).mkdir()
                _copy(part, folder / _FILES)

    def place() -> None:
        with naming(rank=coordinator.rank, phase=placing):
            for folder, target in staged:
                _place(folder / _FILES, target)

    try:
        coordinator.agree(copying, timeout_s=timeout_s, local=copy)
        coordinator.agree(placing, timeout_s=timeout_s, local=place)
    finally:
        for lock in locks:
            lock.release()
        for folder, _ in staged:
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(target: Path) -> None:
    """Remove what a killed restore left here, of this host or another. Each has a lock of its own, by which its end is known.

    One without a lock was left before it had one, or is made at this moment, which takes no seconds. One whose holder cannot
    be asked stays until it has shown no sign of life for the lease: a later restore removes it.
    """
    being_made_until = time.monotonic() + _MAKING_S
    for left in list(target.glob(f"{_STAGED}*")):
        try:
            while read_lock(left) is None and time.monotonic() < being_made_until:
                time.sleep(_PAUSE_S)
            lock = JobLock(left, subject=target, lease_s=_LEASE_S, owner="restore_offloaded")
            lock.acquire(patience_s=0.0)
        except (OSError, DirectoryInUseError, DirectoryError) as error:
            logger.info("%s stays as it is: %s", left, error)
            continue
        shutil.rmtree(left, ignore_errors=True)
        lock.release()


def _refuse_in_the_way(part: Part) -> None:
    """Refuse targets that no file can replace, before any rank has replaced anything."""
    for entry in part.entries:
        file = inside(part.target, entry.path.removeprefix(part.prefix))
        if file.is_dir():
            raise DirectoryError(path=str(file), message="is a directory where a file goes", code=errno.EISDIR)
        for parent in file.parents:
            if parent == part.target:
                break
            if parent.exists() and not parent.is_dir():
                raise DirectoryError(path=str(parent), message="is a file where a directory goes", code=errno.ENOTDIR)


def _copy(part: Part, folder: Path) -> None:
    needed = sum(entry.size_bytes for entry in part.entries)
    why = "The files are verified before they replace what is there, so both must fit."
    durable.require_space(folder.parent, needed, why)
    copies = []
    for entry in part.entries:
        file = part.checkpoint / entry.path
        target = inside(folder, entry.path.removeprefix(part.prefix))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            stamp = Stamp.of(file.lstat())
        except FileNotFoundError:
            raise CorruptCheckpointError(path=str(part.checkpoint), file=entry.path, message="is missing") from None
        if file.is_symlink() or stamp.size_bytes != entry.size_bytes:
            message = f"is not a file of {entry.size_bytes} bytes"
            raise CorruptCheckpointError(path=str(part.checkpoint), file=entry.path, message=message)
        copies.append(FileCopy(source=str(file), path=str(target), stamp=stamp))
    try:
        results = copy_files(copies, WriteOptions.of(WriterConfig()), Unwatched())
    except OSError as error:
        why = "The disk filled up while this was restored; nothing was replaced."
        full = durable.out_of_space(error, folder, path=str(folder.parent), message=why, needed_bytes=needed)
        if full is None:
            raise
        raise full from error
    for entry, result in zip(part.entries, results, strict=True):
        if result.xxh3_128 != entry.xxh3_128:
            message = "its bytes are not those that were written"
            raise CorruptCheckpointError(path=str(part.checkpoint), file=entry.path, message=message)


def _place(folder: Path, target: Path) -> None:
    for top, _, names in os.walk(folder):
        into = target / Path(top).relative_to(folder)
        durable.make_directory(into)
        sync_directory(top)  # as in ``publish_link``
        for name in sorted(names):
            os.replace(Path(top, name), into / name)
        sync_directory(str(into))
