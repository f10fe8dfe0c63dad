"""A connection to the store that can never block its caller for longer than the caller allows.

When the process that hosts a ``TCPStore`` is stopped, or the network is down, every call on a client blocks, whatever
timeout the call was given. So the calls run on a daemon thread of ours, the caller waits for a future, and a connection that
does not answer is left to its fate: the next call opens another.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Generic, TypeAlias, TypeVar

import torch.distributed as dist

from safe_ckpt.core.coordination.sealed_store import KeyValues
from safe_ckpt.errors import PeerLostError, SafeCheckpointError

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
Check = Callable[[], None]
Alive = Callable[[], bool]
_SLICE_S = 0.25
_CONNECT_S = 30.0
_PATIENCE = 3  # times answer_s for a host that is heard of otherwise: after an outage TCP may wait as long again
_MOST_LEFT = 3
_Work: TypeAlias = "queue.SimpleQueue[tuple[Callable[[KeyValues], Any], Future[Any]] | None]"


class KeyTimeout(Exception):
    """A key did not appear in time."""


class StoreClient:
    """One store connection with one daemon thread, opened when first used, replaced after it was abandoned.

    Args:
        connect: opens a connection; called on the channel's thread.
        name: for thread names and messages.
        answer_s: how long the store's host may take beyond what a call itself may wait.
        store: a connection that is open already, to be used first.
        whose: what it connects to, for messages.
        alive: whether the store's host is heard of in another way: then a call may take longer, as after an outage.

    Attributes:
        answer_s: see there; may be changed.
    """

    def __init__(
        self,
        connect: Callable[[], KeyValues],
        *,
        name: str,
        answer_s: float,
        store: KeyValues | None = None,
        whose: str = "the store on rank 0",
        alive: Alive | None = None,
    ) -> None:
        self._connect = connect
        self._first = store
        self._name = name
        self.answer_s = answer_s
        self._whose = whose
        self._alive = alive
        self._lock = threading.Lock()
        self._work: _Work | None = None
        self._thread: threading.Thread | None = None
        self._connected = Connected()
        self._left: list[tuple[threading.Thread, Connected]] = []

    def call(
        self, operation: Callable[[KeyValues], _T], *, phase: str, wait_s: float = 0.0, check: Check | None = None
    ) -> _T:
        """Run ``operation`` on the store and return what it returns.

        Args:
            operation: called with the store on the channel's thread.
            phase: what this is for; named in errors.
            wait_s: how long the operation itself may wait for a key.
            check: called now and then while waiting; raises when waiting has become pointless.

        Raises:
            KeyTimeout: the operation's own wait ended.
            PeerLostError: the store's host is dead or does not answer, or ``check`` raised.
        """
        return self.begin(operation, phase=phase).result(wait_s=wait_s, check=check)

    def begin(self, operation: Callable[[KeyValues], _T], *, phase: str) -> Pending[_T]:
        """Start ``operation`` without waiting for it. What is begun or called afterwards queues up behind it."""
        future: Future[_T] = Future()
        with self._lock:
            if self._work is None:
                self._refuse_too_many(phase)
                self._work = self._start()
            work, connected = self._work, self._connected
        work.put((operation, future))
        return Pending(self, work, connected, future, phase)

    def _refuse_too_many(self, phase: str) -> None:
        # A host that is stopped for an hour accepts connections and answers none: that must not cost a thread every few
        # seconds. What was left in a wait has a connection, and ends by itself.
        self._left = [(thread, at) for thread, at in self._left if thread.is_alive() and at.at is None]
        if len(self._left) >= _MOST_LEFT:
            raise PeerLostError(phase=phase, ranks=(0,), reason=f"{self._whose} does not answer")

    def get(self, key: str, *, phase: str, wait_s: float, check: Check | None = None) -> bytes:
        """Wait for ``key`` and return its value."""

        def wait_and_get(store: KeyValues) -> bytes:
            store.wait([key], timedelta(seconds=wait_s))
            return bytes(store.get(key))

        return self.call(wait_and_get, phase=phase, wait_s=wait_s, check=check)

    def acknowledge(self, key: str, *, phase: str) -> None:
        """Count up ``key``: a courtesy to a host that waits for it. One that has left already is not missed."""
        with contextlib.suppress(PeerLostError, KeyTimeout):
            self.call(lambda store: store.add(key, 1), phase=phase)

    def close(self) -> None:
        """Let the thread end; waits for one that is free, not for one that sits in a call."""
        with self._lock:
            work, self._work = self._work, None
            thread, self._thread = self._thread, None
        if work is not None:
            work.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=_SLICE_S)

    def settle(
        self, work: object, connected: Connected, future: Future[_T], phase: str, wait_s: float, check: Check | None
    ) -> _T:
        """Wait for what ``begin`` started; for ``Pending`` alone."""
        try:
            return self._await(connected, future, phase, wait_s, check)
        except (dist.DistNetworkError, OSError) as error:
            if isinstance(error, SafeCheckpointError):  # what ``check`` raised, or connecting
                self._abandon(work)
                raise
            self._abandon(work)
            raise PeerLostError(phase=phase, ranks=(0,), reason=_first_line(error)) from error
        except dist.DistStoreError as error:
            raise KeyTimeout(str(error)) from error
        except BaseException:
            # The thread may sit in a wait for long; whoever calls next must not queue up behind it.
            if not future.done():
                future.cancel()  # if it has not begun yet, it never will
                self._abandon(work)
            raise

    def _await(self, connected: Connected, future: Future[_T], phase: str, wait_s: float, check: Check | None) -> _T:
        begun = time.monotonic()
        while True:
            since = connected.at
            deadline = max(begun, since or 0.0) + wait_s + self.answer_s
            if since is None and (self._alive is None or self._alive()):
                # Connecting has its own time. It says nothing about whether the host lives.
                deadline = begun + _CONNECT_S
            futures.wait([future], timeout=max(0.0, min(_SLICE_S, deadline - time.monotonic())))
            if future.done():
                return future.result(timeout=0)
            if check is not None:
                check()
            late_s = time.monotonic() - deadline
            if late_s >= 0 and connected.at == since and not self._may_take_longer(late_s):
                reason = (
                    f"{self._whose} does not answer for {self.answer_s:.0f} s: its process is stopped, its host cannot "
                )
                reason += "be reached, or it has no file descriptors left (ulimit -n)"
                raise PeerLostError(phase=phase, ranks=(0,), reason=reason)

    def _may_take_longer(self, late_s: float) -> bool:
        return self._alive is not None and late_s < (_PATIENCE - 1) * self.answer_s and self._alive()

    def _start(self) -> _Work:
        work: _Work = queue.SimpleQueue()
        first, self._first = self._first, None
        self._connected = Connected()
        arguments = (self._connect, work, first, self._connected)
        name = f"safe_ckpt-{self._name}"
        self._thread = threading.Thread(target=_serve, args=arguments, name=name, daemon=True)
        self._thread.start()
        return work

    def leave(self, work: object) -> None:
        """Give up a connection that does not answer; for ``Pending`` alone."""
        self._abandon(work)

    def _abandon(self, work: object) -> None:
        with self._lock:
            if self._work is not None and self._work is work:
                self._work.put(None)
                self._work = None
                if self._thread is not None:
                    self._left.append((self._thread, self._connected))


class Connected:
    """Since when a connection stands, on the monotonic clock; None as long as it does not."""

    def __init__(self) -> None:
        self.at: float | None = None


class Pending(Generic[_T]):
    """An operation that was begun and not yet waited for."""

    def __init__(
        self, store_client: StoreClient, work: object, connected: Connected, future: Future[_T], phase: str
    ) -> None:
        self._store_client = store_client
        self._work = work
        self._connected = connected
        self._future = future
        self._phase = phase

    def ready(self, *, wait_s: float, check: Check | None = None) -> bool:
        """Wait up to ``wait_s`` until it is over. What ``check`` raises is raised."""
        deadline = time.monotonic() + wait_s
        while not self._future.done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            futures.wait([self._future], timeout=min(_SLICE_S, left_s))
            if check is not None:
                check()
        return True

    def abandon(self) -> None:
        """Nobody waits for it any more: what comes next must not queue up behind it."""
        if not self._future.done():
            self._store_client.leave(self._work)

    def result(self, *, wait_s: float = 0.0, check: Check | None = None) -> _T:
        """Wait for it and return what it returned. Raises as ``StoreClient.call`` does."""
        if self._future.done() and self._future.exception() is None:
            return self._future.result(timeout=0)
        return self._store_client.settle(self._work, self._connected, self._future, self._phase, wait_s, check)


class LocalChannel(StoreClient):
    """For a world of one rank: the store is in this process, so calls run on the caller's thread."""

    def __init__(self, store: KeyValues) -> None:
        super().__init__(lambda: store, name="local", answer_s=0.0)
        self._store = store

    def call(
        self,
        operation: Callable[[KeyValues], _T],
        *,
        phase: str,  # noqa: ARG002
        wait_s: float = 0.0,  # noqa: ARG002
        check: Check | None = None,  # noqa: ARG002
    ) -> _T:
        """Run ``operation`` on the store at once."""
        try:
            return operation(self._store)
        except dist.DistStoreError as error:
            raise KeyTimeout(str(error)) from error


def _serve(connect: Callable[[], KeyValues], work: _Work, store: KeyValues | None, connected: Connected) -> None:
    if store is not None:
        connected.at = time.monotonic()
    while (item := work.get()) is not None:
        operation, future = item
        if not future.set_running_or_notify_cancel():
            continue  # whoever asked for it has given up
        try:
            if store is None:
                store = connect()
                connected.at = time.monotonic()
            future.set_result(operation(store))
        except BaseException as error:  # whatever it is, it belongs to the caller that waits
            future.set_exception(error)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
