"""Fetching a checkpoint's files from an object store to a folder of this host: once per host, by all of its ranks together."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from safe_ckpt.core.formats.manifest import FileEntry
from safe_ckpt.core.storage.objects.place import ObjectPath
from safe_ckpt.core.storage.presence import opened
from safe_ckpt.errors import DirectoryError, IncompleteCheckpointError, NotEnoughSpaceError
from safe_ckpt.machine import kernel_id

logger = logging.getLogger(__name__)
_MEMORY = Path("/dev/shm")  # noqa: S108 - each folder there is private, see _make
_START = "safe_ckpt-fetch-"
_TRIES = 10
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Host:
    """The ranks that share one cache directory.

    Attributes:
        ranks: which.
        place: this rank's place among them.
    """

    ranks: tuple[int, ...]
    place: int


class HostCache:
    """A folder for one checkpoint, on every host; made at the first use.

    Args:
        base: where to make it; None for memory, where there is room, else the directory for temporary files.
        part_bytes: the size of one read.
        at_a_time: how many reads of one rank are under way at a time.
    """

    def __init__(self, base: str | None, *, part_bytes: int, at_a_time: int) -> None:
        self._given = Path(base) if base is not None else None
        self._part = part_bytes
        self._at_a_time = at_a_time
        self._base = Path()
        self._free_bytes = 0
        self._folder: Path | None = None
        self._alive: int = -1

    def host_id(self, needed_bytes: int) -> str:
        """Choose where the folder will be. Equal for ranks that would share it.

        Every rank calls this before any of them fetches: then all see the same room.

        Args:
            needed_bytes: how many bytes the checkpoint has.

        Raises:
            OSError: there is no such directory.
        """
        self.clear()
        self._base = self._chosen(needed_bytes)
        self._free_bytes = shutil.disk_usage(self._base).free
        status = self._base.stat()
        return f"{kernel_id()} {status.st_dev} {status.st_ino} {self._base}"

    def fetch(self, source: ObjectPath, entries: Sequence[FileEntry], token: str, host: Host) -> Path:
        """Fetch this rank's share of the files. They are complete when all ranks of the host have returned. Verifies nothing.

        Args:
            source: the checkpoint.
            entries: its files; the same on all ranks of the host.
            token: the same on all ranks, another one for each call.
            host: the ranks that share the folder, as ``host_id`` told them apart.

        Returns:
            The folder.

        Raises:
            IncompleteCheckpointError: a file is not there.
            NotEnoughSpaceError: they do not fit.
            OSError: the store gave no answer, or the disk refuses.
        """
        needed = sum(entry.size_bytes for entry in entries)
        if self._free_bytes < needed:
            message = "Set storage.cache_dir to a directory with more room."
            raise NotEnoughSpaceError(
                path=str(self._base), message=message, needed_bytes=needed, free_bytes=self._free_bytes
            )
        folder = self._base / f"{_START}{os.getuid()}-{token}"
        self._alive = _make(folder)
        self._folder = folder
        ranges = ranges_of(entries, self._part)
        fetch_ranges(source, folder, ranges[host.place :: len(host.ranks)], self._at_a_time, self._part)
        return folder

    def clear(self) -> None:
        """Delete the folder. Files that are mapped stay readable. Never raises."""
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1

    def _chosen(self, needed_bytes: int) -> Path:
        bases = [_MEMORY, Path(tempfile.gettempdir())]
        if self._given is not None:
            self._given.mkdir(parents=True, exist_ok=True)
            bases.insert(0, self._given)
        for base in bases:
            _sweep(base)
        if self._given is not None:
            return self._given
        with contextlib.suppress(OSError):
            if shutil.disk_usage(_MEMORY).free > 2 * needed_bytes + _SPARE_BYTES and os.access(_MEMORY, os.W_OK):
                return _MEMORY
        return bases[-1]


def hosts_of(answers: Mapping[int, str]) -> dict[str, list[int]]:
    """Which ranks share a directory, by what ``host_id`` returned on each."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(answers):
        groups.setdefault(answers[rank], []).append(rank)
    return groups


def host_of(rank: int, groups: Mapping[str, Sequence[int]]) -> Host:
    """The host of one rank."""
    ranks = next(tuple(group) for group in groups.values() if rank in group)
    return Host(ranks=ranks, place=ranks.index(rank))


def ranges_of(entries: Sequence[FileEntry], part_bytes: int) -> list[tuple[FileEntry, int]]:
    """The files in pieces: each file and where in it the piece begins."""
    return [
        (entry, start)
        for entry in sorted(entries, key=lambda one: one.path)
        for start in range(0, max(1, entry.size_bytes), part_bytes)
    ]


def fetch_ranges(
    source: ObjectPath, folder: Path, ranges: Sequence[tuple[FileEntry, int]], at_a_time: int, part_bytes: int
) -> None:
    """Read pieces of files, several at a time, and write them to their places below ``folder``. Verifies nothing.

    Raises:
        IncompleteCheckpointError: a file is not there.
        OSError: the store gave no answer, or the disk refuses.
    """
    stop = threading.Event()

    def go_on() -> None:
        if stop.is_set():
            raise InterruptedError(errno.EINTR, "interrupted")

    near = source.within(source.options.give_up_after_s, go_on)

    def one(work: tuple[FileEntry, int]) -> None:
        go_on()
        entry, start = work
        _fetch_range(near, folder, entry, start, min(part_bytes, entry.size_bytes - start))

    with ThreadPoolExecutor(at_a_time, thread_name_prefix="safe_ckpt-fetch") as pool:
        try:
            for _ in pool.map(one, ranges):
                pass
        except BaseException:
            stop.set()  # Ctrl-C, or the first error: every thread ends after the part that it reads
            raise


def _fetch_range(source: ObjectPath, folder: Path, entry: FileEntry, start: int, length: int) -> None:
    file, place = folder / entry.path, source / entry.path
    try:
        data = place.read_range(start, length)
    except FileNotFoundError:
        raise IncompleteCheckpointError(path=str(source), file=entry.path, message="is missing") from None
    file.parent.mkdir(parents=True, exist_ok=True)
    with opened(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600) as fd:
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], start + done)


def _make(folder: Path) -> int:
    """Make the folder, or find it made by another rank. Returns a descriptor that shows that it is in use."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # swept before it was seen to be in use
        fcntl.flock(fd, fcntl.LOCK_SH)
        status = os.fstat(fd)
        if status.st_uid != os.getuid():
            os.close(fd)
            raise DirectoryError(path=str(folder), message="somebody else has made it")
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(status, folder.lstat()):
                return fd
        os.close(fd)
    raise DirectoryError(path=str(folder), message="it vanishes as soon as it is made")


def _sweep(base: Path) -> None:
    """Delete what killed processes of this user fetched."""
    for folder in base.glob(f"{_START}{os.getuid()}-*"):
        with contextlib.suppress(OSError), opened(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while any process uses it
            logger.info("removing what an earlier job fetched: %s", folder)
            shutil.rmtree(folder, ignore_errors=True)
