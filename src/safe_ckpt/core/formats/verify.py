"""Reading every byte of a checkpoint and comparing it with what was written.

An ``OSError`` while reading does not make a checkpoint corrupt: it is raised as it is. Only differing bytes are corruption.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from safe_ckpt.core.formats.manifest import (
    MANIFEST_NAME,
    UNREADABLE,
    FileEntry,
    Manifest,
    archive_digest,
    open_archive,
    read_manifest,
)
from safe_ckpt.core.formats.zip_archive import COMMENT_BYTES
from safe_ckpt.core.storage import presence
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.reader import ReadProgress, digest_of
from safe_ckpt.core.storage.source import file_in, size_of
from safe_ckpt.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    SafeCheckpointError,
    UnsupportedFormatError,
)

UNEQUAL = "its bytes are not those that were written"


def verify_files(path: Path, manifest: Manifest, only: set[str] | None = None, *, cached: bool = False) -> int:
    """Read a checkpoint's bytes and compare them with what was written. Returns the number of bytes.

    Args:
        path: the directory or file.
        manifest: its manifest.
        only: of a directory, verify just these files.
        cached: through the page cache: what is verified is read once more in a moment.

    Raises:
        CorruptCheckpointError: they differ; names the file, or the archive's record.
        IncompleteCheckpointError: a file is not there; names it.
        OSError: they could not be read. They are not treated as corrupt.
    """
    if presence.is_file(path):
        return verify_archive(path, cached=cached)
    if not presence.is_directory(path):  # a file that vanished: nothing of it was read
        raise IncompleteCheckpointError(path=str(path), message="is missing")
    chosen = [entry for entry in manifest.files if only is None or entry.path in only]
    return sum(verify_entry(path, entry, cached=cached) for entry in chosen)


def is_marked(path: Path) -> bool:
    """Whether a checkpoint has bad numbers. False where it is not there, or not ours, or cannot be read."""
    try:
        return read_manifest(path).marked
    except (OSError, SafeCheckpointError):
        return False


def refuse_unreadable(path: Path) -> None:
    """Read the manifest of a single file, before it gets its name. Files of other formats have none.

    Raises:
        CorruptCheckpointError: no resume would take it.
        OSError: it could not be read.
    """
    with contextlib.suppress(UnsupportedFormatError):
        read_manifest(path)


def verify_share(path: Path, rank: int, size: int) -> None:
    """Verify this rank's share of a directory's files, so that each is read once by one rank.

    A directory without a manifest was written by another tool, and cannot be verified.

    Raises:
        CorruptCheckpointError: they differ; names the file.
        IncompleteCheckpointError: a file is not there; names it.
        OSError: they could not be read. They are not treated as corrupt.
    """
    if not presence.is_there(path / MANIFEST_NAME):
        return
    manifest = read_manifest(path)
    by_size = sorted(manifest.files, key=lambda entry: (-entry.size_bytes, entry.path))
    # Other ranks, or a framework, read these files right afterwards.
    verify_files(path, manifest, only={entry.path for entry in by_size[rank::size]}, cached=True)


def identity_of(file: Path) -> tuple[int, int] | None:
    """Return what is equal for two names of one file, and for no others; None where it is not there."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def verify_if_ours(path: Path) -> bool:
    """Verify a single file if it carries our manifest. Returns whether it did.

    Raises:
        CorruptCheckpointError: it is ours, and its bytes are not those that were written; or it is no readable archive.
    """
    try:
        manifest = read_manifest(path)
    except UnsupportedFormatError:
        return False
    verify_files(path, manifest, cached=True)  # a framework reads it right afterwards
    return True


def verify_entry(
    path: Place,
    entry: FileEntry,
    *,
    cached: bool | None = False,
    links: bool = False,
    progress: ReadProgress | None = None,
) -> int:
    """Read one file of a directory checkpoint and compare it. Returns its size.

    Args:
        path: the directory, or its folder in an object store.
        entry: the file, as the manifest has it.
        cached: see ``digest_of``.
        links: a symbolic link to the file will do.
        progress: called with what was read.

    Raises:
        CorruptCheckpointError: it differs.
        HostileCheckpointError: a link leads out of the checkpoint to it.
        IncompleteCheckpointError: it is not there.
        OSError: it could not be read; it is not treated as corrupt.
    """
    file = file_in(path, entry.path, links=links)
    try:
        size = size_of(file, links=links)
        if size < 0:
            raise CorruptCheckpointError(path=str(path), file=entry.path, message="not a regular file")
        if size != entry.size_bytes:
            message = f"has {size} bytes instead of {entry.size_bytes}"
            raise CorruptCheckpointError(path=str(path), file=entry.path, message=message)
        digest = digest_of(file, entry.size_bytes, cached=cached, progress=progress)
    except (FileNotFoundError, NotADirectoryError):
        raise IncompleteCheckpointError(path=str(path), file=entry.path, message="is missing") from None
    if digest != entry.xxh3_128:
        raise CorruptCheckpointError(path=str(path), file=entry.path, message=UNEQUAL)
    return entry.size_bytes


def verify_archive(path: Path, *, cached: bool | None = False, progress: ReadProgress | None = None) -> int:
    """Read a single-file checkpoint and compare it. Returns its size.

    Raises:
        CorruptCheckpointError: it differs; names the record of the archive where that is known.
    """
    expected = archive_digest(path)
    if expected is None:
        message = "it does not end as safe_ckpt ends a file: cut off, or altered"
        raise CorruptCheckpointError(path=str(path), message=message)
    size = path.stat().st_size
    if digest_of(path, size - COMMENT_BYTES, cached=cached, progress=progress) == expected:
        return size
    raise CorruptCheckpointError(path=str(path), file=_damaged_record(path), message=UNEQUAL)


def _damaged_record(path: Path) -> str:
    try:
        with open_archive(path) as archive:
            return archive.testzip() or ""
    except (OSError, *UNREADABLE):
        return ""
