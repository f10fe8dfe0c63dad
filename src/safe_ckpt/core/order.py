"""The place in the order of commits of a file that is saved past a running pipeline.

Nothing is listed for it: what a directory's jobs committed is in the record that lies in its hidden folder, and such a file is
noted down there, too. A directory that no job ever held has no record, and there the clock tells which file is newer.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from safe_ckpt import events
from safe_ckpt.core.lease import LOCK_NAME
from safe_ckpt.core.manifest import CheckpointInfo, read_manifest
from safe_ckpt.core.root import EVENTS, HIDDEN
from safe_ckpt.errors import SafeCheckpointError

_TAIL_BYTES = 1 << 18
_COMMITTED = b'"committed"'
_MOST = 1 << 53
_given: dict[Path, int] = {}


def sequence_beside(path: Path, after: int = 0) -> int:
    """A number for a file that is saved outside of a running pipeline: above that of every file it may compete with.

    Args:
        path: the file.
        after: the last number that is known to be given out there.
    """
    root = _held(path) or path.parent
    last = max(after, _given.get(root, 0))
    recorded = _last_recorded(root / HIDDEN)
    if recorded is not None:
        last = max(last, recorded)
    elif _is_there(root / HIDDEN / LOCK_NAME):
        # A job lives, or was killed, that keeps no record: its files must be told from this one, and go on to be.
        last = max(last, *(_sequence_in(folder, path.suffix) for folder in {root, path.parent}))
    else:
        last = max(last, int(time.time() * 1000))
    _given[root] = last + 1
    return last + 1


def last_beside(path: Path) -> int:
    """The last number that is recorded where ``path`` is to be saved by the pipeline of another directory; 0 for none."""
    root = _held(path)
    return (_last_recorded(root / HIDDEN) or 0) if root is not None else 0


def note(info: CheckpointInfo) -> None:
    """Tell those who come later, if there is a record, that this was committed. Never raises."""
    root = _held(info.path)
    if root is None:
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
    with contextlib.suppress(OSError):
        file = os.open(root / HIDDEN / EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(file, json.dumps(event.facts()).encode() + b"\n")
        finally:
            os.close(file)


def _held(path: Path) -> Path | None:
    """The nearest folder above that a job holds, or held: what lies in it may be resumed from there."""
    for folder in path.parents:
        if any(_is_there(folder / HIDDEN / name) for name in (EVENTS, LOCK_NAME)):
            return folder
    return None


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except OSError:  # what cannot be looked at belongs to nobody who could resume from this file
        return False
    return True


def _last_recorded(hidden: Path) -> int | None:
    """The highest number among the last commits that are recorded; None when none are."""
    for name in (EVENTS, f"{EVENTS}.1"):
        with contextlib.suppress(OSError):
            file = os.open(hidden / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                tail = os.pread(file, _TAIL_BYTES, max(0, os.fstat(file).st_size - _TAIL_BYTES))
            finally:
                os.close(file)
            if (found := max(_sequences(tail), default=None)) is not None:
                return found
    return None


def _sequences(tail: bytes) -> Iterator[int]:
    for line in tail.splitlines():
        if _COMMITTED in line:
            with contextlib.suppress(ValueError, RecursionError):  # the first one may be cut off
                said = json.loads(line)
                number = said.get("sequence") if isinstance(said, dict) else None
                if type(number) is int and 0 <= number < _MOST:
                    yield number


def _sequence_in(folder: Path, suffix: str) -> int:
    found = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.endswith(suffix):
                with contextlib.suppress(OSError, SafeCheckpointError):
                    found = max(found, read_manifest(folder / name).sequence)
    return found
