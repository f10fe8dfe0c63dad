"""One live job per directory: a lease that a dead holder cannot keep.

The lock is a file that the holder changes all the time. Another job takes the directory over at once from a process that is
known to be gone. From a holder that cannot be checked (another host, another container) it takes the directory over after the
file has not changed for the holder's own ``lease_s``. The file system needs exclusive creation and rename, nothing else: a
lock is taken away by renaming it aside and reading it there. Readers (``list``, ``verify``, evaluation jobs) take no lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from filelock import FileLock, Timeout

from safe_ckpt.core.home.lease import (
    KERNEL_NAME,
    LOCK_NAME,
    Lease,
    fate_of,
    kernel_lock,
    look_again,
    own_lease,
    put,
    read_lock,
    take_away,
    token_of,
)
from safe_ckpt.core.storage.presence import opened
from safe_ckpt.errors import DirectoryInUseError, naming

logger = logging.getLogger(__name__)

_SEEN_NAME = "lock.seen"
_HALF_WRITTEN_S = 2.0  # a creator writes its name at once; one that was killed in between never does
_BEATS_PER_LEASE = 6
_ATTEMPTS = 100
_PAUSE_S = 0.05
_SLOW_S = 1.0
LEASE_S = 60.0  # of a lock file that does not say
_MOMENT_S = 1.5
_TAKEN_AWAY = "another job took the directory over, because this one showed no sign of life for {:g} s (lease_s)"
_FREE = "or free it with safe-ckpt unlock --break-lock"
_held: dict[str, JobLock] = {}
_reserving = threading.RLock()  # a signal's handler may open a directory, too


class JobLock:
    """Exclusive right to write below a directory. Only rank 0 takes it.

    Args:
        directory: the hidden folder in which the lock lives; must exist.
        subject: the directory that is protected, for messages.
        lease_s: how long the file may stand still before others may take it over.
        owner: what holds it within this process and how to free it, for messages.
    """

    def __init__(self, directory: Path, *, subject: Path, lease_s: float, owner: str = "") -> None:
        self._directory = directory
        self._path = directory / LOCK_NAME
        self._subject = subject
        self._lease_s = lease_s
        self._owner = owner
        self._lease: Lease | None = None
        self._kernel: FileLock | None = None
        self._pid = 0
        self._key = ""
        self._keeper: threading.Thread | None = None
        self._stop = threading.Event()

    def acquire(self, patience_s: float | None = None) -> None:
        """Take the lock.

        Waits only for a holder that cannot be asked whether it lives, until its own lease is over.

        Args:
            patience_s: wait no longer than this; None for as long as the holder's lease says. What was waited counts for
                the next attempt, in this process or another.

        Raises:
            DirectoryInUseError: another job holds it; names host, pid and start.
            DirectoryError: the file system refuses.
        """
        with naming(rank=0, phase="taking the job lock", path=self._directory):
            self._reserve()
            try:
                self._take(None if patience_s is None else time.monotonic() + patience_s)
            except BaseException:
                _held.pop(self._key, None)
                raise
        self._sweep()
        self._stop = threading.Event()
        self._keeper = threading.Thread(
            target=self._keep, args=(self._lease, self._stop), name="safe_ckpt-lease", daemon=True
        )
        try:
            self._keeper.start()
        except BaseException:
            self.release()
            raise

    @property
    def is_held(self) -> bool:
        """Whether this process took it and has not given it back."""
        return self._lease is not None and self._pid == os.getpid()

    @property
    def is_seen(self) -> bool:
        """Whether the lock file is there and this job's, as far as one look tells."""
        try:
            lease = self._read()
        except OSError:
            return False
        return lease is not None and self._lease is not None and lease.token == self._lease.token

    def confirm(self) -> None:
        """Check that the lock is still ours. Called right before every rename that commits.

        Raises:
            DirectoryInUseError: another job has taken it over; names it.
            DirectoryError: that cannot be looked at now.
        """
        with naming(rank=0, phase="confirming the job lock", path=self._path):
            lease = self._read()
            deadline = time.monotonic() + _MOMENT_S
            while (lease is None or not lease.token) and time.monotonic() < deadline and self._lease is not None:
                # Another job reads it aside and gives it back, or a cache does not have it for a moment.
                time.sleep(_PAUSE_S)
                look_again(self._directory)
                lease = self._read()
        if lease is None or self._lease is None or lease.token != self._lease.token:
            gone = "its lock is gone: it was taken away (safe-ckpt unlock --break-lock), or the directory was"
            raise self.in_use(_TAKEN_AWAY.format(self._lease_s) if lease is not None else gone, lease)

    def release(self) -> None:
        """Give the lock back. An error of the disk is logged: the lease of a process that ends is taken over anyway."""
        lease, self._lease = self._lease, None
        self._stop.set()
        if lease is None or self._pid != os.getpid():
            return
        if _held.get(self._key) is self:
            del _held[self._key]
        # A collector may call this from anywhere, from that thread too.
        if self._keeper is not None and self._keeper is not threading.current_thread() and self._keeper.is_alive():
            self._keeper.join(_MOMENT_S)  # a disk that does not answer holds it up
        try:
            self._drop_kernel_lock()
            take_away(self._directory, lambda data: token_of(data) == lease.token)
        except OSError as error:
            logger.warning("the lock of %s could not be removed: %s", self._subject, error)

    def in_use(self, message: str, lease: Lease | None) -> DirectoryInUseError:
        """The error that names the holder."""
        return DirectoryInUseError(
            path=str(self._subject),
            message=message,
            host=lease.host if lease else "?",
            pid=lease.pid if lease else 0,
            started_at=lease.started_at if lease else "?",
        )

    def _reserve(self) -> None:
        """Be the one of this process that takes it: another thread would take the lock file of this one for a dead one's."""
        self._key, self._pid = os.path.realpath(self._directory), os.getpid()
        if self._key in _held:
            gc.collect()  # an object that is only referenced by itself ends now
        with _reserving:
            holder = _held.get(self._key)
            if holder is None or holder._pid != os.getpid():
                _held[self._key] = self
                return
        who = holder._owner or "use one Checkpointer per directory and process"
        raise self.in_use(f"this process has it open already: {who}", holder._lease)

    def _take(self, deadline: float | None) -> None:
        lease: Lease | None = None
        for _ in range(_ATTEMPTS):
            if self._create():
                return
            data = read_lock(self._directory)
            if data is None:
                time.sleep(_PAUSE_S)  # given back in this moment, or a cache that does not know yet
                continue
            lease = Lease.from_bytes(data)
            fate = "unknown" if lease is None else self._fate(lease)
            if fate == "alive" and lease is not None:
                raise self.in_use("it is alive: stop it, or choose another directory", lease)
            if fate == "dead" or self._stands_still(data, lease, deadline):
                take_away(self._directory, data.__eq__)
        raise self.in_use("other jobs take it again and again, or the file system is inconsistent: start again", lease)

    def _fate(self, lease: Lease) -> str:
        fate = fate_of(lease, self._directory)
        if fate == "alive" and lease.pid == os.getpid():
            for holder in _held.values():
                if holder._lease is not None and holder._lease.token == lease.token:
                    return fate  # this process has it under another path
            return "dead"  # ours, from a time when the disk refused to delete it
        return fate

    def _create(self) -> bool:
        """Make the lock file if there is none. Returns whether it was made, and is this job's."""
        if os.path.lexists(self._path):
            return False
        self._directory.stat()  # raises if it is missing: it must not be created here
        # A lock file appears complete under its name: an empty one would look like that of a killed creator.
        fresh = self._directory / f"{LOCK_NAME}.{uuid.uuid4().hex}"
        try:
            lease = self._own_lease()
            fresh.write_bytes(lease.to_bytes())
            if put(fresh, lease.to_bytes(), self._path) and token_of(read_lock(self._directory) or b"") == lease.token:
                self._lease, self._pid = lease, os.getpid()
                with contextlib.suppress(OSError):
                    (self._directory / _SEEN_NAME).unlink()
        finally:
            fresh.unlink(missing_ok=True)
            if self._lease is None:
                self._drop_kernel_lock()
        return self._lease is not None

    def _stands_still(self, data: bytes, lease: Lease | None, deadline: float | None) -> bool:
        """Watch the lock file. Returns whether it stood still for as long as it takes; False where it is another one now.

        Raises:
            DirectoryInUseError: its holder is alive, or there is no time left to wait.
        """
        lease_s = lease.lease_s if lease is not None else _HALF_WRITTEN_S
        waited_s = self._waited_s(data) if lease is not None else 0.0
        # Earlier waits were measured by the clocks of several machines. A live holder changes the file in the time left.
        needed_s = max(lease_s - waited_s, 2 * lease_s / _BEATS_PER_LEASE)
        host = lease.host if lease is not None else "unknown"
        waiting = "%s is held by host %s: waiting up to %.0f s for a sign of life. If it is dead, wait, %s"
        logger.info(waiting, self._subject, host, needed_s, _FREE)
        pause_s, still_s, before = min(1.0, needed_s / 20), 0.0, time.monotonic()
        while still_s < needed_s:
            if deadline is not None and time.monotonic() >= deadline:
                what = "it" if lease is not None else "its lock names no holder yet, and"
                left_s = needed_s - still_s
                so_far = f"{what} shows no sign of life; its lease ends in {left_s:.0f} s: start again then, {_FREE}"
                raise self.in_use(so_far, lease)
            time.sleep(pause_s)
            look_again(self._directory)
            now = read_lock(self._directory)
            took_s, before = time.monotonic() - before, time.monotonic()
            still_s += min(took_s, pause_s + _SLOW_S)
            if took_s > pause_s + _SLOW_S:
                # The storage stood still, perhaps for the holder too. The holder gets the time of two beats more.
                still_s = min(still_s, needed_s - 2 * lease_s / _BEATS_PER_LEASE)
            if now == data and lease is not None and fate_of(lease, self._directory) == "dead":
                return True
            if now == data:
                continue
            if lease is not None and now is not None and token_of(now) == lease.token:
                raise self.in_use("it gave a sign of life: stop it, or choose another directory", lease)
            return False
        logger.info("%s taken over: no sign of life of host %s for %.0f s", self._subject, host, lease_s)
        return True

    def _waited_s(self, data: bytes) -> float:
        """How long ago a waiting job first saw this state of the lock. It is recorded now if none has yet."""
        path, digest = self._directory / _SEEN_NAME, hashlib.sha256(data).hexdigest()
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            seen = json.loads(read_lock(self._directory, _SEEN_NAME) or b"")
            if seen["lock"] == digest:
                return max(0.0, time.time() - float(seen["at"]))
        with contextlib.suppress(OSError):
            fresh = path.with_name(f"{_SEEN_NAME}.{uuid.uuid4().hex}")
            fresh.write_text(json.dumps({"lock": digest, "at": time.time()}), encoding="utf-8")
            os.replace(fresh, path)
        return 0.0

    def _keep(self, lease: Lease, stop: threading.Event) -> None:
        """Show signs of life. An outage of the storage does not end this: afterwards the file is still ours, or it is not."""
        warned = False
        while not stop.wait(lease.lease_s / _BEATS_PER_LEASE):
            lease = lease.next()
            try:
                holder = self._renew(lease)
            except Exception as error:  # the next try may succeed, whatever it was
                if not warned:
                    logger.warning("the lock of %s cannot be renewed: %s", self._subject, error)
                warned = True
                continue
            warned = False
            if holder is not None and holder.token not in ("", lease.token) and not stop.is_set():
                where = f"process {holder.pid} on host {holder.host}"
                logger.error("%s was taken over by %s: nothing more is committed there", self._subject, where)
                return

    def _renew(self, lease: Lease) -> Lease | None:
        """One sign of life. Returns whose the lock is; None when the file, or the whole directory, is away just now."""
        holder = self._read()
        if holder is None or holder.token != lease.token:
            return holder
        with opened(self._path, os.O_RDWR | os.O_NOFOLLOW) as fd:
            # Read the open file: it may be another one by now. A write to one that was renamed aside does no harm.
            if token_of(os.read(fd, 4096)) == lease.token:
                os.pwrite(fd, lease.to_bytes(), 0)
        return holder

    def _sweep(self) -> None:
        """Remove what jobs left that were killed while they made a lock or took one away."""
        with contextlib.suppress(OSError):
            for path in self._directory.glob(f"{LOCK_NAME}.*"):
                ours = (
                    self._lease is not None
                    and token_of(read_lock(self._directory, path.name) or b"") == self._lease.token
                )
                if path.name not in (KERNEL_NAME, _SEEN_NAME) and not ours:  # another job is reading ours aside
                    path.unlink(missing_ok=True)

    def _read(self) -> Lease | None:
        data = read_lock(self._directory)
        return None if data is None else Lease.from_bytes(data) or _NOBODY

    def _own_lease(self) -> Lease:
        started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        lease = own_lease(token=uuid.uuid4().hex, started_at=started_at, lease_s=self._lease_s)
        # Where the file system has none, other containers of this machine wait for the lease.
        with contextlib.suppress(OSError, Timeout, NotImplementedError):
            lock = kernel_lock(self._directory)
            lock.acquire(timeout=_PAUSE_S)  # another job may be trying it at this moment
            self._kernel = lock
            return dataclasses.replace(lease, device=self._directory.stat().st_dev)
        return lease

    def _drop_kernel_lock(self) -> None:
        lock, self._kernel = self._kernel, None
        if lock is not None:
            with contextlib.suppress(OSError):
                (self._directory / KERNEL_NAME).unlink(missing_ok=True)
                lock.release()


_NOBODY = Lease(
    token="", host="?", pid=0, started_at="?", lease_s=1.0, kernel="", namespace=0, process_start=0, device=0
)


@contextlib.contextmanager
def not_held(directory: Path, subject: Path, patience_s: float) -> Iterator[None]:
    """No live job holds the lock in ``directory``, nor takes it meanwhile where there is one; a dead job's is taken over.

    Raises:
        DirectoryInUseError: naming host, pid and start.
    """
    if not os.path.lexists(directory / LOCK_NAME):
        yield
        return
    lock = JobLock(directory, subject=subject, lease_s=LEASE_S, owner="set_up_directory")
    lock.acquire(patience_s)
    try:
        yield
    finally:
        lock.release()
