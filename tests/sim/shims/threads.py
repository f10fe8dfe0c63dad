"""``threading`` and ``queue`` of the simulated processes: every thread is a task of the world.

Python switches threads anywhere. Here they switch where one waits, at each call of the disk and the network, and now and then
at a lock that is free.
"""

from __future__ import annotations

import queue as real_queue
import types
from collections import deque
from collections.abc import Callable
from typing import Any

from sim.world import Killed, here, hub

_GIVE_WAY = 0.05
TIMEOUT_MAX = 1e9


class Lock:
    """A lock; ``RLock`` below may be taken again by its thread."""

    again = False

    def __init__(self) -> None:
        self.owner: Any = None
        self.count = 0
        self.waiters: list[Any] = []

    def reset(self) -> None:
        """As new: the process that held it is gone."""
        self.__init__()  # type: ignore[misc]

    _at_fork_reinit = reset

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See ``threading.Lock``."""
        if hub.task is None and hub.loading:
            return True
        task = here()
        if self.owner is None:
            self.owner, self.count = task, 1
            if task.world.rng.random() < _GIVE_WAY:
                task.give_way()
            return True
        if self.owner is task and self.again:
            self.count += 1
            return True
        if not blocking:
            return False
        end = None if timeout is None or timeout < 0 else task.world.now + timeout / task.proc.host.rate
        while self.owner is not None:
            self.waiters.append(task)
            left = None if end is None else (end - task.world.now) * task.proc.host.rate
            if left is not None and left <= 0:
                return False
            woken = task.wait(left)
            if task in self.waiters:
                self.waiters.remove(task)
            if not woken and self.owner is not None:
                return False
        self.owner, self.count = task, 1
        return True

    def release(self) -> None:
        """See ``threading.Lock``."""
        if hub.task is None and hub.loading:
            return
        self.count -= 1
        if self.count > 0:
            return
        self.owner = None
        if self.waiters and hub.world is not None:
            hub.world.wake(self.waiters.pop(0))

    def locked(self) -> bool:
        """See ``threading.Lock``."""
        return self.owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """See ``threading.RLock``."""

    again = True

    def _is_owned(self) -> bool:
        return self.owner is hub.task


class Condition:
    """See ``threading.Condition``."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiters: list[Any] = []

    def reset(self) -> None:
        """As new."""
        self._lock.reset()
        self._waiters = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """See ``threading.Condition``."""
        task, count = here(), self._lock.count
        self._waiters.append(task)
        self._lock.count = 1
        self._lock.release()
        try:
            woken = task.wait(timeout)
        finally:
            if task in self._waiters:
                self._waiters.remove(task)
        self._lock.acquire()
        self._lock.count = count
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """See ``threading.Condition``."""
        task = here()
        end = None if timeout is None else task.world.now + timeout / task.proc.host.rate
        while not (result := predicate()):
            left = None if end is None else (end - task.world.now) * task.proc.host.rate
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        """See ``threading.Condition``."""
        for task in self._waiters[:n]:
            self._waiters.remove(task)
            task.world.wake(task)

    def notify_all(self) -> None:
        """See ``threading.Condition``."""
        self.notify(len(self._waiters))


class Event:
    """See ``threading.Event``."""

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[Any] = []

    def reset(self) -> None:
        """As new."""
        self.__init__()  # type: ignore[misc]

    def is_set(self) -> bool:
        """See ``threading.Event``."""
        return self._set

    def set(self) -> None:
        """See ``threading.Event``."""
        here()
        self._set = True
        for task in self._waiters:
            task.world.wake(task)
        self._waiters = []

    def clear(self) -> None:
        """See ``threading.Event``."""
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """See ``threading.Event``."""
        task = here()
        if self._set:
            return True
        self._waiters.append(task)
        task.wait(timeout)
        if task in self._waiters:
            self._waiters.remove(task)
        return self._set


class Semaphore:
    """See ``threading.Semaphore``."""

    def __init__(self, value: int = 1) -> None:
        self._value = value
        self._condition = Condition()

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """See ``threading.Semaphore``."""
        with self._condition:
            if not blocking:
                timeout = 0
            if not self._condition.wait_for(lambda: self._value > 0, timeout):
                return False
            self._value -= 1
            return True

    def release(self, n: int = 1) -> None:
        """See ``threading.Semaphore``."""
        with self._condition:
            self._value += n
            self._condition.notify(n)

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class Thread:
    """See ``threading.Thread``."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        del group
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self.name, self.daemon = name or "Thread", bool(daemon)
        self._task: Any = None
        self._number: int = next(hub.world.thread_numbers) if hub.world is not None else 0

    def start(self) -> None:
        """See ``threading.Thread``."""
        from sim.world import Task

        self._task = Task(here().proc, self.run, (), self.name)
        self._task.thread = self
        if here().world.rng.random() < 0.5:
            here().give_way()

    def run(self) -> None:
        """See ``threading.Thread``."""
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def __hash__(self) -> int:  # sets of threads are walked in the same order each time
        return self._number

    def join(self, timeout: float | None = None) -> None:
        """See ``threading.Thread``."""
        task = here()
        if self._task is None or self._task.over:
            return
        self._task.joiners.append(task)
        task.wait(timeout)
        if task in self._task.joiners:
            self._task.joiners.remove(task)

    def is_alive(self) -> bool:
        """See ``threading.Thread``."""
        return self._task is not None and not self._task.over

    @property
    def ident(self) -> int | None:
        """See ``threading.Thread``."""
        return self._task.ident if self._task is not None else None

    native_id = ident

    @classmethod
    def of(cls, task: Any) -> Thread:
        """The thread of a task, also of a main one."""
        if task.thread is None:
            task.thread = cls(name="MainThread" if task.name == "main" else task.name)
            task.thread._task = task
        return task.thread  # type: ignore[no-any-return]


class Local:
    """See ``threading.local``."""

    def __init__(self) -> None:
        object.__setattr__(self, "_by_task", {})

    def _own(self) -> dict[str, Any]:
        return object.__getattribute__(self, "_by_task").setdefault(id(hub.task), {})  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        try:
            return self._own()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._own()[name] = value

    def __delattr__(self, name: str) -> None:
        self._own().pop(name, None)


class SimpleQueue:
    """See ``queue.SimpleQueue``; ``Queue`` has what is used of the other."""

    def __init__(self, maxsize: int = 0) -> None:
        self._items: deque[Any] = deque()
        self._waiters: list[Any] = []
        self._most = maxsize

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """See ``queue.SimpleQueue``."""
        task = here()
        while self._most and len(self._items) >= self._most:
            if not block:
                raise real_queue.Full
            task.wait(0.01)
        self._items.append(item)
        if self._waiters:
            task.world.wake(self._waiters.pop(0))

    def put_nowait(self, item: Any) -> None:
        """See ``queue.SimpleQueue``."""
        self.put(item, block=False)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """See ``queue.SimpleQueue``."""
        task = here()
        end = None if timeout is None else task.world.now + timeout / task.proc.host.rate
        while not self._items:
            left = None if end is None else (end - task.world.now) * task.proc.host.rate
            if not block or (left is not None and left <= 0):
                raise real_queue.Empty
            self._waiters.append(task)
            task.wait(left)
            if task in self._waiters:
                self._waiters.remove(task)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        """See ``queue.SimpleQueue``."""
        return self.get(block=False)

    def empty(self) -> bool:
        """See ``queue.SimpleQueue``."""
        return not self._items

    def qsize(self) -> int:
        """See ``queue.SimpleQueue``."""
        return len(self._items)


def modules() -> dict[str, types.ModuleType]:
    """The modules, by name."""
    threading, queue = types.ModuleType("threading"), types.ModuleType("queue")
    for kind in (Lock, RLock, Condition, Event, Semaphore, Thread):
        setattr(threading, kind.__name__, kind)
    threading.BoundedSemaphore = Semaphore  # type: ignore[attr-defined]
    threading.local = Local  # type: ignore[attr-defined]
    threading.TIMEOUT_MAX = TIMEOUT_MAX  # type: ignore[attr-defined]
    threading.current_thread = lambda: Thread.of(hub.task)  # type: ignore[attr-defined]
    threading.main_thread = lambda: Thread.of(  # type: ignore[attr-defined]
        next(task for task in here().proc.tasks if task.name == "main")
    )
    threading.get_ident = lambda: hub.task.ident if hub.task else 0  # type: ignore[attr-defined]
    threading.get_native_id = threading.get_ident  # type: ignore[attr-defined]
    threading.active_count = lambda: len(here().proc.tasks)  # type: ignore[attr-defined]
    threading.enumerate = lambda: [Thread.of(task) for task in here().proc.tasks]  # type: ignore[attr-defined]
    threading._register_atexit = lambda work, *_: None  # type: ignore[attr-defined]
    queue.SimpleQueue = queue.Queue = SimpleQueue  # type: ignore[attr-defined]
    queue.Empty, queue.Full = real_queue.Empty, real_queue.Full  # type: ignore[attr-defined]
    return {"threading": threading, "queue": queue}


__all__ = ["Killed", "modules"]
