"""Bringing a checkpoint from an object store into a directory that is held: fetched, verified, durable, then published."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safe_ckpt.core.directory.workspace import Workspace
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, CheckpointInfo, FileEntry, Manifest
from safe_ckpt.core.formats.verify import verify
from safe_ckpt.core.storage import durable
from safe_ckpt.core.storage.objects.place import ObjectPath
from safe_ckpt.core.transfer.host_cache import fetch_ranges, ranges_of
from safe_ckpt.errors import CorruptCheckpointError

MIRRORED = "mirrored"
"""The entry of a mirrored manifest's notes: where the checkpoint was, and whether it is a single file."""


def mirrored(manifest: Manifest, name: str, files: Sequence[FileEntry], *, single: bool) -> Manifest:
    """The manifest of a checkpoint for the mirror.

    Args:
        manifest: its own.
        name: its path, relative to the directory of checkpoints.
        files: what is uploaded.
        single: it is a file, and has its own manifest inside.
    """
    notes = {**manifest.notes, MIRRORED: {"name": name, "single": single}}
    return dataclasses.replace(manifest, notes=notes, files=tuple(files))


def name_of(manifest: Manifest) -> str:
    """The path of a mirrored checkpoint below its directory, as the manifest says."""
    facts = manifest.notes.get(MIRRORED)
    return str(facts.get("name", "")) if isinstance(facts, Mapping) else ""


def origin(manifest: Manifest, path: ObjectPath) -> tuple[str, bool]:
    """Where a mirrored checkpoint was, relative to its directory, and whether it was a single file.

    Raises:
        CorruptCheckpointError: its name leads elsewhere.
    """
    facts: Any = manifest.notes.get(MIRRORED, {})
    facts = facts if isinstance(facts, Mapping) else {}
    name = str(facts.get("name", manifest.name))
    parts = Path(name).parts
    if not parts or name.startswith("/") or "\0" in name or any(part in ("..", ".") for part in parts):
        message = f"its name leads out of the directory: {name[:100]!r}"
        raise CorruptCheckpointError(path=str(path), file=MANIFEST_NAME, message=message)
    return name, bool(facts.get("single"))


def own_manifest(manifest: Manifest) -> Manifest:
    """What ``mirrored`` was given, but for the files."""
    return dataclasses.replace(manifest, notes={k: v for k, v in manifest.notes.items() if k != MIRRORED})


def fetch_into(
    workspace: Workspace, source: ObjectPath, manifest: Manifest, *, at_a_time: int, part_bytes: int
) -> CheckpointInfo:
    """Fetch a checkpoint to its place below a directory that this job holds. On rank 0.

    Args:
        workspace: the directory. What stands at that place is quarantined.
        source: the folder in the store.
        manifest: its manifest.
        at_a_time: how many reads are under way at a time.
        part_bytes: the size of one read.

    Raises:
        CorruptCheckpointError: bytes are not those that were written.
        IncompleteCheckpointError: an object is not there.
        NotEnoughSpaceError: it does not fit.
        OSError: the store gave no answer, or the disk refuses.
    """
    name, single = origin(manifest, source)
    size = sum(entry.size_bytes for entry in manifest.files)
    durable.require_space(workspace.path, size, "It is fetched from the mirror.")
    op_id = uuid.uuid4().hex
    folder = workspace.make_pending(op_id)
    try:
        staged = folder / Path(name).name
        into = folder if single else staged
        into.mkdir(exist_ok=True)
        fetch_ranges(source, into, ranges_of(manifest.files, part_bytes), at_a_time, part_bytes)
        own = own_manifest(manifest)
        verify(into, manifest, cached=True)
        if not single:
            (staged / MANIFEST_NAME).write_bytes(own.to_bytes())
        _make_durable(folder)
        final = workspace.path / name
        if os.path.lexists(final):
            workspace.quarantine(final)
        durable.make_directory(final.parent)
        aside = workspace.aside(op_id, final)
        workspace.confirm()
        durable.publish(staged, final, lambda: aside)
    finally:
        workspace.drop_pending(op_id)
    return CheckpointInfo.of(own, final, size)


def _make_durable(folder: Path) -> None:
    for where, _, names in os.walk(folder):
        for name in names:
            durable.sync_file(Path(where, name))
        durable.sync_directory(where)
