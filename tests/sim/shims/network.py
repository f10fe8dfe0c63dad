"""``socket`` and ``torch.distributed`` of the simulated processes: hosts with addresses, and the store in which ranks meet.

A store lives in the process that hosts it. A request takes time; it waits while the network is cut or the host is stopped.
Where the process is dead the connection breaks; where its host lost power, nothing answers before it is up again. A lost answer
is one whose request was carried out: the connection is broken then, as TCP has it, and nobody repeats a request by itself.
"""

from __future__ import annotations

import socket as real_socket
import types
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as real_dist
from typing_extensions import Self

from sim.world import here, hub

_LATENCY_S = 0.0008
_QUICKLY = 0.4


class Network:
    """What connects the hosts.

    Attributes:
        servers: the stores, by host and port.
        losing: how likely an answer is lost, and a request delayed.
    """

    def __init__(self, world: Any) -> None:
        self.world = world
        self.servers: dict[tuple[int, int], Server] = {}
        self.losing = 0.0
        self.delays = 0.0
        self._ports = 20000

    def port(self) -> int:
        """A free one."""
        self._ports += 1
        return self._ports

    def host_of(self, task: Any, address: str) -> Any:
        """Who has an address; None where nobody has."""
        if address in ("localhost", "127.0.0.1", "::1", task.proc.host.name, ""):
            return task.proc.host
        for host in self.world.hosts:
            if address in (host.name, f"10.0.0.{host.number + 1}"):
                return host
        return None

    def travel(self, task: Any, host: Any) -> None:
        """One way, of a request or an answer."""
        world = self.world
        pause = world.rng.expovariate(1 / _LATENCY_S) if host is not task.proc.host else 0.0
        if pause == 0.0 and world.rng.random() < _QUICKLY:
            pause = _LATENCY_S / 4
        if self.delays and world.rng.random() < self.delays:
            pause += world.rng.uniform(0.05, 2.0)
        if pause:
            task.sleep(pause)
        while host is not task.proc.host and (end := max(host.cut_off, task.proc.host.cut_off)) > world.now:
            task.sleep(end - world.now + world.rng.uniform(0.0, 1.0))


class Server:
    """A store's keys."""

    def __init__(self, proc: Any, port: int) -> None:
        self.proc, self.host, self.boot, self.port = proc, proc.host, proc.host.boot, port
        self.values: dict[str, bytes] = {}
        self.waiters: list[Any] = []
        proc.world.net.servers[proc.host.number, port] = self
        proc.at_end.append(self._end)

    def _end(self) -> None:
        for task in self.waiters:
            self.proc.world.wake(task)
        world = self.proc.world
        world.net.servers.pop((self.host.number, self.port), None)

    def changed(self) -> None:
        """Let those that wait look again."""
        waiters, self.waiters = self.waiters, []
        for task in waiters:
            self.proc.world.wake(task)


class TCPStore:
    """See ``torch.distributed``."""

    def __init__(
        self,
        host: str = "",
        port: int = 0,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = timedelta(seconds=300),
        wait_for_workers: bool = True,
        *,
        use_libuv: bool = True,
        master_listen_fd: int | None = None,
        server: Server | None = None,
    ) -> None:
        del world_size, wait_for_workers, use_libuv, master_listen_fd
        task = here()
        self._timeout_s = timeout.total_seconds()
        self._broken = False
        if server is not None:
            self._server = server
        elif is_master:
            self._server = Server(task.proc, port)
        else:
            net = task.world.net
            target = net.host_of(task, host)
            if target is not None:
                net.travel(task, target)
            found = net.servers.get((target.number, port)) if target is not None else None
            if found is None or not found.proc.alive:
                raise real_dist.DistNetworkError(f"nobody listens at {host}:{port}")
            self._server = found

    def _call(self, work: Callable[[dict[str, bytes]], Any], keys: Sequence[str] = (), wait_s: float = 0.0) -> Any:
        task, server = here(), self._server
        net = task.world.net
        if self._broken:
            raise real_dist.DistNetworkError("Broken pipe")
        net.travel(task, server.host)
        self._reach(task, server)
        end = task.world.now + wait_s
        while any(key not in server.values for key in keys):
            left = end - task.world.now
            if left <= 0:
                net.travel(task, server.host)
                raise real_dist.DistStoreError(f"wait timeout after {wait_s:g} s, keys: {', '.join(keys)}")
            server.waiters.append(task)
            task.wait(left)
            if task in server.waiters:
                server.waiters.remove(task)
            self._reach(task, server)
        result = work(server.values)
        if net.losing and server.host is not task.proc.host and task.world.rng.random() < net.losing:
            self._broken = True
            task.world.log("answer lost", task.proc.name)
            raise real_dist.DistNetworkError("Connection reset by peer")
        net.travel(task, server.host)
        self._reach(task, server)
        return result

    def _reach(self, task: Any, server: Server) -> None:
        while server.proc.paused and server.proc.alive:
            task.sleep(0.25)
        if server.proc.alive:
            return
        # A host that lost power answers nothing; one that is up again knows nothing of the connection.
        while server.proc.ended == "power" and server.host.boot == server.boot:
            task.sleep(1.0)
        self._broken = True
        raise real_dist.DistNetworkError("Connection reset by peer")

    def set(self, key: str, value: Any) -> None:
        """See ``torch.distributed.Store``."""
        data = value.encode() if isinstance(value, str) else bytes(value)

        def work(values: dict[str, bytes]) -> None:
            values[key] = data
            self._server.changed()

        self._call(work)

    def get(self, key: str) -> bytes:
        """See ``torch.distributed.Store``."""
        return self._call(lambda values: values[key], [key], self._timeout_s)  # type: ignore[no-any-return]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """See ``torch.distributed.Store``."""
        return self._call(lambda values: [values[key] for key in keys], keys, self._timeout_s)  # type: ignore[no-any-return]

    def add(self, key: str, amount: int) -> int:
        """See ``torch.distributed.Store``."""

        def work(values: dict[str, bytes]) -> int:
            total = int(values.get(key, b"0")) + amount
            values[key] = str(total).encode()
            self._server.changed()
            return total

        return self._call(work)  # type: ignore[no-any-return]

    def check(self, keys: list[str]) -> bool:
        """See ``torch.distributed.Store``."""
        return self._call(lambda values: all(key in values for key in keys))  # type: ignore[no-any-return]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See ``torch.distributed.Store``."""
        self._call(lambda _: None, keys, timeout.total_seconds() if timeout is not None else self._timeout_s)

    def delete_key(self, key: str) -> bool:
        """See ``torch.distributed.Store``."""
        return self._call(lambda values: values.pop(key, None) is not None)  # type: ignore[no-any-return]


class ProcessGroup:
    """See ``torch.distributed``."""

    group_name = "0"

    def _get_backend(self, device: Any) -> Any:
        raise RuntimeError(f"there are no backends for {device}")


class _Groups:
    @property
    def WORLD(self) -> Any:  # noqa: N802 - torch's name
        return here().proc.facts.get("world group")


class _Listening:
    def __init__(self, address: str, port: int) -> None:
        self._name = (address or "0.0.0.0", port)

    def getsockname(self) -> tuple[str, int]:
        return self._name

    def detach(self) -> int:
        return self._name[1]

    def close(self) -> None:
        pass


class _Probe:
    """A datagram socket: it tells which address this host has."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def connect(self, _: Any) -> None:
        pass

    def getsockname(self) -> tuple[str, int]:
        return (f"10.0.0.{here().proc.host.number + 1}", 9)

    def close(self) -> None:
        pass


def _create_server(address: tuple[str, int], **_: Any) -> _Listening:
    return _Listening(address[0], address[1] or here().world.net.port())


def _create_connection(address: tuple[Any, int], timeout: float = 1.0) -> _Probe:
    task = here()
    name = address[0].decode() if isinstance(address[0], bytes) else address[0]
    net = task.world.net
    host = net.host_of(task, name)
    if host is None or (host is not task.proc.host and max(host.cut_off, task.proc.host.cut_off) > task.world.now):
        task.sleep(timeout)
        raise TimeoutError("timed out")
    net.travel(task, host)
    if (host.number, address[1]) not in net.servers:
        raise ConnectionRefusedError("Connection refused")
    return _Probe()


def modules() -> dict[str, types.ModuleType]:
    """The modules, by name."""
    socket = types.ModuleType("socket")
    vars(socket).update(vars(real_socket))
    socket.gethostname = lambda: here().proc.host.name  # type: ignore[attr-defined]
    socket.create_server = _create_server  # type: ignore[attr-defined]
    socket.create_connection = _create_connection  # type: ignore[attr-defined]
    socket.socket = _Probe  # type: ignore[attr-defined]
    socket.has_dualstack_ipv6 = lambda: False  # type: ignore[attr-defined]
    socket.if_nameindex = list  # type: ignore[attr-defined]
    socket.getaddrinfo = lambda *_, **__: []  # type: ignore[attr-defined]
    dist = types.ModuleType("torch.distributed")
    vars(dist).update(vars(real_dist))
    rooms = types.SimpleNamespace(_get_default_store=lambda: here().proc.facts["meeting"])
    facts = {
        "is_available": lambda: True,
        "is_initialized": lambda: hub.task is not None and here().proc.facts.get("world group") is not None,
        "get_rank": lambda *_: here().proc.facts["rank"],
        "get_world_size": lambda *_: here().proc.facts["size"],
        "group": _Groups(),
        "ProcessGroup": ProcessGroup,
        "TCPStore": TCPStore,
        "Store": TCPStore,
        "distributed_c10d": rooms,
    }
    vars(dist).update(facts)
    top = types.ModuleType("torch")
    vars(top).update(vars(torch))
    top.distributed = dist  # type: ignore[attr-defined]
    return {"socket": socket, "torch": top, "torch.distributed": dist}
