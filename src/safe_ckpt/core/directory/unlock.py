"""For people in a hurry: who holds a directory, and taking its lock away."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safe_ckpt.core.directory.lease import Lease, fate_of, read_lock
from safe_ckpt.core.directory.lock import take_away

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
        lease_s: how long a holder that cannot be asked may show no sign of life before the next job takes over.
    """

    host: str
    pid: int
    started_at: str
    alive: bool | None
    lease_s: float


def holder(hidden: Path | None) -> Holder | None:
    """Who holds the directory; None when nobody does. Only read: the lock stays as it is.

    Args:
        hidden: where the directory's lock lives, ``Listing.hidden``; None where there never was one.

    Raises:
        OSError: the lock file is there and could not be read.
    """
    data = read_lock(hidden) if hidden is not None else None
    if hidden is None or data is None:
        return None
    lease = Lease.from_bytes(data)
    if lease is None:
        return Holder(host="", pid=0, started_at="?", alive=None, lease_s=_LEASE_S)
    alive = {"alive": True, "dead": False, "unknown": None}[fate_of(lease, hidden)]
    return Holder(host=lease.host, pid=lease.pid, started_at=lease.started_at, alive=alive, lease_s=lease.lease_s)


def break_lock(hidden: Path) -> None:
    """Take the lock away from whoever holds it. A job that still lives notices before its next commit, and fails.

    Args:
        hidden: where the directory's lock lives, ``Listing.hidden``.

    Raises:
        OSError: it could not be removed.
    """
    take_away(hidden, lambda _: True)
