"""The store in which ranks meet: sealed values, and connections that cannot block their caller.

A ``TCPStore`` refuses values above 8 MiB. So large ones are compressed, and cut into parts where that is not enough.

A ``TCPStore`` has no authentication: anyone who reaches its port can read, write and delete. So every value is sealed with a
secret that the ranks got through their process group's own store. A value that another program has written by mistake, or that
is incomplete, is detected when it is read, and so is one of somebody who reaches this port alone. The seal is no protection
from somebody who reaches the process group's own store as well, which is mostly a ``TCPStore`` too (``MASTER_PORT``): the
secret lies there, and with it any value can be forged. What protects then is that no value is ever executed: all are JSON, and
what is in them is built as data alone.

When the process that hosts a ``TCPStore`` is stopped, or the network is down, every call on a client blocks, whatever its
timeout. So the calls run on a daemon thread of ours and the caller waits for a future. A connection that does not answer is
abandoned, and the next call opens another.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import json
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch.distributed as dist

from safe_ckpt.errors import PeerLostError, SafeCheckpointError, StateError, TamperedError

if TYPE_CHECKING:
    from safe_ckpt.core.coordination.process_groups import Store

_T = TypeVar("_T")
Check = Callable[[], None]
Alive = Callable[[], bool]
_SLICE_S = 0.25
_CONNECT_S = 30.0
_PATIENCE = 3  # times answer_s while the host is known to be alive: after an outage TCP may wait as long again
_MOST_LEFT = 3
_SEAL_BYTES = 16
# Behind the seal: whether what follows is compressed, and the number of parts if it lies elsewhere.
_HEAD_BYTES = _SEAL_BYTES + 3
_PLAIN, _COMPRESSED = b"=", b"z"
_PART_BYTES = 4 << 20  # smaller values go as they are
_MOST_PARTS, _ONE_BY_ONE = 256, 8


class KeyValues(Protocol):
    """The operations of a store: of ``SealedStore``, and of a process group's own store as far as ranks first meet there."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Read a value; waits for it."""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read several values, all of which are there."""

    def add(self, key: str, amount: int) -> int:
        """Count up, and return the sum."""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of ``keys`` are there."""

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all of ``keys`` are there."""

    def delete_key(self, key: str) -> bool:
        """Drop a key. Returns whether it was there."""


class SealedStore:
    """The part of a store's methods that this package uses, with sealed values. Counters are not sealed.

    Args:
        store: where everything is kept.
        secret: the same for all ranks of the session; known to everybody who reads the process group's own store.
    """

    def __init__(self, store: Store, secret: str) -> None:
        self._store = store
        self._secret = hashlib.sha256(secret.encode()).digest()

    def set(self, key: str, value: str) -> None:
        """Write a value.

        Raises:
            StateError: it is larger than can be sent.
        """
        self._store.set(key, self._sealed(key, value))  # type: ignore[arg-type] # the stubs know text only

    def get(self, key: str) -> bytes:
        """Read a value; waits for it as the store does.

        Raises:
            TamperedError: nobody who knows the secret wrote it.
        """
        return self._opened(key, bytes(self._store.get(key)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read several values, all of which are there.

        Raises:
            TamperedError: nobody who knows the secret wrote one of them.
        """
        values = self._store.multi_get(list(keys))
        return [self._opened(key, bytes(value)) for key, value in zip(keys, values, strict=True)]

    def add(self, key: str, amount: int) -> int:
        """Count up, and return the sum."""
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of ``keys`` are there."""
        return self._store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all of ``keys`` are there."""
        self._store.wait(list(keys), timeout)

    def delete_key(self, key: str) -> bool:
        """Drop a key. Returns whether it was there."""
        was_there = self._store.delete_key(key)
        # Looked for, not remembered: another connection may have written it, and nobody may have read it.
        parts = (_part_key(key, number) for number in range(_MOST_PARTS))
        for part in itertools.takewhile(lambda part: self._store.check([part]), parts):
            self._store.delete_key(part)
        return was_there

    def _sealed(self, key: str, value: str) -> bytes:
        """Return the value for the key itself. Write its parts, if it has any: they must be there before it is."""
        data, kind = value.encode(), _PLAIN
        if len(data) > _PART_BYTES:
            data, kind = zlib.compress(data, 1), _COMPRESSED
        count = -(-len(data) // _PART_BYTES) if len(data) > _PART_BYTES else 0
        if count > _MOST_PARTS:
            most = _MOST_PARTS * _PART_BYTES
            message = f"{len(data)} bytes are to go from rank to rank, {most} are the most: save fewer tensors at once"
            raise StateError(key=key, message=message)
        facts = kind + count.to_bytes(2, "big")
        seal = self._seal(key, facts, data)
        if not count:
            return seal + facts + data
        for number in range(count):
            cut = data[number * _PART_BYTES : (number + 1) * _PART_BYTES]
            self._store.set(_part_key(key, number), cut)  # type: ignore[arg-type] # as above
        return seal + facts + self._seal(key, facts, seal)

    def _opened(self, key: str, sealed: bytes) -> bytes:
        seal, facts, data = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:_HEAD_BYTES], sealed[_HEAD_BYTES:]
        if count := int.from_bytes(facts[1:], "big"):
            # First whether a rank of this job has cut it: nobody fetches what a stranger has invented, or waits for it.
            parts = [_part_key(key, number) for number in range(count)]
            if not hmac.compare_digest(data, self._seal(key, facts, seal)) or not self._store.check(parts):
                raise TamperedError(key=key)
            data = b"".join(map(bytes, self._store.multi_get(parts)))
        if not hmac.compare_digest(seal, self._seal(key, facts, data)):
            raise TamperedError(key=key)
        return zlib.decompress(data) if facts[:1] == _COMPRESSED else data

    def _seal(self, key: str, facts: bytes, data: bytes) -> bytes:
        # With the length of the key before it: no other key and value give the same bytes.
        name = key.encode()
        seal = hashlib.blake2b(len(name).to_bytes(4, "big") + name + facts, key=self._secret, digest_size=_SEAL_BYTES)
        seal.update(data)
        return seal.digest()


def _part_key(key: str, number: int) -> str:
    return f"{key}/part/{number}"


def read_present(store: KeyValues, keys: Sequence[str]) -> dict[str, bytes]:
    """The values of those ``keys`` that are there. A few requests where few are missing."""
    if keys and store.check(keys):
        return dict(zip(keys, store.multi_get(keys), strict=True))
    if len(keys) <= _ONE_BY_ONE:
        return {key: bytes(store.get(key)) for key in keys if store.check([key])}
    middle = len(keys) // 2
    return {**read_present(store, keys[:middle]), **read_present(store, keys[middle:])}


class KeyTimeout(Exception):
    """A key did not appear in time."""


class StoreClient:
    """One store connection with one daemon thread, opened when first used, replaced after it was abandoned.

    Args:
        connect: opens a connection; called on its thread.
        name: for thread names and messages.
        answer_s: how long the store's host may take beyond what a call itself may wait.
        store: a connection that is open already, to be used first.
        whose: what it connects to, for messages.
        hosts: the ranks that are lost with it; none where another process may host it, or this very rank does.
        alive: whether the store's host is known to be alive. A call may take longer then, as after an outage.

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
        hosts: tuple[int, ...] = (0,),
        alive: Alive | None = None,
    ) -> None:
        self._connect = connect
        self._first = store
        self._name = name
        self.answer_s = answer_s
        self._whose = whose
        self._hosts = hosts
        self._alive = alive
        self._lock = threading.RLock()
        self._current: _Connection | None = None
        self._left: list[_Connection] = []
        self._ended = False

    def call(
        self, operation: Callable[[KeyValues], _T], *, phase: str, wait_s: float = 0.0, check: Check | None = None
    ) -> _T:
        """Run ``operation`` on the store and return what it returns.

        Args:
            operation: called with the store on that thread.
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
            if self._current is None:
                # A host that is stopped for an hour accepts connections and answers none. That must not cost a thread every
                # few seconds. An abandoned call that has a connection ends by itself.
                self._left = [left for left in self._left if left.thread.is_alive() and left.since is None]
                if len(self._left) >= _MOST_LEFT:
                    raise PeerLostError(phase=phase, ranks=self._hosts, reason=f"{self._whose} does not answer")
                first, self._first = self._first, None
                self._current = _Connection(self._connect, first, self._name)
            connection = self._current
        connection.work.put((operation, future))
        return Pending(self, connection, future, phase)

    def put(self, key: str, value: object, *, phase: str) -> None:
        """Write ``value`` as JSON."""
        self.call(lambda store: store.set(key, json.dumps(value)), phase=phase)

    def get(self, key: str, *, phase: str, wait_s: float, check: Check | None = None) -> Any:
        """Wait for ``key`` and return what its JSON says. For ``wait_s`` and ``check`` see ``call``."""

        def wait_and_get(store: KeyValues) -> bytes:
            store.wait([key], timedelta(seconds=wait_s))
            return bytes(store.get(key))

        return json.loads(self.call(wait_and_get, phase=phase, wait_s=wait_s, check=check))

    def delete(self, keys: Iterable[str], *, phase: str) -> None:
        """Drop keys."""
        self.call(lambda store: [store.delete_key(key) for key in keys], phase=phase)

    def begin_delete(self, keys: Iterable[str], *, phase: str) -> None:
        """Have keys dropped. Each is a request: with thousands of ranks nobody should wait for that."""
        # A process that ends does not wait for it, and must not end in the middle of a request.
        self.begin(lambda store: [store.delete_key(key) for key in keys if not self._ended], phase=phase)

    def acknowledge(self, key: str, *, phase: str) -> None:
        """Increment ``key`` for a host that waits for it. It does not matter if the host has left already."""
        with contextlib.suppress(PeerLostError, KeyTimeout):
            self.call(lambda store: store.add(key, 1), phase=phase)

    def close(self) -> None:
        """Let the thread end. Waits for an idle thread, not for one that is in a call."""
        self._ended = True
        with self._lock:
            connection, self._current = self._current, None
        if connection is not None:
            connection.work.put(None)
            if connection.thread is not threading.current_thread():
                connection.thread.join(timeout=_SLICE_S)

    def wait_for(
        self, connection: _Connection, future: Future[_T], phase: str, wait_s: float, check: Check | None
    ) -> _T:
        """Wait for what ``begin`` started; for ``Pending`` alone."""
        begun = time.monotonic()
        while True:
            since = connection.since
            deadline = max(begun, since or 0.0) + wait_s + self.answer_s
            if since is None and (self._alive is None or self._alive()):
                # Connecting has its own time. It does not show whether the host is alive.
                deadline = begun + _CONNECT_S
            left_s = deadline - time.monotonic()
            # Past it the host may be given more time: that is no reason to look without a pause.
            futures.wait([future], timeout=min(_SLICE_S, left_s) if left_s > 0 else _SLICE_S)
            if future.done():
                return future.result(timeout=0)
            if check is not None:
                check()
            late_s = time.monotonic() - deadline
            if late_s < 0 or connection.since != since:
                continue
            if self._alive is not None and late_s < (_PATIENCE - 1) * self.answer_s and self._alive():
                continue
            reason = f"{self._whose} does not answer for {self.answer_s:.0f} s: its process is stopped, its host "
            reason += "cannot be reached, or it has no file descriptors left (ulimit -n)"
            raise PeerLostError(phase=phase, ranks=self._hosts, reason=reason)

    def broken(self, error: BaseException, phase: str) -> PeerLostError:
        """Return the error of a connection that broke; for ``Pending`` alone."""
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if not self._hosts:
            gone = "is gone: the process that hosts it, such as the launcher (torchrun), has ended or was killed"
            reason = f"{self._whose} {gone}. Start the job again ({reason})"
        return PeerLostError(phase=phase, ranks=self._hosts, reason=reason)

    def abandon(self, connection: _Connection) -> None:
        """Give up a connection that does not answer; for ``Pending`` alone."""
        with self._lock:
            if self._current is connection:
                connection.work.put(None)
                self._current = None
                self._left.append(connection)


class _Connection:
    """One connection and the thread on which its calls run.

    Attributes:
        work: what is to be run; None ends the thread.
        since: when the connection was made, on the monotonic clock; None as long as it is not.
    """

    def __init__(self, connect: Callable[[], KeyValues], store: KeyValues | None, name: str) -> None:
        self.work: queue.SimpleQueue[tuple[Callable[[KeyValues], Any], Future[Any]] | None] = queue.SimpleQueue()
        self.since = time.monotonic() if store is not None else None
        self.thread = threading.Thread(target=self._serve, args=(connect, store), name=f"safe_ckpt-{name}", daemon=True)
        self.thread.start()

    def _serve(self, connect: Callable[[], KeyValues], store: KeyValues | None) -> None:
        while (item := self.work.get()) is not None:
            operation, future = item
            if not future.set_running_or_notify_cancel():
                continue  # the caller has given up
            try:
                if store is None:
                    store = connect()
                    self.since = time.monotonic()
                future.set_result(operation(store))
            except BaseException as error:  # raised in the caller that waits
                future.set_exception(error)


class Pending(Generic[_T]):
    """An operation that was begun and not yet waited for."""

    def __init__(self, store_client: StoreClient, connection: _Connection, future: Future[_T], phase: str) -> None:
        self._store_client = store_client
        self._connection = connection
        self._future = future
        self._phase = phase

    def ready(self, *, wait_s: float, check: Check) -> bool:
        """Wait up to ``wait_s`` until it is over. What ``check`` raises is raised."""
        deadline = time.monotonic() + wait_s
        while not self._future.done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            futures.wait([self._future], timeout=min(_SLICE_S, left_s))
            check()
        return True

    def abandon(self) -> None:
        """Stop waiting for it. The next call must not queue up behind it."""
        if not self._future.done():
            self._store_client.abandon(self._connection)

    def result(self, *, wait_s: float = 0.0, check: Check | None = None) -> _T:
        """Wait for it and return what it returned. Raises as ``StoreClient.call`` does."""
        try:
            return self._store_client.wait_for(self._connection, self._future, self._phase, wait_s, check)
        except BaseException as error:
            # A signal handler may raise anything here, and ``check`` what is ours: that says nothing of the connection.
            told = self._future.done() and not self._future.cancelled() and self._future.exception() is error
            if told and isinstance(error, dist.DistStoreError):
                raise KeyTimeout(str(error)) from error
            broken = told and isinstance(error, dist.DistNetworkError | OSError)
            if broken or not self._future.done():
                # The thread may be in a long wait. The next call must not queue up behind it.
                self._future.cancel()  # if it has not begun yet, it never will
                self._store_client.abandon(self._connection)
            if broken and not isinstance(error, SafeCheckpointError):
                raise self._store_client.broken(error, self._phase) from error
            raise
