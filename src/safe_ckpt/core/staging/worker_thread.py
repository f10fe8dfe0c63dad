"""A thread that does one thing after the other; and one that does a thing that may never end.

The first is kept, because starting a thread waits for the interpreter lock, which takes milliseconds on a busy machine.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_LOOK_S = 0.1
_LEAVE_S = 5.0
_all: weakref.WeakSet[Background[Any]] = weakref.WeakSet()


class StuckError(OSError):
    """A call did not end in time: a file system, a store or a driver gives no answer."""

    def __str__(self) -> str:
        return str(self.strerror)


class Refused(RuntimeError):
    """It will not be done: the system gives no more threads, or the thread was ended."""


class Background(Generic[_T]):
    """One daemon thread, started ahead or when it is first needed. Every method may be called on any thread.

    Args:
        name: of the thread.
        work: called there with everything that is put in. What it raises is logged.
    """

    def __init__(self, name: str, work: Callable[[_T], None]) -> None:
        self._name = name
        self._work = work
        # Reentrant: a signal's handler may end it in the middle of a call on the same thread.
        self._changing = threading.RLock()
        self._waiting: queue.SimpleQueue[_T | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = False
        _all.add(self)

    def start(self) -> None:
        """Start the thread if it does not run yet.

        Raises:
            Refused: the system gives no more threads.
        """
        with self._changing:
            if self._thread is not None or self._ended:
                return
            waiting: queue.SimpleQueue[_T | None] = queue.SimpleQueue()
            self._waiting = waiting
            thread = threading.Thread(target=self._run, args=(waiting,), name=self._name, daemon=True)
            try:
                thread.start()
                self._thread = thread
            except BaseException as error:
                # Ctrl-C came while this waited for the thread, which may run. It ends, and the next start makes another one.
                self._thread = None
                waiting.put(None)
                if isinstance(error, RuntimeError):
                    raise Refused(str(error)) from error
                raise

    def put(self, item: _T) -> None:
        """Have it done, after what was put in before.

        Raises:
            Refused: it will not be done.
        """
        with self._changing:
            self.start()
            if not self._ended:
                self._waiting.put(item)
            if self._ended:
                raise Refused(f"{self._name} was ended")

    def offer(self, item: _T) -> None:
        """Have it done if the thread runs; else never. Unlike ``put`` this waits for no lock.

        A thread that others wait for needs that: one of them may hold the lock, in ``put``, while a signal's handler or the
        garbage collector waits for a save.
        """
        if self._thread is not None and not self._ended:
            self._waiting.put(item)

    def end(self) -> None:
        """Let the thread end when it has done all that was put in. Does not wait for that."""
        with self._changing:
            self._ended = True
            self._waiting.put(None)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether this is called on the thread."""
        return self._thread is threading.current_thread()

    def forget(self) -> None:
        """In a forked process: the thread does not exist, and a lock that another thread held is never released."""
        self._changing, self._thread, self._ended = threading.RLock(), None, True

    def join(self, timeout_s: float) -> None:
        """Wait for its end."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def drain(
        self,
        progress: Callable[[], object],
        limit_s: float,
        *,
        extend: bool,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait for its end.

        Args:
            progress: gives something else as long as there is progress.
            limit_s: wait this long at most.
            extend: this long from the last progress on.
            is_over: whether to wait no longer, whatever the limit is.
        """
        seen, since = progress(), time.monotonic()
        while self.is_alive and time.monotonic() - since <= limit_s and not is_over():
            self.join(_LOOK_S)
            if extend and (now := progress()) != seen:
                seen, since = now, time.monotonic()

    def _run(self, waiting: queue.SimpleQueue[_T | None]) -> None:
        while True:
            item = waiting.get()
            if item is None:
                return
            try:
                self._work(item)
            except BaseException:  # later work still needs the thread
                logger.exception("%s failed", self._name)
            del item  # an idle thread must not keep alive what it worked on


def bounded(action: Callable[[], _T], limit_s: float, stop: threading.Event | None = None) -> _T:
    """Run ``action`` on a thread of its own and wait for it, at most ``limit_s``.

    Args:
        action: what to do.
        limit_s: how long.
        stop: set on Ctrl-C, so that ``action`` ends: what still writes must end before its folder is removed.

    Raises:
        StuckError: it did not end in time; its thread continues.
        BaseException: what ``action`` raised.
    """
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:  # it belongs to the caller that waits
            outcome.set_exception(error)

    threading.Thread(target=run, name="safe_ckpt-bounded", daemon=True).start()
    try:
        wait([outcome], limit_s)
    except BaseException:
        if stop is not None:
            stop.set()
            wait([outcome], _LEAVE_S)
        raise
    if not outcome.done():
        raise StuckError(errno.ETIMEDOUT, f"no answer within {limit_s:g} s")
    return outcome.result()


def _forget_all() -> None:
    for background in list(_all):
        background.forget()


os.register_at_fork(after_in_child=_forget_all)
