"""Hands events to hooks, on a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Iterable

from safe_ckpt.events import Event, Hook

logger = logging.getLogger(__name__)
_MOST_WAITING = 10_000


class Emitter:
    """Hands events to hooks, in order, on a thread of its own, and keeps their failures away from the save.

    The caller waits until the hooks have returned, so that what they record is there when a save is over; but not for one that
    does not return: after ``patience_s`` the caller continues, the log names the hook, and events wait in a queue.

    Args:
        hooks: they receive every event.
        patience_s: how long a call waits for the hooks.
    """

    def __init__(self, hooks: Iterable[Hook], *, patience_s: float = 2.0) -> None:
        self._hooks = list(hooks)
        self._patience_s = patience_s
        self._queue: queue.SimpleQueue[tuple[list[Event], threading.Event] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()
        self._running: Hook | None = None
        self._stuck = False
        self._pid = os.getpid()

    def add(self, hook: Hook) -> None:
        """Add a hook."""
        self._hooks.append(hook)

    def remove(self, hook: Hook) -> None:
        """Remove a hook."""
        with contextlib.suppress(ValueError):
            self._hooks.remove(hook)

    def __call__(self, event: Event) -> None:
        """Hand the event to every hook. On any thread."""
        self.emit([event])

    def emit(self, events: Iterable[Event]) -> None:
        """Hand several events to every hook, one after the other, and wait once. On any thread."""
        events = list(events)
        if not self._start():
            self._deliver(events)  # the interpreter is ending, and lets no thread begin
            return
        if self._queue.qsize() >= _MOST_WAITING:
            return  # a hook has not returned for that long, and was named
        delivered = threading.Event()
        self._queue.put((events, delivered))
        if self._stuck or threading.current_thread() is self._thread:
            return
        if not delivered.wait(self._patience_s):
            self._stuck, seconds = True, self._patience_s
            logger.warning("hook %r has not returned for %.0f s; saves do not wait for it", self._running, seconds)

    def close(self) -> None:
        """End it when the hooks have received everything or after ``patience_s``. Later events are delivered directly."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._patience_s)
            if thread.is_alive():
                logger.warning("hook %r has not returned; events that it did not receive are lost", self._running)

    def _start(self) -> bool:
        with self._lock:
            if self._thread is None or self._pid != os.getpid():
                thread = threading.Thread(target=self._run, name="safe_ckpt-hooks", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    return False
                self._thread, self._pid, self._stuck = thread, os.getpid(), False
        return True

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            events, delivered = item
            self._deliver(events)
            self._stuck = False
            delivered.set()
            del events, delivered, item

    def _deliver(self, events: Iterable[Event]) -> None:
        for event in events:
            for hook in list(self._hooks):
                self._running = hook
                try:
                    hook(event)
                except BaseException:  # also SystemExit: nothing a hook does ends a save
                    logger.warning("hook %r failed and is dropped", hook, exc_info=True)
                    self.remove(hook)  # two threads may drop it at once
        self._running = None
