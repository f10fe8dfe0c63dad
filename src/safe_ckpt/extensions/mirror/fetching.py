"""Bringing a checkpoint from the mirror into a directory that is held: fetched, verified, durable, then published."""

from __future__ import annotations

import dataclasses
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from safe_ckpt.config import Timeouts, WriterConfig
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, CheckpointInfo, FileEntry, Manifest, read_manifest
from safe_ckpt.core.formats.verify import verify_entry
from safe_ckpt.core.home.home import HIDDEN, HIDDEN_TOO, Home, NewCheckpoint
from safe_ckpt.core.resuming.host_cache import fetch_ranges, ranges_of
from safe_ckpt.core.staging.worker_thread import bounded
from safe_ckpt.core.storage import durable
from safe_ckpt.core.storage.copier import FileCopy, copy_files
from safe_ckpt.core.storage.direct_io import Unwatched, WriteOptions
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.core.storage.objects.second_look import look_thrice
from safe_ckpt.core.storage.presence import Stamp, checked_name, really_inside
from safe_ckpt.core.storage.source import by_storage, in_files, size_of
from safe_ckpt.errors import (
    CorruptCheckpointError,
    HostileCheckpointError,
    IncompleteCheckpointError,
    SafeCheckpointError,
)

logger = logging.getLogger(__name__)
MIRRORED = "mirrored"
"""The entry of a mirrored manifest's notes: where the checkpoint was, its own name, and whether it is a single file."""
_READS = 3  # one wrong answer of either file system is not enough
_PLAIN = "=+,@:!~ ()[]"  # besides letters, digits and "_.-"


def mirrored(manifest: Manifest, path: Path, home: Home, *, single: bool) -> Manifest:
    """The manifest of a checkpoint for the mirror.

    Args:
        manifest: its own.
        path: the checkpoint.
        home: the directory that it is in.
        single: it is a file, and has its own manifest inside.
    """
    facts = {
        "name": home.name_of(path),
        "single": single,
        "own_name": manifest.name,
        "path": str(path),
    }
    notes = {**manifest.notes, MIRRORED: facts}
    return dataclasses.replace(manifest, name=mirrored_name(path, home), notes=notes)


def mirrored_name(path: Path, home: Home) -> str:
    """The name of a checkpoint in the mirror. A later checkpoint with the same name replaces it.

    Relative to its directory; one that the user named himself, relative to where the job was started.
    """
    relative = os.path.relpath(path) if home.is_single_name else home.name_of(path)
    return quote(relative, safe=_PLAIN)


def is_copy_of(manifest: Manifest, path: Path, home: Home) -> bool:
    """Whether a mirrored checkpoint is what ``path`` names: on this machine, or relative to where the job was started."""
    facts = _facts(manifest)
    same_path = home.is_single_name and facts.get("path") == str(path)
    return same_path or (bool(facts) and manifest.name == mirrored_name(path, home))


def _facts(manifest: Manifest) -> Mapping[str, Any]:
    facts = manifest.notes.get(MIRRORED)
    return facts if isinstance(facts, Mapping) else {}


def directory_of(manifest: Manifest) -> str:
    """The last part of the directory from which a checkpoint was mirrored; "" where the manifest does not say."""
    facts = _facts(manifest)
    path, name = str(facts.get("path", "")), str(facts.get("name", ""))
    return Path(path.removesuffix(name)).name if path and name else ""


def origin(manifest: Manifest, path: Place) -> tuple[str, bool]:
    """The place of a mirrored checkpoint, relative to its directory, and whether it was a single file.

    Raises:
        HostileCheckpointError: its name leads elsewhere.
    """
    facts = _facts(manifest)
    name = checked_name(facts.get("name", manifest.name), path, MANIFEST_NAME)
    if not {HIDDEN, HIDDEN_TOO, "."}.isdisjoint(name.split("/")):
        message = f"its name is none of a checkpoint: {name!r:.200}"
        raise HostileCheckpointError(path=str(path), file=MANIFEST_NAME, message=message)
    return name, bool(facts.get("single"))


def own_manifest(manifest: Manifest) -> Manifest:
    """The manifest that ``mirrored`` was given, but for its files."""
    name = str(_facts(manifest).get("own_name", manifest.name))
    return dataclasses.replace(manifest, name=name, notes={k: v for k, v in manifest.notes.items() if k != MIRRORED})


def fetch_into(home: Home, source: Place, manifest: Manifest, *, timeouts: Timeouts) -> CheckpointInfo:
    """Fetch a checkpoint to its place below a directory that this job holds. On rank 0.

    Args:
        home: the directory. An older checkpoint at that place is replaced; anything else is quarantined.
        source: the folder in the mirror.
        manifest: its manifest.
        timeouts: how long to wait until what was fetched is seen.

    Raises:
        CorruptCheckpointError: bytes are not those that were written.
        IncompleteCheckpointError: an object is not there.
        NotEnoughSpaceError: it does not fit.
        OSError: the store gave no answer, or the disk refuses.
    """
    name, single = origin(manifest, source)
    final, own = really_inside(in_files(home.path), name), own_manifest(manifest)
    new = NewCheckpoint(
        path=final,
        manifest=own,
        op_id=uuid.uuid4().hex,
        kind="file" if single else "directory",
        needed_bytes=sum(entry.size_bytes for entry in manifest.files),
    )
    publication = home.begin(new, timeouts)
    try:
        publication.prepare()
        folder = in_files(publication.folder)
        here = home.fetch_elsewhere(publication, manifest, source)
        fetch_verified(source, here, folder, limit_s=timeouts.lengthy_s)
        make_durable(folder)
        if os.path.lexists(final) and not _is_older(final, own):
            home.quarantine(final)
        info = publication.commit(manifest.files, {}, lambda: None)
    except BaseException as error:
        if not isinstance(error, durable.HalfCommittedError):  # as in a save: what it replaced is not deleted
            publication.abort()
        raise
    publication.clean_up()
    return info


def fetch_verified(source: Place, entries: Sequence[FileEntry], into: Path, *, limit_s: float) -> None:
    """Fetch files and compare them. What is not there, or differs, is fetched once more: it may have suffered on its way.

    Args:
        source: the folder in the store, or another one.
        entries: the files.
        into: where they go.
        limit_s: how long a file system may take. A store has its own deadline.

    Raises:
        CorruptCheckpointError: bytes are not those that were written.
        IncompleteCheckpointError: an object is not there.
        OSError: the store gave no answer, or the disk refuses.
    """
    by_storage(
        source,
        lambda folder: bounded(lambda: _copy_verified(folder, entries, into), limit_s),
        lambda folder: _download_verified(folder, entries, into),
    )


def _download_verified(source: ObjectPath, entries: Sequence[FileEntry], into: Path) -> None:
    options = source.options

    def read(place: ObjectPath, some: Sequence[FileEntry]) -> None:
        ranges = ranges_of(some, options.part_bytes)
        fetch_ranges(place, into, ranges, 2 * options.parts_in_flight, options.part_bytes)

    def verified(place: ObjectPath, entry: FileEntry) -> None:
        if place is not source:
            (into / entry.path).unlink(missing_ok=True)
            read(place, [entry])
        try:
            verify_entry(into, entry, cached=True)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(path=str(source), file=entry.path, message=error.message) from None

    look_thrice(source, lambda place: read(place, entries))
    for entry in entries:
        look_thrice(source, partial(verified, entry=entry))


def _copy_verified(source: Path, entries: Sequence[FileEntry], into: Path) -> None:
    """Copy files of another file system, and compare what was read. What differs is read once more."""
    for entry in entries:
        (into / entry.path).parent.mkdir(parents=True, exist_ok=True)
    wanted = list(entries)
    for attempt in range(_READS):
        copies = [_copy_of(source, entry, into) for entry in wanted]
        found = copy_files(copies, WriteOptions.of(WriterConfig()), Unwatched())
        differs = [
            entry
            for entry, copy in zip(wanted, found, strict=True)
            if (copy.size_bytes, copy.xxh3_128) != (entry.size_bytes, entry.xxh3_128)
        ]
        if not differs:
            return
        if attempt + 1 < _READS:
            logger.warning(
                "%s: reading %s once more: its bytes are not those that were written", source, differs[0].path
            )
        wanted = differs
        for entry in wanted:
            (into / entry.path).unlink()
    raise CorruptCheckpointError(
        path=str(source), file=wanted[0].path, message="its bytes are not those that were written"
    )


def _copy_of(source: Path, entry: FileEntry, into: Path) -> FileCopy:
    file = really_inside(source, entry.path)
    try:
        if size_of(file, links=False) < 0:
            raise CorruptCheckpointError(path=str(source), file=entry.path, message="not a regular file")
        stamp = Stamp.of(os.stat(file))
    except FileNotFoundError:
        raise IncompleteCheckpointError(path=str(source), file=entry.path, message="is missing") from None
    return FileCopy(source=str(file), path=str(into / entry.path), stamp=stamp)


def _is_older(path: Path, new: Manifest) -> bool:
    """Whether a checkpoint of ours stands there that the new one replaces. If it is this very one, it is damaged."""
    try:
        return read_manifest(path).sequence < new.sequence
    except (OSError, SafeCheckpointError):
        return False


def make_durable(folder: Path) -> None:
    """Have everything in a folder reach the disk, the folder included."""
    for where, _, names in os.walk(folder):
        for name in names:
            durable.sync_file(Path(where, name))
        durable.sync_directory(where)
