"""For people in a hurry: who holds a directory, and taking its lock away."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from filelock import SoftFileLease, Timeout

from safe_ckpt.core.lock import HOLDER_NAME, LOCK_NAME, read_holder

logger = logging.getLogger(__name__)
_MOST_BYTES = 4096  # a lock file is some hundred bytes
_LEASE_S = 60.0  # of a lock file that does not say


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a directory.

    Attributes:
        host: where; "" where the lock file names nobody: a job writes it at this moment, or was killed before it did.
        pid: which process there; 0 where the lock file names nobody.
        started_at: since when, ISO 8601; "?" where that is not recorded.
        alive: False when it is gone, so that the next job takes the lock over at once; None when that cannot be told from
            here.
        lease_s: how long a holder of another host may show no sign of life before the next job takes over.
    """

    host: str
    pid: int
    started_at: str
    alive: bool | None
    lease_s: float


def holder(hidden: Path | None) -> Holder | None:
    """Who holds the directory; None when nobody does. Only read: the lock stays as it is.

    Args:
        hidden: where the directory's lock lives, ``Shelf.hidden``; None where there never was one.

    Raises:
        OSError: the lock file is there and could not be read.
    """
    marker = _marker(hidden / LOCK_NAME) if hidden is not None else None
    if hidden is None or marker is None:
        return None
    owner = SoftFileLease(hidden / LOCK_NAME, lease_duration=_LEASE_S).owner if marker else None
    if owner is None:
        if _marker(hidden / LOCK_NAME) is None:  # given back in this moment
            return None
        return Holder(host="", pid=0, started_at="?", alive=None, lease_s=_LEASE_S)
    record = read_holder(hidden)
    lease_s = owner.lease_duration or _LEASE_S
    return Holder(
        host=owner.hostname.split("?")[0],
        pid=owner.pid,
        started_at=str(record.get("started_at", "?")) if record.get("token") == owner.token else "?",
        alive=_is_alive(marker, owner.hostname, lease_s),
        lease_s=lease_s,
    )


def _is_alive(marker: bytes, host: str, lease_s: float) -> bool | None:
    """Have filelock judge a copy of the lock file, as it judges the real one when the next job comes."""
    try:
        with tempfile.TemporaryDirectory(prefix="safe_ckpt-") as scratch:
            own = SoftFileLease(Path(scratch, "own"), lease_duration=lease_s)
            with own:  # its record has the name by which filelock knows this host and container
                if own.owner is None or own.owner.hostname != host:
                    return None
            copy = Path(scratch, "copy")
            copy.write_bytes(marker)
            lease = SoftFileLease(copy, lease_duration=lease_s)
            with contextlib.suppress(Timeout), lease.acquire(timeout=0):
                return False
            # Before 4.2 filelock takes away what a dead process left, and times out all the same.
            return lease.owner is not None
    except OSError as error:
        logger.warning("whether the holder is alive cannot be looked at: %s", error)
        return None


def _marker(path: Path) -> bytes | None:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would keep us waiting
            return b""
        with path.open("rb") as stream:
            return stream.read(_MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None


def break_lock(hidden: Path) -> None:
    """Take the lock away from whoever holds it. A job that still lives notices before its next commit, and fails.

    Args:
        hidden: where the directory's lock lives, ``Shelf.hidden``.

    Raises:
        OSError: it could not be removed.
    """
    aside = hidden / f"{LOCK_NAME}.{uuid.uuid4().hex}"
    try:
        os.rename(hidden / LOCK_NAME, aside)
    except FileNotFoundError:
        return
    aside.unlink()
    if read_holder(hidden):
        (hidden / HOLDER_NAME).unlink(missing_ok=True)
