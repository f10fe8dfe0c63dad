"""One live job per directory: a lease that a dead holder cannot keep.

``filelock.SoftFileLease`` does the work: it is refreshed by a thread, taken over at once from a process of this host that
is gone (pid, start time and boot are compared), and from another host after it stood still for ``lease_s`` on our own
clock. Beside it lies a record for people: host, pid, start. Readers (``list``, ``verify``, evaluation jobs) take no lease.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
import uuid
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

from safe_ckpt.errors import DirectoryError, DirectoryInUseError

logger = logging.getLogger(__name__)

LOCK_NAME = "lock"
_EMPTY_S = 2.0
_HALF_WRITTEN_S = 5.0  # filelock takes over a file without a record after two seconds
HOLDER_NAME = "holder.json"
_held_here: set[str] = set()
_left_behind: set[str] = set()


class JobLock:
    """Exclusive right to write below a directory. Only rank 0 takes it.

    Args:
        directory: the hidden folder in which the lock lives; must exist.
        subject: the directory that is protected, for messages.
        lease_s: how long a record of another host must stand still before it is taken over.
    """

    def __init__(self, directory: Path, *, subject: Path, lease_s: float) -> None:
        self._directory = directory
        self._subject = subject
        self._lease_s = lease_s
        self._lease = SoftFileLease(
            directory / LOCK_NAME, lease_duration=lease_s, heartbeat_interval=lease_s / 6, thread_local=False
        )

    def acquire(self) -> None:
        """Take the lock.

        Waits only for a holder on another host, up to ``lease_s`` (and a little), since that one cannot be asked, and some
        seconds for a lock file that is not yet, or never will be, written.

        Raises:
            DirectoryInUseError: a live job holds it; names host, pid and start.
        """
        key = os.path.realpath(self._directory)
        if key in _held_here:
            raise self.in_use("this process has it open already: use one Checkpointer per directory and process")
        try:
            self._lease.acquire(timeout=0)
        except Timeout:
            self._wait_for_a_sign_of_life()
        except LeaseSettingsMismatch:
            raise self.in_use("it is alive, with another lease_s: stop it, or choose another directory") from None
        except OSError as error:
            self._release_lease()
            raise DirectoryError.of(error, path=self._directory, rank=0, phase="taking the job lock") from error
        try:
            self._write_record()
        except OSError as error:
            self._release_lease()
            raise DirectoryError.of(error, path=self._directory, rank=0, phase="taking the job lock") from error
        _held_here.add(key)

    def confirm(self) -> None:
        """Check that the lock is still ours. Called before every rename that commits.

        Raises:
            DirectoryInUseError: another job has taken it over, because this one showed no sign of life.
        """
        if self._lease.compromise is not None or not self._lease.is_lock_held_by_us:
            raise self.in_use("it took the directory over because this job showed no sign of life")

    def release(self) -> None:
        """Give the lock back. What the disk refuses is logged: the lease of a process that ends is taken over anyway."""
        _held_here.discard(os.path.realpath(self._directory))
        try:
            if self._lease.is_locked and self._lease.compromise is None:
                (self._directory / HOLDER_NAME).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("the record in %s could not be removed: %s", self._directory, error)
        self._release_lease()

    def _release_lease(self) -> None:
        try:
            self._lease.release()
        except OSError as error:
            logger.warning("the lock of %s could not be removed: %s", self._subject, error)
        if (self._directory / LOCK_NAME).exists():
            _left_behind.add(os.path.realpath(self._directory))

    def _wait_for_a_sign_of_life(self) -> None:
        owner = self._lease.owner
        if owner is not None and owner.hostname.split("?")[0] == socket.gethostname():
            key = os.path.realpath(self._directory)
            if owner.pid == os.getpid() and key in _left_behind:
                # Ours, from a time when the disk refused to delete it.
                _left_behind.discard(key)
                (self._directory / LOCK_NAME).unlink(missing_ok=True)
                self._lease.acquire(timeout=0)
                return
            raise self.in_use("stop it, or choose another directory") from None
        # Without an owner it is a file that somebody is about to write, or was when he was killed.
        if owner is None:
            self._drop_if_empty()
        patience_s = self._lease_s * 1.25 if owner is not None else _HALF_WRITTEN_S
        host = owner.hostname if owner is not None else "unknown"
        logger.info("%s is held by host %s: waiting %.0f s for a sign of life", self._subject, host, patience_s)
        deadline = time.monotonic() + patience_s
        try:
            self._lease.acquire(timeout=patience_s)
        except (Timeout, LeaseSettingsMismatch):
            raise self.in_use("it is alive: stop it, or choose another directory") from None
        logger.info("%s taken over %.0f s before the deadline", self._subject, deadline - time.monotonic())

    def _drop_if_empty(self) -> None:
        # filelock takes an empty file for a lock of its releases before 3.22 and never touches it; here it is one whose
        # creator was killed before it wrote its record. If it lives after all, ``confirm`` keeps it from committing.
        path = self._directory / LOCK_NAME
        with contextlib.suppress(OSError):
            before = path.stat()
            deadline = time.monotonic() + _EMPTY_S
            while before.st_size == 0 and time.monotonic() < deadline:
                time.sleep(0.1)
                now = path.stat()
                if (now.st_ino, now.st_size) != (before.st_ino, 0):
                    return
            if before.st_size == 0:
                aside = path.with_name(f"{LOCK_NAME}.{uuid.uuid4().hex}")
                os.rename(path, aside)
                if aside.stat().st_ino != before.st_ino:
                    os.link(aside, path)  # somebody else's after all: it gets its name back
                aside.unlink()

    def _write_record(self) -> None:
        record = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "token": self._lease.token,
        }
        (self._directory / HOLDER_NAME).write_text(json.dumps(record), encoding="utf-8")

    def in_use(self, message: str) -> DirectoryInUseError:
        """The error that names the holder."""
        record = read_holder(self._directory)
        owner = self._lease.owner
        return DirectoryInUseError(
            path=str(self._subject),
            message=message,
            host=owner.hostname.split("?")[0] if owner else str(record.get("host", "?")),
            pid=owner.pid if owner else pid if isinstance(pid := record.get("pid", 0), int) else 0,
            started_at=str(record.get("started_at", "?")),
        )


def read_holder(directory: Path) -> dict[str, Any]:
    """The record of who holds the lock in ``directory``; empty when there is none or it cannot be read."""
    try:
        if not (directory / HOLDER_NAME).is_file():  # a pipe would keep us waiting
            return {}
        record = json.loads((directory / HOLDER_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def refuse_if_held(directory: Path, subject: Path) -> None:
    """Raise if a live job holds the lock in ``directory``; take over and drop the lock of a dead one.

    Raises:
        DirectoryInUseError: naming host, pid and start.
    """
    if (directory / LOCK_NAME).exists():
        lock = JobLock(directory, subject=subject, lease_s=60.0)
        lock.acquire()
        lock.release()
