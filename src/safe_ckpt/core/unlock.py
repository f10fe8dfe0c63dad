"""For people in a hurry: who holds a directory, and taking its lock away."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from safe_ckpt.core.lock import HOLDER_NAME, LOCK_NAME, JobLock, read_holder
from safe_ckpt.core.root import HIDDEN
from safe_ckpt.errors import DirectoryInUseError


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a directory.

    Attributes:
        host: where.
        pid: which process there.
        started_at: since when, ISO 8601.
    """

    host: str
    pid: int
    started_at: str


def holder(directory: Path, hidden: Path | None = None) -> Holder | None:
    """Who holds ``directory``; None when nobody does. Says nothing about whether that job still lives.

    Args:
        directory: which one.
        hidden: the hidden folder, if it does not lie in it under its usual name.
    """
    hidden = hidden or directory / HIDDEN
    if not (hidden / LOCK_NAME).is_file():
        return None
    error: DirectoryInUseError = JobLock(hidden, subject=directory, lease_s=60.0).in_use("it is held")
    return Holder(host=error.host, pid=error.pid, started_at=error.started_at)


def break_lock(directory: Path, hidden: Path | None = None) -> None:
    """Take the lock away from whoever holds it. A job that still lives notices before its next commit, and fails.

    Args:
        directory: which one.
        hidden: as for ``holder``.

    Raises:
        OSError: it could not be removed.
    """
    hidden = hidden or directory / HIDDEN
    aside = hidden / f"{LOCK_NAME}.{uuid.uuid4().hex}"
    try:
        os.rename(hidden / LOCK_NAME, aside)
    except FileNotFoundError:
        return
    aside.unlink()
    if read_holder(hidden):
        (hidden / HOLDER_NAME).unlink(missing_ok=True)
