"""How the ranks find each other: rank 0 hosts a store of ours and makes its address known through the default store.

Every attempt of every rank carries a nonce of its own, so an earlier attempt that failed on some ranks cannot be mistaken for
this one. A session that is open already is reused if every rank still has it. Each rank reports which one it has, and rank 0
decides, because Python may have collected its last user on some ranks only.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import ipaddress
import json
import logging
import os
import queue
import resource
import secrets
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from safe_ckpt.config import Network, Timeouts
from safe_ckpt.core.coordination import process_groups
from safe_ckpt.core.coordination.reminder import Reminder
from safe_ckpt.core.coordination.rounds import from_wire, to_wire
from safe_ckpt.core.coordination.store import KeyTimeout, KeyValues, SealedStore, StoreClient
from safe_ckpt.errors import ConfigError, PeerLostError, RendezvousTimeout, TamperedError
from safe_ckpt.machine import machine_id

logger = logging.getLogger(__name__)
_PHASE = "first meeting of the ranks"
_WAITING = (
    f"{_PHASE}: waiting for ranks %s. All processes must make this call (Checkpointer, register, install, fit, train), not "
    "one of them alone"
)
_READ_S = 2.0
# Behind a knock that was answered. The server may look up names, and a lookup that fails takes 5 s or 10.
_CONNECT_S = 20.0
_CONNECTIONS = 4  # of one rank: calls, heartbeat, saves, and one for signals or a gather
_SPARE = 128  # file descriptors for everything else that this process will open
_answered: dict[tuple[str, int], str] = {}  # the last word of each rank that was answered: it may still stand there


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Where a rank runs."""

    host: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """How to reach the session's store.

    Attributes:
        id: unique to the session.
        connect: opens one more connection.
        store: a connection that is open already; on rank 0 the hosted store, which lives as long as this reference.
        peers: where the ranks run; all of them on rank 0, rank 0 alone elsewhere.
    """

    id: str
    connect: Callable[[], KeyValues]
    store: KeyValues
    peers: Mapping[int, Peer]


def no_store() -> KeyValues:
    """In place of a connection if there is one rank alone."""
    raise ValueError("one rank alone has no store")


def rendezvous(
    group: process_groups.Group, timeouts: Timeouts, where: Network, have: str = "", call: int = -1
) -> Rendezvous | int:
    """Find the other ranks of ``group``. Every rank calls this.

    Args:
        group: the ranks.
        timeouts: how long to wait.
        where: where rank 0 listens.
        have: the session of this group that this rank has open; "" for none.
        call: the number of the newest call there.

    Returns:
        A new session's store; or where all ranks have the same one, which then serves again, rank 0's ``call``.

    Raises:
        RendezvousTimeout: some did not come within ``barrier_s``; names them.
        PeerLostError: rank 0's store cannot be reached.
        ConfigError: rank 0 cannot listen where it is to.
    """
    if group.meeting_store is None:
        raise ValueError("a group of several ranks needs a store to meet in")
    meeting = cast("KeyValues", group.meeting_store)
    # The default store may be hosted by a process outside of this group, and that process may be stopped.
    store_client = StoreClient(
        lambda: meeting,
        name="meeting",
        answer_s=timeouts.peer_stall_s,
        whose="the process group's own store",
        hosts=(),
    )
    try:
        if group.rank == 0:
            return _Host(group, timeouts, where, store_client, have, call).run()
        welcome = _ask(group, timeouts, store_client, have)
    finally:
        store_client.close()
    return int(welcome["again"]) if "again" in welcome else _join(group, timeouts, welcome)


class _Host:
    """Rank 0's part: learn who comes, decide whether the old session serves, else host a store and wait for all."""

    def __init__(
        self,
        group: process_groups.Group,
        timeouts: Timeouts,
        where: Network,
        store_client: StoreClient,
        have: str,
        call: int,
    ) -> None:
        self._root, self._size = f"safe_ckpt/{group.name}", group.size
        self._timeouts, self._where, self._store_client = timeouts, where, store_client
        self._have, self._call = have, call
        self._deadline = time.monotonic() + timeouts.barrier_s
        self._came: dict[int, Mapping[str, Any]] = {}  # the newest word of each rank

    def run(self) -> Rendezvous | int:
        """See ``rendezvous``."""
        if self._have:
            self._poll(lambda: len(self._came) == self._size - 1 or not self._have_it())
            if self._have_it():
                self._answer(json.dumps({"again": self._call}))
                return self._call
        return self._host()

    def _have_it(self) -> bool:
        """Whether all that came so far have the old session."""
        return all(word["have"] == self._have for word in self._came.values())

    def _poll(self, done: Callable[[], bool], *, welcome: str = "", off: Callable[[float], None] | None = None) -> None:
        pause_s = 0.001
        remind = Reminder(_WAITING, self._timeouts.peer_stall_s / 2, self._timeouts.barrier_s)
        while not done():
            remind(lambda: {*range(1, self._size)} - self._came.keys())
            if time.monotonic() >= self._deadline:
                (off or self._call_off)(self._timeouts.barrier_s)
            self._store_client.call(self._receive, phase=_PHASE)
            if welcome:
                self._answer(welcome)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.05)

    def _receive(self, meeting: KeyValues) -> None:
        # Rank by rank: one that is late must not keep the others from their welcome.
        for rank in range(1, self._size):
            key = f"{self._root}/hello/{rank}"
            if meeting.check([key]):
                word = json.loads(meeting.get(key))
                if word["gone"]:
                    self._came.pop(rank, None)
                elif word["nonce"] != _answered.get((self._root, rank)):
                    self._came[rank] = word

    def _answer(self, text: str) -> None:
        new = {
            rank: word["nonce"]
            for rank, word in self._came.items()
            if word["nonce"] != _answered.get((self._root, rank))
        }
        _answered.update({(self._root, rank): nonce for rank, nonce in new.items()})

        def reply(meeting: KeyValues) -> None:
            for nonce in new.values():
                meeting.set(f"{self._root}/welcome/{nonce}", text)

        if new:
            self._store_client.call(reply, phase=_PHASE)

    def _call_off(self, timeout_s: float) -> None:
        missing = tuple(rank for rank in range(1, self._size) if rank not in self._came)
        self._answer(json.dumps({"missing": missing}))
        raise RendezvousTimeout(phase=_PHASE, seconds=timeout_s, missing=missing)

    def _refuse(self, error: Exception) -> None:
        """The others need not wait for a store that will not be: those that are here, or come soon, get the error."""
        self._deadline = min(self._deadline, time.monotonic() + _READ_S)
        text = json.dumps({"error": to_wire(error, rank=0, phase=_PHASE)})
        with contextlib.suppress(RendezvousTimeout):
            self._poll(lambda: len(self._came) == self._size - 1, welcome=text)
        self._answer(text)

    def _host(self) -> Rendezvous:
        try:
            listening, welcome = self._listen()
        except Exception as error:
            self._refuse(error)
            raise
        own = process_groups.host_store(listening)
        store = SealedStore(own, welcome["secret"])
        store.set("token", welcome["token"])
        joining = [f"joined/{rank}" for rank in range(1, self._size)]
        self._poll(
            lambda: store.add("joined", 0) >= self._size - 1 and store.check(joining),
            welcome=json.dumps(welcome),
            off=lambda seconds: _call_off(store, self._size, seconds),
        )
        store.set("met", json.dumps([]))
        joined = {rank: json.loads(store.get(f"joined/{rank}")) for rank in range(1, self._size)}
        peers = {rank: Peer(host=value["host"], pid=value["pid"]) for rank, value in joined.items()}
        connect = _Connector(welcome["local"], welcome["port"], welcome["token"], welcome["secret"])
        return Rendezvous(id=welcome["token"], connect=connect, store=store, peers=peers)

    def _listen(self) -> tuple[socket.socket, dict[str, Any]]:
        problem = ensure_descriptors(_CONNECTIONS * self._size + _SPARE)
        if problem:
            logger.warning("%d ranks will connect to rank 0, and %s", self._size, problem)
        listening = listen(self._where.interface, self._where.port)
        address, port = listening.getsockname()[:2]
        local = ["127.0.0.1"] if address in process_groups.EVERYWHERE else [address]
        welcome = {"addresses": addresses(address), "local": local, "port": port, "host": machine_id()}
        return listening, {**welcome, "pid": os.getpid(), "token": uuid.uuid4().hex, "secret": secrets.token_hex(32)}


def _call_off(store: KeyValues, size: int, timeout_s: float) -> None:
    missing = tuple(rank for rank in range(1, size) if not store.check([f"joined/{rank}"]))
    store.set("met", json.dumps(missing))
    # The ranks that came wait for this, and the store ends with the error that is raised now.
    patience = time.monotonic() + _READ_S
    while store.add("met/read", 0) < size - 1 - len(missing) and time.monotonic() < patience:
        time.sleep(0.01)
    without = out_of_descriptors()
    raise RendezvousTimeout(phase=f"{_PHASE} ({without})" if without else _PHASE, seconds=timeout_s, missing=missing)


def _ask(group: process_groups.Group, timeouts: Timeouts, store_client: StoreClient, have: str) -> Mapping[str, Any]:
    """Another rank: say that it is here, and learn from rank 0 where to go."""
    root, nonce = f"safe_ckpt/{group.name}", uuid.uuid4().hex
    hello, said = f"{root}/hello/{group.rank}", {"nonce": nonce, "have": have, "gone": False}
    try:
        store_client.put(hello, said, phase=_PHASE)
        # Rank 0 has the same deadline and then names the missing ranks.
        patience_s = timeouts.barrier_s + min(_READ_S, timeouts.barrier_s)
        key = f"{root}/welcome/{nonce}"
        remind = Reminder(_WAITING, timeouts.peer_stall_s / 2, timeouts.barrier_s)
        check = functools.partial(remind, lambda: (0,))
        welcome: Mapping[str, Any] = store_client.get(key, phase=_PHASE, wait_s=patience_s, check=check)
        store_client.delete([key], phase=_PHASE)
    except KeyTimeout:
        # A rank 0 that comes later must not count on this attempt.
        store_client.put(hello, {**said, "gone": True}, phase=_PHASE)
        raise RendezvousTimeout(phase=_PHASE, seconds=timeouts.barrier_s, missing=(0,)) from None
    if "error" in welcome:
        raise from_wire(welcome["error"])
    if missing := welcome.get("missing"):
        raise RendezvousTimeout(phase=_PHASE, seconds=timeouts.barrier_s, missing=tuple(missing))
    return welcome


def _join(group: process_groups.Group, timeouts: Timeouts, welcome: Mapping[str, Any]) -> Rendezvous:
    same_host = welcome["host"] == machine_id()
    hosts = welcome["local"] if same_host else welcome["addresses"]
    connect = _Connector(hosts, welcome["port"], welcome["token"], welcome["secret"])
    joined = json.dumps({"host": machine_id(), "pid": os.getpid()})

    def join(store: KeyValues) -> KeyValues:
        store.set(f"joined/{group.rank}", joined)
        store.add("joined", 1)
        return store

    store_client = StoreClient(connect, name="meeting", answer_s=timeouts.peer_stall_s)
    try:
        store = store_client.call(join, phase=_PHASE, wait_s=timeouts.barrier_s)
        missing = tuple(store_client.get("met", phase=_PHASE, wait_s=2 * timeouts.barrier_s))
        store_client.call(lambda store: store.add("met/read", 1), phase=_PHASE)
    except KeyTimeout:
        raise RendezvousTimeout(phase=_PHASE, seconds=2 * timeouts.barrier_s, missing=(0,)) from None
    finally:
        store_client.close()
    if missing:
        raise RendezvousTimeout(phase=_PHASE, seconds=timeouts.barrier_s, missing=missing)
    peers = {0: Peer(host=welcome["host"], pid=welcome["pid"])}
    return Rendezvous(id=welcome["token"], connect=connect, store=store, peers=peers)


class _Connector:
    """Opens connections to rank 0's store: its addresses are tried side by side, and the one that worked first next time."""

    def __init__(self, hosts: list[str], port: int, token: str, secret: str) -> None:
        self._hosts, self._port, self._token, self._secret = list(hosts), port, token, secret

    def __call__(self) -> KeyValues:
        problems: list[str] = []
        for host in reachable(self._hosts, self._port):
            try:
                store = SealedStore(process_groups.connect_store(host, self._port, _CONNECT_S), self._secret)
                # Another program may listen there: on another host a name can mean something else.
                if not store.check(["token"]) or store.get("token").decode() != self._token:
                    problems.append(f"{host}: not our store")
                    continue
            except (dist.DistNetworkError, dist.DistStoreError, TamperedError) as error:
                problems.append(f"{host}: {str(error).splitlines()[0]}")
                continue
            self._hosts = [host, *(other for other in self._hosts if other != host)]
            return store
        reason = "; ".join(problems) or f"nobody answers at {', '.join(self._hosts)}"
        reason = out_of_descriptors() or f"its store on port {self._port} cannot be reached: {reason}"
        raise PeerLostError(phase=_PHASE, ranks=(0,), reason=reason)


PORTS = 16
"""With a port given, the first free one of so many is taken: each session of a job listens on one of its own."""
CONNECT_S = 10.0
"""How long finding an address that answers may take."""
_STAGGER_S = 0.2
_PAUSE_S = 0.2
_SIOCGIFADDR = 0x8915
_MOST = 16


def listen(interface: str | None, port: int) -> socket.socket:
    """A socket that listens where rank 0 is to be reached.

    Args:
        interface: the name of a network interface of this host, or one of its addresses. None for all of them, or for the
            loopback where the launcher says that all ranks run on this host.
        port: the first of the ports to try; 0 for any.

    Raises:
        ConfigError: there is no such interface here, or no free port.
    """
    address = address_of(interface) if interface else _default_address()
    problem: OSError | None = None
    for number in range(port, port + PORTS) if port else (0,):
        try:
            return _listening(address, number)
        except OSError as error:
            problem = error
    key = "network.port" if port else "network.interface"
    ports = f"ports {port} to {port + PORTS - 1}" if port else "no port"
    raise ConfigError(key=key, message=f"cannot listen on {address or 'any address'}, {ports}: {problem}")


def _listening(address: str, port: int) -> socket.socket:
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=1024)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # IPv6 may be compiled in and switched off
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def _default_address() -> str:
    # torchrun sets both; elsewhere only the ranks themselves know where they run, when they have met.
    local, world = os.environ.get("LOCAL_WORLD_SIZE", ""), os.environ.get("WORLD_SIZE", "")
    return "127.0.0.1" if local and local == world else ""


def address_of(interface: str) -> str:
    """The address of an interface of this host, given by its name or as the address itself.

    Raises:
        ConfigError: there is none of that name.
    """
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(interface))
    own = [address for name, address in _interfaces() if name == interface]
    if not own:
        names = ", ".join(sorted({name for name, _ in _interfaces()}))
        message = f"there is no {interface!r} with an address here, but {names}"
        raise ConfigError(key="network.interface", message=message)
    return own[0]


def addresses(listening: str) -> list[str]:
    """Under which addresses other hosts may reach what listens at ``listening`` (an address; all of them for "::")."""
    if not ipaddress.ip_address(listening).is_unspecified:
        return [listening]
    own = [address for _, address in _interfaces() if not ipaddress.ip_address(address).is_loopback]
    master = os.environ.get("MASTER_ADDR", "")
    # Another host's name in MASTER_ADDR would cost its timeout, or lead to a program that listens there.
    first = [_outward_address(master), *([master] if master and _is_own(master, own) else [])]
    names = [name for name in (*first, *own, socket.gethostname()) if name and name not in ("localhost", "127.0.0.1")]
    return list(dict.fromkeys(names))[:_MOST]


def _is_own(name: str, own: Sequence[str]) -> bool:
    try:
        # As bytes: for text Python may import a codec in the middle of training.
        return any(info[4][0] in own for info in socket.getaddrinfo(name.encode(), None))
    except OSError:
        return False


def _outward_address(target: str) -> str:
    # Connecting a datagram socket sends nothing; it only makes the kernel choose a source address.
    for name in (target, "198.51.100.1"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))
            address = str(probe.getsockname()[0])
            if not ipaddress.ip_address(address).is_loopback:
                return address
    return ""


def _interfaces() -> list[tuple[str, str]]:
    """The addresses of this host with the names of their interfaces, IPv4 first; without those of one link only."""
    interfaces = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                row = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                interfaces.append((name, socket.inet_ntoa(row[20:24])))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != "20":  # link-local
                interfaces.append((name, str(ipaddress.ip_address(bytes.fromhex(digits)))))
    return interfaces


def reachable(hosts: Sequence[str], port: int, within_s: float = CONNECT_S) -> Iterator[str]:
    """The ``hosts`` that accept a connection on ``port``, as they answer: all are tried, the first ones a moment earlier.

    Each once. Ends when all have answered or ``within_s`` is over; those that cannot be reached are tried again until then.
    """
    answered: queue.SimpleQueue[str] = queue.SimpleQueue()
    deadline = time.monotonic() + within_s

    def knock(host: str, delay_s: float) -> None:
        time.sleep(delay_s)
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                # Short, and again: while a network is down, a knock that is on its way waits longer than the outage.
                address: Any = (host.encode(), port)  # the stubs know text only
                socket.create_connection(address, timeout=min(2.0, left_s)).close()
            except OSError:
                time.sleep(_PAUSE_S)
                continue
            answered.put(host)
            return

    for number, host in enumerate(hosts):
        arguments = (host, number * _STAGGER_S)
        threading.Thread(target=knock, args=arguments, name="safe_ckpt-knock", daemon=True).start()
    for _ in hosts:
        try:
            yield answered.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return


def ensure_descriptors(needed: int) -> str:
    """Raise this process's soft limit of file descriptors if ``needed`` more would not fit. Returns what stays wrong, or ""."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    total = needed + _open_descriptors()
    if soft == resource.RLIM_INFINITY or total <= soft:
        return ""
    most = total if hard == resource.RLIM_INFINITY else min(total, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if total <= soft:
        return ""
    return f"{total} file descriptors are needed here and {soft} allowed: raise the hard limit (ulimit -Hn) to {total}"


def out_of_descriptors() -> str:
    """Says so when this process has no file descriptor left; else ""."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return f"this process has no file descriptor left (ulimit -n is {soft}): {error.strerror}"
    return ""


def _open_descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 64
