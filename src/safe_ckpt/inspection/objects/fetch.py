"""A checkpoint of an object store as a directory of this machine: as a whole and verified, or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safe_ckpt.core.formats.manifest import MANIFEST_NAME, FileEntry
from safe_ckpt.core.formats.verify import verify_entry
from safe_ckpt.core.storage import durable
from safe_ckpt.core.storage.objects.place import ObjectPath
from safe_ckpt.core.storage.presence import opened
from safe_ckpt.errors import ConfigError, CorruptCheckpointError, IncompleteCheckpointError
from safe_ckpt.inspection.files import inside
from safe_ckpt.inspection.objects.check import read_committed
from safe_ckpt.inspection.objects.reach import is_checkpoint

_START = ".safe_ckpt-fetch-"


def fetch(source: ObjectPath, directory: Path) -> Path:
    """Fetch a checkpoint to ``directory/<name>``. It gets that name when it is complete, verified and durable.

    Args:
        source: the checkpoint.
        directory: made when it is missing.

    Returns:
        Where it is.

    Raises:
        ConfigError: something has that name already.
        CorruptCheckpointError: its bytes are not those that were written.
        IncompleteCheckpointError: an object is missing.
        UnsupportedFormatError: it is not ours, or was never committed.
        NotEnoughSpaceError: it does not fit.
        OSError: the store gave no answer, the disk refuses, or the checkpoint was deleted meanwhile.
    """
    manifest, data = read_committed(source)
    final = inside(directory, manifest.name)
    _refuse_existing(final)
    durable.make_directory(directory)
    needed = sum(entry.size_bytes for entry in manifest.files)
    durable.require_space(directory, needed, f"{source} does not fit there")
    with tempfile.TemporaryDirectory(dir=directory, prefix=_START) as scratch:
        staged = Path(scratch) / "checkpoint"
        staged.mkdir()
        try:
            _read(source, manifest.files, staged)
            for entry in manifest.files:
                _verify(source, entry, staged)
        except IncompleteCheckpointError:
            if is_checkpoint(source):
                raise
            raise FileNotFoundError(errno.ENOENT, "was deleted meanwhile", str(source)) from None
        (staged / MANIFEST_NAME).write_bytes(data)
        _sync(staged)
        _refuse_existing(final)
        os.rename(staged, final)
    durable.sync_directory(str(directory))
    return final


def _read(source: ObjectPath, entries: Sequence[FileEntry], folder: Path) -> None:
    options, stop = source.bucket.options, threading.Event()

    def go_on() -> None:
        if stop.is_set():
            raise InterruptedError(errno.EINTR, "interrupted")

    near = ObjectPath(source.bucket.within(options.give_up_after_s, go_on), source.key)

    def one(work: tuple[FileEntry, int]) -> None:
        go_on()
        entry, start = work
        _read_range(near, folder, entry, start, min(options.part_bytes, entry.size_bytes - start))

    ranges = [(entry, at) for entry in entries for at in range(0, max(1, entry.size_bytes), options.part_bytes)]
    with ThreadPoolExecutor(2 * options.parts_in_flight, thread_name_prefix="safe_ckpt-fetch") as pool:
        try:
            for _ in pool.map(one, ranges):
                pass
        except BaseException:
            stop.set()  # Ctrl-C, or the first error: every thread ends after the part that it reads
            raise


def _read_range(source: ObjectPath, folder: Path, entry: FileEntry, start: int, length: int) -> None:
    file, place = inside(folder, entry.path), source / entry.path
    try:
        data = place.bucket.read_range(place.key, start, length)
    except FileNotFoundError:
        raise IncompleteCheckpointError(path=str(source), file=entry.path, message="is missing") from None
    file.parent.mkdir(parents=True, exist_ok=True)
    with opened(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW) as fd:
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], start + done)


def _verify(source: ObjectPath, entry: FileEntry, folder: Path) -> None:
    for again in (True, False):
        try:
            verify_entry(folder, entry, cached=True)
        except CorruptCheckpointError as error:
            if not again:
                raise CorruptCheckpointError(path=str(source), file=entry.path, message=error.message) from None
            (folder / entry.path).unlink(missing_ok=True)
            _read(source, [entry], folder)  # it may have suffered on its way
        else:
            return


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            durable.sync_directory(str(path))
        else:
            durable.sync_file(path)


def _refuse_existing(path: Path) -> None:
    if os.path.lexists(path):
        raise ConfigError(
            key=str(path), message="is there already, and fetching replaces nothing: give another directory"
        )
