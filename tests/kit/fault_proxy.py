"""An HTTP/1.1 proxy between clients and one server that counts the requests and does to the n-th what a test wants.

    with FaultProxy(server.endpoint) as proxy:
        proxy.plan(3, "drop", when="after", match=lambda record: record.method == "PUT")
        ...  # a client that uses proxy.endpoint
        assert [record.path for record in proxy.hits] == [...]

Heads and bodies pass as they are, Host included. What it does to a connection is what a client sees when a network or a server
fails: no answer, a reset, an error of S3, half an answer.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import Self

from kit.http_pieces import OPEN, PIECE, GoneError, Head, Side, close_with_reset

_CONNECT_S = 5.0
_STALE_S = 2.0  # servers close connections that are idle; none is used again after that long
_AFTER_ONLY = ("truncated", "flipped", "duplicate")
_ERRORS = {
    "400": ("Bad Request", "ExpiredToken"),
    "404": ("Not Found", "NoSuchKey"),
    "500": ("Internal Server Error", "InternalError"),
    "503": ("Slow Down", "SlowDown"),
    "409": ("Conflict", "OperationAborted"),
    "501": ("Not Implemented", "NotImplemented"),
}
_FAULTS = ("drop", "reset", "timeout", *_AFTER_ONLY, *_ERRORS)
_CONDITIONS = ("if-match", "if-none-match")


@dataclass(kw_only=True)
class Record:
    """One request.

    Attributes:
        number: 1 for the first since the last reset; a duplicate has the number of what it repeats.
        method: GET, PUT and so on.
        path: with the query.
        headers: of the request, names in small letters.
        size: bytes of the body that came from the client; chunked with the sizes of its chunks.
        status: what the server answered; 0 while or when it did not.
        seconds: from the head of the request to the end of the answer; set after that, see ``settle``.
        fault: what was done to it; "" for nothing.
        when: "before" or "after" it reached the server; "" without a fault.
        duplicate: whether the proxy sent it, and no client.
    """

    number: int = 0
    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    size: int = 0
    status: int = 0
    seconds: float = 0.0
    fault: str = ""
    when: str = ""
    duplicate: bool = False


@dataclass
class _Plan:
    left: int
    fault: str
    when: str
    match: Callable[[Record], bool] | None

    def wants(self, record: Record) -> bool:
        """Whether this is the request; counts it."""
        if self.match is not None and not self.match(record):
            return False
        self.left -= 1
        return self.left == 0


class FaultProxy:
    """Listens on 127.0.0.1 while this is entered, and forwards to ``upstream``, an address such as ``http://127.0.0.1:9000``.

    Attributes:
        port: where it listens.
        target: address and port of the server; may be set, and holds for connections to come.
        seen: the requests since the last reset, in the order in which their heads came, and duplicates.
        hits: those of them that a fault was done to.
        hold_s: how long "timeout" waits before it closes the connection.
        later_s: how long after the answer "duplicate" sends the request again.
        slow_s: how long each request is held before it is forwarded.
        bytes_per_second: of each connection, both ways; 0 for no limit.
        on_request: called with the record before the request is forwarded; if it returns False, that is as "drop"
            before, but no hit.
        on_answer: called with the record once the server has answered, before the client gets anything.
        rewrite: called with the record and the body of its answer, as a whole; returns what the client gets instead, or None
            for "there is no such key". Not for bodies in chunks.
    """

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self.target = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.port = 0
        self.hold_s, self.later_s, self.slow_s, self.bytes_per_second = 5.0, 0.5, 0.0, 0
        self.on_request: Callable[[Record], object] | None = None
        self.on_answer: Callable[[Record], object] | None = None
        self.rewrite: Callable[[Record, bytes], bytes | None] | None = None
        self.seen: list[Record] = []
        self.hits: list[Record] = []
        self._plans: list[_Plan] = []
        self._counted = self._under_way = 0
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._down = False
        self._connections: set[_Connection] = set()
        self._threads: set[threading.Thread] = set()
        self._starting = threading.Lock()

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        self._start(self._accept)
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections, what is held and what is still to be repeated, and all threads."""
        self._closed.set()
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes up who accepts
        for connection in self._open():
            connection.cut(reset=False)
        while threads := self._begun():
            threads.pop().join()
        self._listener.close()

    @property
    def endpoint(self) -> str:
        """Its address for clients."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def down(self) -> bool:
        """While true, connections there are and those to come are reset."""
        return self._down

    @down.setter
    def down(self, value: bool) -> None:
        self._down = value
        for connection in self._open() if value else ():
            connection.cut(reset=True)

    def plan(self, n: int, fault: str, when: str = "before", match: Callable[[Record], bool] | None = None) -> None:
        """At the n-th request since the last reset, of those that ``match`` if that is given, do this once.

        Args:
            n: from 1; requests that have been seen already count.
            fault: "drop": the connection is closed in order, without an answer. "reset": by a reset; before, without having
                read the body. "400" (ExpiredToken), "404" (NoSuchKey), "500", "501", "503", "409": an answer of S3.
                "timeout": nothing for ``hold_s``, then as "drop". "truncated": the head of the answer and half of its body;
                without a body as "drop". "flipped": a bit of its body is another one; without a body as "drop". "duplicate":
                the answer as usual, and ``later_s`` after it the same request once more. The last three are always after.
            when: "before": the request does not reach the server. "after": the server has answered, but not to the client.
            match: a predicate on the record, which has neither size nor status yet.
        """
        if fault not in _FAULTS or when not in {"before", "after"}:
            raise ValueError(f"no such fault: {fault} {when}")
        with self._changed:
            past = sum(match is None or match(record) for record in self.seen if not record.duplicate)
            if n <= past:
                raise ValueError(f"request {n} is past: {past} have been seen")
            self._plans.append(_Plan(n - past, fault, "after" if fault in _AFTER_ONLY else when, match))

    def reset(self) -> None:
        """Forget plans and requests, and count from 1."""
        with self._changed:
            self.seen, self.hits, self._plans, self._counted = [], [], [], 0

    def settle(self, seconds: float = 10.0) -> None:
        """Wait until no request and no duplicate is under way."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._under_way == 0, seconds):
                raise TimeoutError(f"{self._under_way} requests are under way after {seconds} s")

    @contextlib.contextmanager
    def arrived(self, record: Record) -> Iterator[None]:
        """A request, from its head to the end of its answer: number it, and say in it which fault it gets."""
        begun = time.monotonic()
        with self._changed:
            self._under_way += 1
            self._counted += 1
            record.number = self._counted
            self.seen.append(record)
            due = [plan for plan in self._plans if plan.wants(record)]
            self._plans = [plan for plan in self._plans if plan.left > 0]
            if due:
                record.fault, record.when = due[0].fault, due[0].when
                self.hits.append(record)
        try:
            yield
        finally:
            record.seconds = time.monotonic() - begun
            self._ended()

    def repeat(self, request: bytes, record: Record) -> None:
        """Send a request again, later."""
        with self._changed:
            self._under_way += 1
        self._start(self._repeat, request, record)

    def _repeat(self, request: bytes, record: Record) -> None:
        copy = Record(
            number=record.number, method=record.method, path=record.path, headers=record.headers, duplicate=True
        )
        try:
            if self._closed.wait(self.later_s):
                return
            with self._changed:
                self.seen.append(copy)
            with contextlib.suppress(OSError, GoneError), socket.create_connection(self.target, _CONNECT_S) as far:
                far.sendall(request)
                copy.size, copy.status = record.size, int(Side(far).answer().first[1])
        finally:
            self._ended()

    def _ended(self) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def _start(self, function: Callable[..., None], *args: Any) -> None:
        def run() -> None:
            try:
                function(*args)
            finally:
                self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="fault proxy", daemon=True)
        with self._starting:  # close() joins none that has not begun
            self._threads.add(thread)
            thread.start()

    def _begun(self) -> set[threading.Thread]:
        with self._starting:
            return self._threads.copy()

    def _open(self) -> list[_Connection]:
        with self._changed:
            return list(self._connections)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            connection = _Connection(self, near)
            with self._changed:
                self._connections.add(connection)
            if self._closed.is_set() or self._down:  # set before it was among those that are cut
                connection.cut(reset=True)
            self._start(self._serve, connection)

    def _serve(self, connection: _Connection) -> None:
        try:
            connection.serve()
        finally:
            with self._changed:
                self._connections.discard(connection)


class _Connection:
    """One connection of a client, and the one to the server that belongs to it."""

    def __init__(self, proxy: FaultProxy, near: socket.socket) -> None:
        self._proxy, self._near = proxy, Side(near)
        self._far: Side | None = None
        self._used = 0.0
        self._over = threading.Event()
        self._reset = False
        self._lock = threading.Lock()

    def cut(self, *, reset: bool) -> None:
        """End it, from another thread."""
        with self._lock:
            self._reset |= reset
            self._over.set()
            with contextlib.suppress(OSError):  # to shut down the reading side tells the client nothing
                self._near.socket.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                if self._far is not None:
                    self._far.socket.shutdown(socket.SHUT_RDWR)

    def serve(self) -> None:
        """Requests one after the other, until one side closes or a fault does."""
        try:
            with contextlib.suppress(GoneError, OSError):
                while self._exchange():
                    pass
        finally:
            self._leave_server()
            with self._lock:
                if self._reset:
                    close_with_reset(self._near.socket)
                self._near.socket.close()

    def _exchange(self) -> bool:
        """One request and its answer; whether there may be another."""
        head = self._near.head()
        self._wait(0)
        record = Record(method=head.first[0], path=head.first[1], headers=head.headers)
        with self._proxy.arrived(record):
            if self._proxy.on_request is not None and self._proxy.on_request(record) is False:
                record.fault, record.when = "drop", "before"
            self._wait(self._proxy.slow_s)
            if (record.fault, record.when) == ("reset", "before"):
                return self._fail(record)
            if "expect" in head.headers:
                self._near.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            if record.when == "before":
                record.size = sum(len(piece) for piece in self._pieces(self._near, head.size()))
                return self._fail(record) and not head.ends_connection
            return self._forward(head, record) and not head.ends_connection

    def _forward(self, head: Head, record: Record) -> bool:
        far = self._server()
        kept = [head.raw] if record.fault == "duplicate" else None
        self._send(far, head, record, kept)
        answer = far.answer()
        record.status = int(answer.first[1])
        size = answer.size_as_answer_to(record.method)
        if self._proxy.on_answer is not None:
            self._proxy.on_answer(record)
        try:
            return self._pass_on(answer, self._pieces(far, size), record) and size != OPEN
        finally:
            self._used = time.monotonic()
            if answer.ends_connection:  # the server may still read from it, to throw that away
                self._leave_server()
            if kept is not None:
                self._proxy.repeat(b"".join(kept), record)

    def _send(self, far: Side, head: Head, record: Record, kept: list[bytes] | None) -> None:
        hears = True
        far.send(head.raw)
        for piece in self._pieces(self._near, head.size()):
            record.size += len(piece)
            if kept is not None:
                kept.append(bytes(piece))
            try:
                if hears:
                    far.send(piece)
            except OSError:  # it may have answered before it heard everything
                hears = False

    def _pass_on(self, answer: Head, body: Iterator[memoryview | bytes], record: Record) -> bool:
        if self._proxy.rewrite is not None and not record.fault:
            return self._rewritten(answer, b"".join(map(bytes, body)), record)
        if record.fault in {"", "duplicate"}:
            self._near.send(answer.raw)
            for piece in body:
                self._near.send(piece)
            return not answer.ends_connection
        whole = b"".join(map(bytes, body)) if record.fault in {"truncated", "flipped"} else b""
        for _ in body:
            pass
        if whole and record.fault == "flipped":
            middle = len(whole) // 2
            self._near.send(answer.raw + whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
            return not answer.ends_connection
        if whole:
            self._near.send(answer.raw + whole[: len(whole) // 2])
        return self._fail(record)

    def _rewritten(self, answer: Head, body: bytes, record: Record) -> bool:
        rewrite = self._proxy.rewrite
        changed = rewrite(record, body) if rewrite is not None else body
        if changed is None:
            self._near.send(_error("404", record))
            return True
        length = b"content-length: %d" % len(changed)
        raw = re.sub(rb"(?i)content-length: *\d+", length, answer.raw) if changed != body else answer.raw
        self._near.send(raw + changed)
        return not answer.ends_connection

    def _fail(self, record: Record) -> bool:
        if record.fault in _ERRORS:
            self._near.send(_error(record.fault, record))
            return True
        if record.fault == "timeout":
            self._wait(self._proxy.hold_s)
        self._reset |= record.fault == "reset"
        raise GoneError

    def _server(self) -> Side:
        if self._far is None or time.monotonic() - self._used > _STALE_S or not self._far.is_quiet():
            try:
                far = socket.create_connection(self._proxy.target, _CONNECT_S)
            except OSError:
                self._reset = True
                raise
            far.settimeout(None)
            self._leave_server()
            self._far = Side(far)
        self._wait(0)
        return self._far

    def _leave_server(self) -> None:
        with self._lock:
            if self._far is not None:
                self._far.socket.close()
            self._far = None

    def _pieces(self, side: Side, size: int) -> Iterator[memoryview | bytes]:
        rate = self._proxy.bytes_per_second
        for piece in side.body(size, min(PIECE, max(1024, rate // 20)) if rate else PIECE):
            self._wait(len(piece) / rate if rate else 0)
            yield piece

    def _wait(self, seconds: float) -> None:
        if self._over.wait(seconds) if seconds > 0 else self._over.is_set():
            raise GoneError


def _error(status: str, record: Record) -> bytes:
    reason, code = _ERRORS[status]
    if status == "409" and any(name in record.headers for name in _CONDITIONS):
        code = "ConditionalRequestConflict"
    text = f"<Error><Code>{code}</Code><Message>of the fault proxy</Message><RequestId>0</RequestId></Error>"
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + (b"" if record.method == "HEAD" else body)


__all__ = ["FaultProxy", "Record"]
