"""How the ranks find each other: rank 0 hosts a store of ours and makes its address known through the default store.

Every attempt of every rank carries a nonce of its own, so an earlier attempt that failed on some ranks cannot be mistaken for
this one. A session that is open already is reused if every rank still has it. Each rank reports which one it has, and rank 0
decides, because Python may have collected its last user on some ranks only.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist

from safe_ckpt.config import Network, Timeouts
from safe_ckpt.core.coordination import process_groups
from safe_ckpt.core.coordination.heartbeat import Peer
from safe_ckpt.core.coordination.network import (
    addresses,
    ensure_descriptors,
    listen,
    out_of_descriptors,
    reachable,
    refuses,
)
from safe_ckpt.core.coordination.reminder import Reminder
from safe_ckpt.core.coordination.rounds import from_wire, to_wire
from safe_ckpt.core.coordination.store import KeyTimeout, KeyValues, SealedStore, StoreClient
from safe_ckpt.errors import PeerLostError, RendezvousTimeout, TamperedError
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
_LOOK_S = 1.0
_CONNECTIONS = 4  # of one rank: calls, heartbeat, saves, and one for signals or a gather
_SPARE = 128  # file descriptors for everything else that this process will open
_answered: dict[tuple[str, int], str] = {}  # the last word of each rank that was answered: it may still stand there


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
    """Stand in for a connection where there is one rank alone."""
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
                store = SealedStore(_connect(host, self._port), self._secret)
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


def _connect(host: str, port: int) -> process_groups.Store:
    """Connect to the store there. torch tries again for all its time where a process is gone that had just answered a knock.

    Raises:
        torch.distributed.DistNetworkError: nobody listens there, any more, or it does not answer.
    """
    connected: Future[process_groups.Store] = Future()

    def connect() -> None:
        try:
            connected.set_result(process_groups.connect_store(host, port, _CONNECT_S))
        except BaseException as error:  # raised in the caller that waits
            connected.set_exception(error)

    threading.Thread(target=connect, name="safe_ckpt-connect", daemon=True).start()
    while not futures.wait([connected], timeout=_LOOK_S).done:
        if refuses(host, port):
            raise dist.DistNetworkError("its process has ended: nobody listens there any more")
    return connected.result()
