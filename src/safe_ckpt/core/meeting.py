"""How the ranks find each other: rank 0 hosts a store of ours and makes its address known through the default store.

Every attempt of every rank carries a nonce of its own, so an attempt that failed earlier, on some ranks only, cannot be
mistaken for this one.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from safe_ckpt.core import ranks
from safe_ckpt.core.channel import Channel, KeyTimeout
from safe_ckpt.core.ranks import Store
from safe_ckpt.errors import PeerLostError, RendezvousTimeout

if TYPE_CHECKING:
    from safe_ckpt.config import Timeouts

_PHASE = "first meeting of the ranks"
_READ_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a rank runs."""

    host: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class Found:
    """How to reach the session's store.

    Attributes:
        connect: opens one more connection.
        store: a connection that is open already; on rank 0 the hosted store, which lives as long as this reference.
        machines: where the ranks run; all of them on rank 0, rank 0 alone elsewhere.
    """

    connect: Callable[[], Store]
    store: Store
    machines: Mapping[int, Machine]


def meet(group: ranks.Group, timeouts: Timeouts) -> Found:
    """Find the other ranks of ``group``. Every rank calls this.

    Raises:
        RendezvousTimeout: some did not come within ``barrier_s``; names them.
        PeerLostError: rank 0's store cannot be reached.
    """
    return _host(group, timeouts) if group.rank == 0 else _join(group, timeouts)


def _host(group: ranks.Group, timeouts: Timeouts) -> Found:
    timeout_s = timeouts.barrier_s
    meeting, root = group.meeting_store, f"safe_ckpt/{group.name}"
    if meeting is None:
        raise ValueError("a group of several ranks needs a store to meet in")
    store, port = ranks.host_store()
    token = uuid.uuid4().hex
    store.set("token", token)
    welcome = json.dumps(
        {"addresses": ranks.addresses(), "port": port, "token": token, "host": ranks.machine_id(), "pid": os.getpid()}
    )
    keys = [f"{root}/hello/{rank}" for rank in range(1, group.size)]
    deadline = time.monotonic() + timeout_s
    served: set[str] = set()

    def welcome_all(meeting: Store) -> None:
        # Rank by rank: one that is late must not keep the others from their welcome.
        for key in keys:
            if meeting.check([key]):
                nonce = bytes(meeting.get(key)).decode()
                if nonce not in served:
                    served.add(nonce)
                    meeting.set(f"{root}/welcome/{nonce}", welcome)

    # The default store may be hosted by a process outside of this group, and that one may be stopped.
    channel = Channel(
        lambda: meeting, name="meeting", answer_s=timeouts.peer_stall_s, whose="the process group's own store"
    )
    pause_s = 0.001
    try:
        while store.add("joined", 0) < group.size - 1:
            if time.monotonic() >= deadline:
                _call_off(store, group.size, timeout_s)
            channel.call(welcome_all, phase=_PHASE)
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.05)
    finally:
        channel.close()
    store.set("met", json.dumps([]))
    joined = {rank: json.loads(store.get(f"joined/{rank}")) for rank in range(1, group.size)}
    machines = {rank: Machine(host=value["host"], pid=value["pid"]) for rank, value in joined.items()}
    return Found(connect=_connector(["localhost"], port, token, timeout_s), store=store, machines=machines)


def _call_off(store: Store, size: int, timeout_s: float) -> None:
    missing = tuple(rank for rank in range(1, size) if not store.check([f"joined/{rank}"]))
    store.set("met", json.dumps(missing))
    # Those that came wait for this, and the store dies with the error that is raised now.
    patience = time.monotonic() + _READ_S
    while store.add("met/read", 0) < size - 1 - len(missing) and time.monotonic() < patience:
        time.sleep(0.01)
    raise RendezvousTimeout(phase=_PHASE, seconds=timeout_s, missing=missing)


def _join(group: ranks.Group, timeouts: Timeouts) -> Found:
    root, nonce = f"safe_ckpt/{group.name}", uuid.uuid4().hex
    meeting = group.meeting_store
    if meeting is None:
        raise ValueError("a group of several ranks needs a store to meet in")
    channel = Channel(
        lambda: meeting, name="meeting", answer_s=timeouts.peer_stall_s, whose="the process group's own store"
    )
    try:
        channel.call(lambda store: store.set(f"{root}/hello/{group.rank}", nonce), phase=_PHASE)
        found = json.loads(channel.get(f"{root}/welcome/{nonce}", phase=_PHASE, wait_s=timeouts.barrier_s))
    except KeyTimeout:
        raise RendezvousTimeout(phase=_PHASE, seconds=timeouts.barrier_s, missing=(0,)) from None
    finally:
        channel.close()
    same_host = found["host"] == ranks.machine_id()
    hosts = (
        ["localhost"] if same_host else [name for name in found["addresses"] if name not in ("localhost", "127.0.0.1")]
    )
    connect = _connector(hosts, found["port"], found["token"], timeouts.barrier_s)
    joined = json.dumps({"host": ranks.machine_id(), "pid": os.getpid()})

    def join(store: Store) -> Store:
        store.set(f"joined/{group.rank}", joined)
        store.add("joined", 1)
        return store

    channel = Channel(connect, name="meeting", answer_s=timeouts.peer_stall_s)
    try:
        store = channel.call(join, phase=_PHASE, wait_s=timeouts.barrier_s)
        missing = tuple(json.loads(channel.get("met", phase=_PHASE, wait_s=2 * timeouts.barrier_s)))
        channel.call(lambda store: store.add("met/read", 1), phase=_PHASE)
    except KeyTimeout:
        raise RendezvousTimeout(phase=_PHASE, seconds=2 * timeouts.barrier_s, missing=(0,)) from None
    finally:
        channel.close()
    if missing:
        raise RendezvousTimeout(phase=_PHASE, seconds=timeouts.barrier_s, missing=missing)
    return Found(connect=connect, store=store, machines={0: Machine(host=found["host"], pid=found["pid"])})


def _connector(hosts: list[str], port: int, token: str, timeout_s: float) -> Callable[[], Store]:
    def connect() -> Store:
        problems: list[Any] = []
        for host in hosts:
            try:
                store = ranks.connect_store(host, port, min(timeout_s, 30.0))
            except (dist.DistNetworkError, dist.DistStoreError) as error:
                problems.append(f"{host}: {str(error).splitlines()[0]}")
                continue
            # Another program may listen there: on another host a name can mean something else.
            if bytes(store.get("token")).decode() == token:
                return store
            problems.append(f"{host}: not our store")
        reason = f"its store on port {port} cannot be reached: {'; '.join(problems)}"
        raise PeerLostError(phase=_PHASE, ranks=(0,), reason=reason)

    return connect
