"""The place in the order of commits of a file that is saved outside of an engine.

Nothing is listed for it. All numbers are at least the clock's, see ``workspace.sequence_after``, so that jobs that do not know
of each other have comparable numbers. The commits of a directory's jobs are in the record in its hidden folder. Such a
file is recorded there too, so that a clock that goes back does not change the order.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from safe_ckpt import events
from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.core.home.home import EVENTS, HIDDEN, sequence_after
from safe_ckpt.core.storage.presence import opened

_TAIL_BYTES = 1 << 18
_COMMITTED = b'"committed"'
_MOST = 1 << 53
_RECORDS = (EVENTS, f"{EVENTS}.1")
_given: dict[Path, int] = {}


def sequence_beside(path: Path, after: int = 0) -> int:
    """A number for a file that is saved outside of a running pipeline: above that of every file it may compete with.

    Args:
        path: the file.
        after: the last number that is known to be given out there.
    """
    workspace = _recorded(path) or path.parent
    _given[workspace] = sequence_after(max(after, _known(workspace)))
    return _given[workspace]


def last_beside(path: Path) -> int:
    """The last number that is known where ``path`` is to be saved by the pipeline of another directory; 0 for none."""
    return _known(_recorded(path) or path.parent)


def note(info: CheckpointInfo) -> None:
    """Record that this was committed, if there is a record. Never raises."""
    workspace = _recorded(info.file_path)
    if workspace is None:
        return
    event = events.Committed(
        rank=0,
        name=info.name,
        step=info.step,
        path=str(info.path),
        sequence=info.sequence,
        size_bytes=info.size_bytes,
        seconds=0.0,
    )
    with contextlib.suppress(OSError), _opened(workspace / HIDDEN, EVENTS, os.O_WRONLY | os.O_APPEND) as file:
        os.write(file, json.dumps(event.facts()).encode() + b"\n")


def _recorded(path: Path) -> Path | None:
    """The nearest folder above with a record: what lies in it may be resumed from there."""
    for folder in path.parents:
        if _is_everybodys(folder):
            return None
        if any(_is_there(folder / HIDDEN / name) for name in _RECORDS):
            return folder
    return None


def _is_everybodys(folder: Path) -> bool:
    """Whether every user may write to it, as to ``/tmp``: a record there may be another user's."""
    try:
        return folder.stat().st_mode & (stat.S_ISVTX | stat.S_IWOTH) == stat.S_ISVTX | stat.S_IWOTH
    except OSError:
        return False


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except OSError:  # a job that could resume from this file could look at it
        return False
    return True


@contextlib.contextmanager
def _opened(hidden: Path, name: str, flags: int) -> Iterator[int]:
    # Another user may have put a link to another file there, or a pipe, which would block for ever.
    safely = os.O_NOFOLLOW | os.O_NONBLOCK
    with (
        opened(hidden, os.O_RDONLY | os.O_DIRECTORY | safely) as folder,
        opened(name, flags | safely, dir_fd=folder) as file,
    ):
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or (flags & os.O_WRONLY and status.st_nlink > 1):
            raise OSError(f"{hidden / name} is not a regular file with one name")
        yield file


def _known(workspace: Path) -> int:
    """The highest number among those that this process gave out and the last commits that are recorded."""
    for name in _RECORDS:
        with contextlib.suppress(OSError), _opened(workspace / HIDDEN, name, os.O_RDONLY) as file:
            tail = os.pread(file, _TAIL_BYTES, max(0, os.fstat(file).st_size - _TAIL_BYTES))
            if (sequence := max(_sequences(tail), default=None)) is not None:
                return max(sequence, _given.get(workspace, 0))
    return _given.get(workspace, 0)


def _sequences(tail: bytes) -> Iterator[int]:
    for line in tail.splitlines():
        if _COMMITTED in line:
            with contextlib.suppress(ValueError, RecursionError):  # the first one may be cut off
                said = json.loads(line)
                number = said.get("sequence") if isinstance(said, dict) else None
                if type(number) is int and 0 <= number < _MOST:
                    yield number
