"""A checkpoint of an object store, or of a mirror, as a directory of this machine: as a whole and verified, or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from safe_ckpt.config import Timeouts
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, Manifest, read_manifest
from safe_ckpt.core.home.places import is_one
from safe_ckpt.core.storage import durable
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.source import by_storage
from safe_ckpt.errors import ConfigError, IncompleteCheckpointError
from safe_ckpt.extensions.mirror.fetching import MIRRORED, fetch_verified, make_durable, origin, own_manifest
from safe_ckpt.tools.inspection.check import read_committed
from safe_ckpt.tools.inspection.files import path_inside

_START = ".safe_ckpt-fetch-"


def fetch(source: Place, directory: Path) -> Path:
    """Fetch a checkpoint to ``directory/<name>``. It gets that name when it is complete, verified and durable.

    One that was mirrored has the name that it had in its directory; a single file becomes one again.

    Args:
        source: the checkpoint.
        directory: made when it is missing.

    Returns:
        Where it is.

    Raises:
        ConfigError: something has that name already; or it lies in a directory that is no mirror.
        CorruptCheckpointError: its bytes are not those that were written.
        IncompleteCheckpointError: an object is missing.
        UnsupportedFormatError: it is not ours, or was never committed.
        NotEnoughSpaceError: it does not fit.
        OSError: the store gave no answer, the disk refuses, or the checkpoint was deleted meanwhile.
    """
    manifest, data = by_storage(source, lambda path: (_copy_at(path), b""), read_committed)
    name, single = origin(manifest, source)
    final = path_inside(directory, Path(name).name)
    _refuse_existing(final)
    durable.make_directory(directory)
    needed = sum(entry.size_bytes for entry in manifest.files)
    durable.require_space(directory, needed, f"{source} does not fit there")
    with tempfile.TemporaryDirectory(dir=directory, prefix=_START) as scratch:
        folder = Path(scratch) / "checkpoint"
        folder.mkdir()
        try:
            fetch_verified(source, manifest.files, folder, limit_s=Timeouts().lengthy_s)
        except IncompleteCheckpointError:
            if is_one(source):
                raise
            raise FileNotFoundError(errno.ENOENT, "was deleted meanwhile", str(source)) from None
        if not single:
            own = own_manifest(manifest).to_bytes() if MIRRORED in manifest.notes else data
            (folder / MANIFEST_NAME).write_bytes(own)
        make_durable(folder)
        _refuse_existing(final)
        os.rename(folder / final.name if single else folder, final)
    durable.sync_directory(str(directory))
    return final


def _copy_at(path: Path) -> Manifest:
    manifest = read_manifest(path)
    if MIRRORED in manifest.notes:
        return manifest
    message = "is for an address such as s3://bucket/run, or for a mirror: this is a directory of checkpoints itself"
    raise ConfigError(key="--fetch", message=message)


def _refuse_existing(path: Path) -> None:
    if os.path.lexists(path):
        raise ConfigError(
            key=str(path), message="is there already, and fetching replaces nothing: give another directory"
        )
