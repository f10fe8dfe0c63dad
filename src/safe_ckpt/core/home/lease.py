"""The lock file: creating it, removing it, and the fate of its holder: dead, alive or unknown.

The file names the holder completely: host, kernel, PID namespace, pid and the start of that process. The same host name
alone proves nothing: a restarted pod has the name of the one before it. Imports neither torch nor a framework.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from safe_ckpt.core.storage.presence import opened
from safe_ckpt.machine import kernel_id, pid_namespace, process_start

LOCK_NAME = "lock"
KERNEL_NAME = "lock.alive"
_MOST_BYTES = 4096  # a lock file is some hundred bytes
_BEATS = 10**9
_LONGEST_S = 3600.0  # as the settings have it: of a file that says more, somebody has written nonsense

Fate = Literal["alive", "dead", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Who holds a directory, as its lock file has it.

    Attributes:
        token: unique to this taking of the lock.
        host: the host's name.
        pid: the process, as its own PID namespace counts.
        started_at: when the lock was taken, ISO 8601.
        lease_s: the holder changes the file at least every sixth of this.
        kernel: tells boots of machines apart; "" where that is not known.
        namespace: the PID namespace; 0 where that is not known.
        process_start: when the process began, in clock ticks since the kernel did.
        device: the file system as that kernel numbers it; 0 where the holder has no lock of the kernel beside this one.
        beat: counts up as long as the holder lives.
    """

    token: str
    host: str
    pid: int
    started_at: str
    lease_s: float
    kernel: str
    namespace: int
    process_start: int
    device: int = 0
    beat: int = 0

    def to_bytes(self) -> bytes:
        """As the lock file has it: one line, as long for one beat as for another, so that it is replaced in one write."""
        return (json.dumps({**asdict(self), "beat": f"{self.beat % _BEATS:09d}"}) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Lease | None:
        """From a lock file; None where it is empty, torn or not one of ours."""
        try:
            fields: dict[str, Any] = json.loads(data)
            lease_s = min(float(fields["lease_s"]), _LONGEST_S)
            lease = cls(**{**fields, "beat": int(fields["beat"]), "lease_s": lease_s})
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            return None
        texts = (lease.token, lease.host, lease.started_at, lease.kernel)
        numbers = (lease.pid, lease.namespace, lease.process_start, lease.device)
        right = all(isinstance(text, str) for text in texts) and all(isinstance(number, int) for number in numbers)
        return lease if right and lease.lease_s > 0 else None

    def next(self) -> Lease:
        """The next sign of life."""
        return replace(self, beat=self.beat + 1)


def own_lease(*, token: str, started_at: str, lease_s: float) -> Lease:
    """What this process writes into a lock file."""
    return Lease(
        token=token,
        host=socket.gethostname(),
        pid=os.getpid(),
        started_at=started_at,
        lease_s=lease_s,
        kernel=kernel_id(),
        namespace=pid_namespace(),
        process_start=_own_start(),
    )


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
            _give_back(aside, path)
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


def _give_back(aside: Path, path: Path) -> None:
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
    """Whether the holder still lives, where this process can know.

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


def fate_of_process(lease: Lease) -> Fate:
    """Whether the holder still lives, if it is a process that this one can see."""
    # A namespace of our number is ours, or it is gone and the kernel has given its number to ours.
    if not lease.kernel or lease.kernel != kernel_id() or not lease.namespace or lease.namespace != pid_namespace():
        return "unknown"
    return _fate_of_process(lease.pid, lease.process_start)


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


def _fate_of_process(pid: int, start: int) -> Fate:
    """What became of process ``pid`` of this namespace, which began at ``start`` (0: whenever)."""
    try:
        began = process_start(pid)
    except (FileNotFoundError, ProcessLookupError):
        began = None
        if _is_hidden(pid):  # processes of other users may be (hidepid): only the existence of the pid is known then
            return "unknown"
    except OSError:  # no descriptors left, say: no sign of a death
        return "unknown"
    return "alive" if began is not None and (not start or began == start) else "dead"


def _is_hidden(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _own_start() -> int:
    with contextlib.suppress(OSError):
        return process_start(os.getpid()) or 0
    return 0
