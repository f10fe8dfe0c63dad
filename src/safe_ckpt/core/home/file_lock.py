"""The lock file: creating it, renewing it, taking it away; and the fate of its holder, as the kernel knows it.

The file system needs exclusive creation and rename, nothing else: a lock is taken away by renaming it aside and reading it
there. Readers (``list``, ``verify``, evaluation jobs) take no lock. Imports neither torch nor a framework.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from safe_ckpt.core.home.lease import MOMENT_S, NOBODY, SLOW_S, Fate, Lease, LeaseLock, Seen, fate_of_process
from safe_ckpt.core.storage.presence import opened
from safe_ckpt.errors import naming
from safe_ckpt.machine import kernel_id, pid_namespace

logger = logging.getLogger(__name__)

LOCK_NAME = "lock"
KERNEL_NAME = "lock.alive"
LEASE_S = 60.0  # of a lock file that does not say
_SEEN_NAME = "lock.seen"
_MOST_BYTES = 4096  # a lock file is some hundred bytes
_HALF_WRITTEN_S = 2.0  # a creator writes its name at once; one that was killed in between never does
_PAUSE_S = 0.05
_TAKEN_AWAY = "another job took the directory over, because this one showed no sign of life for {:g} s (lease_s)"


class JobLock(LeaseLock):
    """Exclusive right to write below a directory. Only rank 0 takes it.

    Args:
        directory: the hidden folder in which the lock lives; must exist.
        subject: the directory that is protected, for messages.
        lease_s: how long the file may stand still before others may take it over.
        owner: what holds it within this process and how to free it, for messages.
    """

    _longest_pause_s = 1.0

    def __init__(self, directory: Path, *, subject: Path, lease_s: float, owner: str = "") -> None:
        super().__init__(subject, lease_s=lease_s, owner=owner)
        self._directory = directory
        self._path = directory / LOCK_NAME
        self._kernel: FileLock | None = None

    def acquire(self, patience_s: float | None = None) -> None:
        """See ``LeaseLock``. What was waited counts for the next attempt, in this process or another.

        Raises:
            DirectoryInUseError: another job holds it; names host, pid and start.
            DirectoryError: the file system refuses.
        """
        with naming(rank=0, phase="taking the job lock", path=self._directory):
            super().acquire(patience_s)

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
            lease = self._holder(self._lease)
            deadline = time.monotonic() + MOMENT_S
            while (lease is None or not lease.token) and time.monotonic() < deadline and self._lease is not None:
                # Another job reads it aside and gives it back, or a cache does not have it for a moment.
                time.sleep(_PAUSE_S)
                look_again(self._directory)
                lease = self._holder(self._lease)
        if lease is None or self._lease is None or lease.token != self._lease.token:
            gone = "its lock is gone: it was taken away (safe-ckpt unlock --break-lock), or the directory was"
            raise self.in_use(_TAKEN_AWAY.format(self._lease_s) if lease is not None else gone, lease)

    def _look(self, *, again: bool = False) -> Seen | None:
        del again
        began = time.monotonic()
        look_again(self._directory)
        data = read_lock(self._directory)
        if data is None:
            return None
        lease = Lease.from_bytes(data)
        lease_s = lease.lease_s if lease is not None else _HALF_WRITTEN_S
        # The storage stood still, perhaps for the holder too.
        return Seen(state=data, lease=lease, lease_s=lease_s, was_out=time.monotonic() - began > SLOW_S)

    def _take(self, lease: Lease, seen: Seen | None) -> Lease | None:
        if seen is None and os.path.lexists(self._path):
            return None
        self._directory.stat()  # raises if it is missing: it must not be created here
        # A lock file appears complete under its name: an empty one would look like that of a killed creator.
        fresh = self._directory / f"{LOCK_NAME}.{uuid.uuid4().hex}"
        made = False
        try:
            lease = self._with_kernel_lock(lease)
            fresh.write_bytes(lease.to_bytes())  # first: if the disk is full, the lock that is there stays
            if seen is not None:
                take_away(self._directory, seen.state.__eq__)
            is_free = seen is None or not os.path.lexists(self._path)
            made = is_free and put(fresh, lease.to_bytes(), self._path) and self._token_in(LOCK_NAME) == lease.token
        finally:
            with contextlib.suppress(OSError):  # if it is taken, that must not say otherwise: what stays here is swept
                fresh.unlink()
            if not made:
                self._drop_kernel_lock()
        if not made:
            return None
        with contextlib.suppress(OSError):
            (self._directory / _SEEN_NAME).unlink()
        self._sweep(lease)
        return lease

    def _renew(self, lease: Lease) -> None:
        holder = self._holder(lease)  # None when the file, or the whole directory, is away just now
        if holder is None or holder.token != lease.token:
            if holder is not None and holder.token:
                raise self.in_use(_TAKEN_AWAY.format(self._lease_s), holder)
            return
        with opened(self._path, os.O_RDWR | os.O_NOFOLLOW) as fd:
            # Read the open file: it may be another one by now. A write to one that was renamed aside does no harm.
            if token_of(os.read(fd, _MOST_BYTES)) == lease.token:
                os.pwrite(fd, lease.to_bytes(), 0)

    def _give_back(self, lease: Lease) -> None:
        self._drop_kernel_lock()
        take_away(self._directory, lambda data: token_of(data) == lease.token)

    def _fate(self, lease: Lease) -> Fate:
        return fate_of(lease, self._directory)

    def _waited_s(self, seen: Seen) -> float:
        """How long ago a waiting job first saw this state of the lock. It is recorded now if none has yet."""
        if seen.lease is None:
            return 0.0
        path, digest = self._directory / _SEEN_NAME, hashlib.sha256(seen.state).hexdigest()
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            known = json.loads(read_lock(self._directory, _SEEN_NAME) or b"")
            if known["lock"] == digest:
                return max(0.0, time.time() - float(known["at"]))
        with contextlib.suppress(OSError):
            fresh = path.with_name(f"{_SEEN_NAME}.{uuid.uuid4().hex}")
            fresh.write_text(json.dumps({"lock": digest, "at": time.time()}), encoding="utf-8")
            os.replace(fresh, path)
        return 0.0

    def _sweep(self, lease: Lease) -> None:
        """Remove what jobs left that were killed while they made a lock or took one away."""
        with contextlib.suppress(OSError):
            for path in self._directory.glob(f"{LOCK_NAME}.*"):
                ours = self._token_in(path.name) == lease.token  # another job is reading it aside
                if path.name not in (KERNEL_NAME, _SEEN_NAME) and not ours:
                    path.unlink(missing_ok=True)

    def _token_in(self, name: str) -> str:
        return token_of(read_lock(self._directory, name) or b"")

    def _holder(self, ours: Lease | None) -> Lease | None:
        """Whom the file names. That it is another job, two looks must say: one read may bring other bytes."""
        holder = self._read()
        if holder is None or not holder.token or ours is None or holder.token == ours.token:
            return holder
        look_again(self._directory)
        return self._read()

    def _read(self) -> Lease | None:
        data = read_lock(self._directory)
        return None if data is None else Lease.from_bytes(data) or NOBODY

    def _with_kernel_lock(self, lease: Lease) -> Lease:
        """Take the kernel's lock too. Where the file system has none, other containers of this machine wait for the lease."""
        with contextlib.suppress(OSError, Timeout, NotImplementedError):
            lock = kernel_lock(self._directory)
            lock.acquire(timeout=_PAUSE_S)  # another job may be trying it at this moment
            self._kernel = lock
            return replace(lease, device=self._directory.stat().st_dev)
        return lease

    def _drop_kernel_lock(self) -> None:
        lock, self._kernel = self._kernel, None
        if lock is not None:
            with contextlib.suppress(OSError):
                (self._directory / KERNEL_NAME).unlink(missing_ok=True)
                lock.release()


def read_lock(directory: Path, name: str = LOCK_NAME) -> bytes | None:
    """The first bytes of the lock file in ``directory``; None where there is none. What is no file counts as an empty one.

    Raises:
        OSError: it is there and cannot be read.
    """
    path = directory / name
    try:
        # A pipe in its place must not block, and a link must not be followed.
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            return os.read(fd, _MOST_BYTES) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        if path.is_symlink():
            return b""
        raise


def take_away(directory: Path, is_it: Callable[[bytes], bool]) -> bool:
    """Remove the lock file of ``directory`` if it is the one that was judged. Returns whether it is gone.

    It is renamed aside first, which only one of several jobs can do, and then read. If another job made it meanwhile, it gets
    its name back. Its holder reads the file before each commit, so two jobs never commit at the same time.

    Raises:
        OSError: the file system refuses.
    """
    path = directory / LOCK_NAME
    data = read_lock(directory)
    if data is None or not is_it(data):
        return data is None
    aside = directory / f"{LOCK_NAME}.{uuid.uuid4().hex}"
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return True
    if not aside.is_file() or aside.is_symlink():
        return True  # a directory or a pipe was no job's lock, but it may be needed: it is not deleted
    if not is_it(read_lock(directory, aside.name) or b""):
        with contextlib.suppress(FileExistsError):
            _put_back(aside, path)
        aside.unlink(missing_ok=True)
        return False
    # A host whose cache still has the old file must not read its own token in it.
    with contextlib.suppress(OSError), opened(aside, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
        # It may be of another user, on a full disk, or a second name of a file that somebody needs.
        if stat.S_ISREG(os.fstat(fd).st_mode) and os.fstat(fd).st_nlink == 1:
            os.ftruncate(fd, 0)
            os.write(fd, b"taken over\n")
    aside.unlink(missing_ok=True)  # the next holder may have swept it
    return True


def put(fresh: Path, data: bytes, path: Path) -> bool:
    """Give a complete lock file its name, if that is free. Returns whether it was done."""
    try:
        os.link(fresh, path)
    except (FileExistsError, FileNotFoundError):  # or the job that has the lock by now has swept it
        return False
    except OSError:  # no hard links here: then it is empty for a moment
        try:
            with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644) as fd:
                os.write(fd, data)
        except FileExistsError:
            return False
    return True


def _put_back(aside: Path, path: Path) -> None:
    try:
        os.link(aside, path)
    except FileExistsError:
        raise
    except OSError:  # no hard links here
        if not os.path.lexists(path):
            os.rename(aside, path)


def look_again(directory: Path) -> None:
    """List the directory: that makes network file systems look at what they have cached."""
    with contextlib.suppress(OSError):
        os.listdir(directory)


def token_of(data: bytes) -> str:
    """The token in a lock file's bytes; "" where it names nobody."""
    lease = Lease.from_bytes(data)
    return lease.token if lease is not None else ""


def fate_of(lease: Lease, directory: Path) -> Fate:
    """Find out if the holder still lives, where this process can know.

    It can where both run on one kernel: in one PID namespace by the process itself, else by a lock of the kernel, which ends
    with the process, if both see the file system as one and the same.
    """
    if (fate := fate_of_process(lease)) != "unknown" or not lease.kernel or lease.kernel != kernel_id():
        return fate
    if lease.namespace and lease.namespace == pid_namespace():
        return "unknown"
    with contextlib.suppress(OSError):
        if lease.device == directory.stat().st_dev and (directory / KERNEL_NAME).exists():
            # Held by the process, or by children that it forked: that proves nothing.
            return "dead" if _can_be_locked(directory) else "unknown"
    return "unknown"


def kernel_lock(directory: Path) -> FileLock:
    """The kernel's lock beside the lock file; it ends with its holder's process, and other machines do not see it.

    Raises:
        OSError: something else stands in its place: a link, a pipe, or a second name of a file that locking would empty.
    """
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(directory / KERNEL_NAME)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise OSError(errno.EPERM, "is not a regular file with one name", str(directory / KERNEL_NAME))
    return FileLock(directory / KERNEL_NAME, timeout=0, thread_local=False, fallback_to_soft=False)


def _can_be_locked(directory: Path) -> bool:
    try:
        lock = kernel_lock(directory)
        lock.acquire()
    except (Timeout, OSError):
        return False
    lock.release()
    return True


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
