"""A file, or a part of one, read at offsets: only regular files, and none outside that a symbolic link points to."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self

from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, MOST_BYTES, json_of
from safe_ckpt.core.storage import presence
from safe_ckpt.core.storage.objects.options import StorageOptions, is_url
from safe_ckpt.core.storage.objects.place import ObjectPath, Place, open_place
from safe_ckpt.errors import CorruptCheckpointError, HostileCheckpointError, UnsupportedFormatError

_FIRST_ANSWER_S = 10.0
MOST_FILES = 200_000
"""No checkpoint has more files than this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFile:
    """A file of a checkpoint.

    Attributes:
        path: where it is.
        name: relative to the checkpoint, with forward slashes; of a checkpoint that is one file, its name.
        size_bytes: its size.
    """

    path: Path
    name: str
    size_bytes: int


class Window:
    """A file, or a part of one, that is read at offsets. It has no position: threads may share it.

    Attributes:
        path: the file.
        start: where the window begins in the file.
        size: its bytes.
    """

    def __init__(self, path: Path, whole: Window | None = None, start: int = 0, size: int = 0) -> None:
        self.path, self.start, self.size = path, start, size
        if whole is not None:  # which closes it
            self._fd: int = whole._fd
            return
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            raise HostileCheckpointError(path=str(path), message="is not a regular file")
        self.size = status.st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def damaged(self, why: str) -> CorruptCheckpointError:
        """The error for a file that contradicts itself."""
        return CorruptCheckpointError(path=str(self.path), message=why)

    def refused(self, why: str) -> HostileCheckpointError:
        """The error for a file that no tool writes."""
        return HostileCheckpointError(path=str(self.path), message=why)

    def part(self, start: int, size: int) -> Window:
        """A window into this one, with offsets of its own. Valid as long as this one is open.

        Raises:
            CorruptCheckpointError: it reaches behind the end.
        """
        self._admit(start, size)
        return Window(self.path, self, self.start + start, size)

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes at ``offset``.

        Raises:
            CorruptCheckpointError: the window, or the file, ends before.
            OSError: they could not be read.
        """
        self._admit(offset, size)
        pieces, at = [], self.start + offset
        while size:
            piece = os.pread(self._fd, size, at)
            if not piece:
                raise self.damaged("is cut off")
            pieces.append(piece)
            at += len(piece)
            size -= len(piece)
        return b"".join(pieces)

    def _admit(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise self.damaged("is cut off, or an offset in it is wrong")


def walk(path: Path, *, follow_symlinks: bool = False) -> list[CheckpointFile]:
    """The files of a checkpoint, by name. Hidden folders of ours are not part of it.

    Args:
        path: a file or directory.
        follow_symlinks: read what links lead to, even outside of ``path``, as the cache of a model hub has them.

    Raises:
        HostileCheckpointError: something in it is no regular file, a link leads out, or there are too many files.
        OSError: it could not be listed.
    """
    if not path.is_dir():
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise HostileCheckpointError(path=str(path), message="is not a regular file")
        return [CheckpointFile(path=path, name=path.name, size_bytes=status.st_size)]
    home = path.resolve()
    files: list[CheckpointFile] = []
    folders = [path]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                place = Path(entry.path)
                name = place.relative_to(path).as_posix()
                if entry.is_symlink() and not follow_symlinks and not _lies_in(place, home):
                    message = "is a link that leads out of the checkpoint; --follow-symlinks reads it"
                    raise HostileCheckpointError(path=str(path), file=name, message=message)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(place)
                elif entry.is_file():
                    files.append(CheckpointFile(path=place, name=name, size_bytes=entry.stat().st_size))
                elif not entry.is_dir():  # a link to a folder inside is met there
                    raise HostileCheckpointError(path=str(path), file=name, message="is not a regular file")
                if len(files) + len(folders) > MOST_FILES:
                    message = f"has more than {MOST_FILES} files: this is no checkpoint"
                    raise HostileCheckpointError(path=str(path), message=message)
    return sorted(files, key=lambda file: file.name)


def read_json(file: CheckpointFile) -> Any:
    """A JSON file.

    Raises:
        UnsupportedFormatError: it is larger than any that belongs to a checkpoint.
        CorruptCheckpointError: it is no JSON.
        OSError: it could not be read.
    """
    if file.size_bytes > MOST_BYTES:
        raise UnsupportedFormatError(path=str(file.path), message="is too large to be read")
    with Window(file.path) as window:
        text = window.read(0, window.size)
        try:
            return json_of(text)
        except ValueError as error:
            raise window.damaged(f"is no JSON: {error}") from error


def _lies_in(place: Path, home: Path) -> bool:
    try:
        return place.resolve(strict=True).is_relative_to(home)
    except (OSError, RuntimeError):  # to nowhere, or in a circle
        return False


def path_inside(folder: Path, name: str) -> Path:
    """The path of ``name`` in a folder, for a name that was read from a file.

    Raises:
        HostileCheckpointError: it leads out.
    """
    path = presence.inside(folder, name)
    raw = name.encode("utf-8", "surrogatepass")
    if any("\ud800" <= mark <= "\udfff" for mark in name) or len(raw) > 4000 or max(map(len, raw.split(b"/"))) > 255:
        message = f"a file name in it is not possible: {name[:200]!r}"
        raise HostileCheckpointError(path=str(folder), message=message)
    return path


def place_at(url: str, config: CheckpointConfig | None = None, *, within_s: float | None = None) -> ObjectPath:
    """The place that ``url`` names, reached as the environment says.

    Args:
        url: such as ``s3://bucket/run``.
        config: the settings; None for those of the environment.
        within_s: how long a request may be tried again; None for ``barrier_s``.

    Raises:
        ConfigError: it is no address, the settings are not allowed, or the client is not installed.
    """
    config = config or CheckpointConfig.from_environment()
    deadline = config.timeouts.barrier_s if within_s is None else within_s
    return open_place(url, StorageOptions.of(config.storage, deadline))


def place_given(path: str) -> Place:
    """The place that a user names: in a bucket if it is an address of one, else a path.

    A store gets one request at once, so that a wrong endpoint is found in some seconds.

    Raises:
        ConfigError: as ``place_at``.
        OSError: the store gave no first answer within some seconds.
    """
    if not is_url(path):
        return Path(path)
    place = place_at(path)
    _await_answer(place)
    return place


def _await_answer(place: ObjectPath) -> None:
    first_s = min(_FIRST_ANSWER_S, place.options.give_up_after_s)
    try:
        place.bucket.hurried(first_s).within(first_s).size_of((place / MANIFEST_NAME).key)
    except (FileNotFoundError, PermissionError):
        return  # an answer: what it means is for the request that is meant
