"""What else a process meets: signals, locks of the kernel, calls of C, its end."""

from __future__ import annotations

import ctypes as real_ctypes
import fcntl as real_fcntl
import gc as real_gc
import signal as real_signal
import subprocess as real_subprocess
import types
from collections.abc import Callable
from typing import Any

from sim.disk import errno, fail
from sim.shims import posix_calls
from sim.shims.paths import FIRST, descriptor
from sim.world import here, hub


class Timeout(TimeoutError):
    """See ``filelock``."""


class FileLock:
    """See ``filelock``: a lock of the kernel, which ends with its process and which other hosts do not see."""

    def __init__(self, path: Any, timeout: float = -1, **_: Any) -> None:
        self._path, self._timeout = str(path), timeout
        self._held: tuple[Any, int] | None = None

    def acquire(self, timeout: float | None = None, **_: Any) -> None:
        """See ``filelock``."""
        task = here()
        fd = posix_calls._open(self._path, real_fcntl.F_RDLCK | 0o102)
        node = descriptor(fd).node
        posix_calls._close(fd)
        table = task.proc.host.__dict__.setdefault("kernel_locks", {})
        limit = self._timeout if timeout is None else timeout
        end = task.world.now + max(0.0, limit)
        while (holder := table.get(node.number)) is not None and holder.alive:
            if task.world.now >= end:
                raise Timeout(self._path)
            task.sleep(0.01)
        table[node.number] = task.proc
        self._held = (table, node.number)

    def release(self, force: bool = False) -> None:
        """See ``filelock``."""
        del force
        if self._held is not None:
            table, number = self._held
            table.pop(number, None)
            self._held = None


class Finalize:
    """See ``multiprocessing.util``."""

    def __init__(
        self,
        obj: Any,
        callback: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
        exitpriority: int | None = None,
    ) -> None:
        del obj
        self._work = (callback, args, kwargs or {})
        self.priority = exitpriority or 0
        here().proc.facts.setdefault("finalizers", []).append(self)

    def cancel(self) -> None:
        """See ``multiprocessing.util``."""
        if hub.task is not None and self in hub.task.proc.facts.get("finalizers", ()):
            hub.task.proc.facts["finalizers"].remove(self)

    def __call__(self) -> None:
        self.cancel()
        callback, args, kwargs = self._work
        callback(*args, **kwargs)


def at_exit() -> None:
    """What a process does that ends by itself."""
    finalizers = here().proc.facts.get("finalizers", [])
    for one in sorted(finalizers, key=lambda one: -one.priority):
        one()


class _Library:
    """What ``ctypes.CDLL(None)`` gives."""

    def __init__(self) -> None:
        self._real = real_ctypes.CDLL(None, use_errno=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def renameat2(self, _: int, one: bytes, __: int, other: bytes, ___: int) -> int:
        """See its manual."""
        try:
            posix_calls.exchange(one.decode(), other.decode())
        except OSError as error:
            here().errno = error.errno or errno.EIO
            return -1
        return 0


def _get_errno() -> int:
    if hub.task is not None and hub.task.errno:
        code, hub.task.errno = hub.task.errno, 0
        return code  # type: ignore[no-any-return]
    return real_ctypes.get_errno()


def _ioctl(*_: Any) -> Any:
    raise fail(errno.EOPNOTSUPP)


def _flock(fd: int, how: int) -> None:
    """See its manual: a lock of an open file, which ends with it, and which other hosts do not see."""
    if fd < FIRST:
        real_fcntl.flock(fd, how)
        return
    task, mine = here(), descriptor(fd)
    table = task.proc.host.__dict__.setdefault("flocks", {})
    while True:
        held = [
            (opened, kind, proc)
            for opened, kind, proc in table.get(mine.node.number, ())
            if opened is not mine and proc.alive and opened in proc.facts.get("fds", {}).values()
        ]
        if how & real_fcntl.LOCK_UN:
            break
        if not any(kind | how & real_fcntl.LOCK_EX for _, kind, _ in held):
            held.append((mine, how & real_fcntl.LOCK_EX, task.proc))
            break
        if how & real_fcntl.LOCK_NB:
            raise fail(errno.EWOULDBLOCK)
        task.sleep(0.01)
    table[mine.node.number] = held


def _handlers() -> dict[int, Any]:
    return here().proc.facts.setdefault("handlers", {})  # type: ignore[no-any-return]


def _signal(number: int, handler: Any) -> Any:
    before = _handlers().get(number, real_signal.SIG_DFL)
    _handlers()[number] = handler
    return before


def modules() -> dict[str, types.ModuleType]:
    """The modules, by name."""
    made = {}
    for real in (real_ctypes, real_fcntl, real_gc, real_signal, real_subprocess):
        made[real.__name__] = types.ModuleType(real.__name__)
        vars(made[real.__name__]).update(vars(real))
    made["ctypes"].CDLL = lambda *_, **__: _Library()  # type: ignore[attr-defined]
    made["ctypes"].get_errno = _get_errno  # type: ignore[attr-defined]
    made["fcntl"].ioctl = _ioctl  # type: ignore[attr-defined]
    made["fcntl"].flock = _flock  # type: ignore[attr-defined]
    made["fcntl"].fcntl = lambda *_: 0  # type: ignore[attr-defined]
    made["gc"].collect = lambda *_: 0  # type: ignore[attr-defined]
    made["signal"].signal = _signal  # type: ignore[attr-defined]
    made["signal"].getsignal = lambda number: _handlers().get(number, real_signal.SIG_DFL)  # type: ignore[attr-defined]
    made["signal"].raise_signal = lambda number: here().proc.kill(f"signal {number}")  # type: ignore[attr-defined]
    filelock = types.ModuleType("filelock")
    filelock.FileLock, filelock.Timeout = FileLock, Timeout  # type: ignore[attr-defined]
    util = types.ModuleType("multiprocessing.util")
    util.Finalize = Finalize  # type: ignore[attr-defined]
    multiprocessing = types.ModuleType("multiprocessing")
    multiprocessing.util = util  # type: ignore[attr-defined]
    return {**made, "filelock": filelock, "multiprocessing": multiprocessing, "multiprocessing.util": util}
