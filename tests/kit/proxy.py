"""A TCP proxy that delays, holds back or cuts what goes through it."""

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections import deque

from kit.hosts import enter

_CHUNK = 1 << 16
_TICK_S = 0.005


class Connection:
    """One connection through the proxy.

    Attributes:
        peer: the address of who connected.
        moved: bytes passed on so far, both ways.
    """

    def __init__(self, proxy, near, far, peer):
        self.peer, self.moved = peer, 0
        self.stalled = self.dead = False
        self.delay_s = None
        self._proxy = proxy
        self._ends = {near: far, far: near}
        self._under_way = {near: deque(), far: deque()}
        self._ended = set()

    def stall(self):
        """From now on no byte moves, and the connection stays."""
        self.stalled = True

    def resume(self):
        """Bytes move again, those held back first."""
        self.stalled = False

    def cut(self):
        """Both sides get a reset."""
        with self._proxy.lock:
            self._close(reset=True)

    def step(self):
        """Take in and pass on what can be. Called by the proxy's thread."""
        if self.dead or self.stalled:
            return
        try:
            for end in self._ends:
                self._take(end)
                self._pass_on(end)
        except OSError:
            self._close(reset=True)
        if len(self._ended) == 2:
            self._close(reset=False)

    def _take(self, end):
        queue = self._under_way[end]
        if sum(len(data) for _, data in queue) > 16 * _CHUNK or (queue and not queue[-1][1]) or end in self._ended:
            return
        with contextlib.suppress(BlockingIOError):
            delay_s = self._proxy.delay_s if self.delay_s is None else self.delay_s
            queue.append((time.monotonic() + delay_s, end.recv(_CHUNK)))

    def _pass_on(self, end):
        queue, other = self._under_way[end], self._ends[end]
        while queue and queue[0][0] <= time.monotonic():
            due, data = queue[0]
            if not data:
                queue.popleft()
                self._ended.add(end)
                other.shutdown(socket.SHUT_WR)
                return
            try:
                sent = other.send(data)
            except BlockingIOError:
                return
            self.moved += sent
            queue.popleft()
            if sent < len(data):
                queue.appendleft((due, data[sent:]))

    def ends(self):
        """Both sockets."""
        return () if self.dead else tuple(self._ends)

    def _close(self, *, reset):
        if self.dead:
            return
        self.dead = True
        for end in self._ends:
            if reset:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()


class Proxy:
    """Listens on ``address`` and passes on to ``target``, a pair of address and port, while this is entered.

    Args:
        target: where to.
        host: a ``Host`` in whose network it lives; this machine's own without one.
        address: where it listens; all addresses by default.
        port: where it listens; any free one by default.

    Attributes:
        port: where it listens.
        delay_s: how much later each chunk arrives than it was sent; may be set at any time.
        connections: those that are open, oldest first.
    """

    def __init__(self, target, *, host=None, address="0.0.0.0", port=0):
        self.port, self.delay_s = port, 0.0
        self.lock = threading.Lock()
        self._target, self._host, self._address = target, host, address
        self._connections = []
        self._stalled = False
        self._stop = threading.Event()
        self._listening = threading.Event()
        self._error = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        self._listening.wait(10)
        if self._error is not None or not self.port:
            raise RuntimeError(f"the proxy does not listen: {self._error}")
        return self

    def __exit__(self, *exc):
        self._stop.set()
        self._thread.join(timeout=10)

    @property
    def connections(self):
        """Those that are open, oldest first."""
        with self.lock:
            self._connections = [one for one in self._connections if not one.dead]
            return list(self._connections)

    def stall(self):
        """No byte moves any more, on connections there are and on those to come."""
        self._stalled = True
        for connection in self.connections:
            connection.stall()

    def resume(self):
        """Bytes move again."""
        self._stalled = False
        for connection in self.connections:
            connection.resume()

    def cut(self):
        """Reset every connection; new ones are welcome."""
        for connection in self.connections:
            connection.cut()

    def _run(self):
        try:
            if self._host is not None:
                enter(self._host.pid, ("net",))
            listener = socket.create_server((self._address, self.port))
        except BaseException as error:
            self._error = error
            self._listening.set()
            return
        with listener:
            listener.setblocking(False)
            self.port = listener.getsockname()[1]
            self._listening.set()
            while not self._stop.is_set():
                self._wait(listener)
                self._accept(listener)
                for connection in self.connections:
                    with self.lock:
                        connection.step()
        self.cut()

    def _wait(self, listener):
        # What is held back or on its way is looked at again with the next tick.
        with selectors.DefaultSelector() as selector, contextlib.suppress(ValueError, OSError):
            selector.register(listener, selectors.EVENT_READ)
            busy = False
            for connection in self.connections:
                busy |= not connection.stalled and any(connection._under_way.values())
                for end in connection.ends() if not connection.stalled else ():
                    if end not in connection._ended:
                        selector.register(end, selectors.EVENT_READ)
            selector.select(_TICK_S if busy else 10 * _TICK_S)

    def _accept(self, listener):
        with contextlib.suppress(BlockingIOError):
            near, peer = listener.accept()
            try:
                far = socket.create_connection(self._target, timeout=5)
            except OSError:
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                near.close()
                return
            for end in (near, far):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(self, near, far, peer)
            connection.stalled = self._stalled
            with self.lock:
                self._connections.append(connection)


__all__ = ["Connection", "Proxy"]
