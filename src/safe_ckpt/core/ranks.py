"""Facts about the ranks, and the stores they meet in. The only user of ``torch.distributed``.

No collective is issued here: a collective that times out leaves its group broken for good, a store does not.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    # torch exports its stores at run time, but not to type checkers.
    from torch._C._distributed_c10d import HashStore, TCPStore
    from torch._C._distributed_c10d import Store as Store  # noqa: PLC0414 - for the other modules
    from torch.distributed import ProcessGroup
else:
    from torch.distributed import HashStore, Store, TCPStore


@dataclass(frozen=True, kw_only=True)
class Group:
    """One process group as seen from this process. Without a process group: one rank, ``meeting_store`` None.

    Attributes:
        rank: this process's rank within the group.
        size: number of ranks in the group.
        meeting_store: where the ranks first find each other; dies with ``destroy_process_group``.
        name: the same on all ranks of this group, different for every group.
    """

    rank: int
    size: int
    meeting_store: Store | None
    name: str


def group_of(group: ProcessGroup | None) -> Group:
    """The facts of ``group``; None means WORLD, or a world of one when there is no process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return Group(rank=0, size=1, meeting_store=None, name="single")
    pg = group if group is not None else dist.group.WORLD
    store = dist.distributed_c10d._get_default_store()
    name = getattr(pg, "group_name", "world")
    return Group(
        rank=dist.get_rank(pg),
        size=dist.get_world_size(pg),
        meeting_store=store,
        name=str(name),
    )


def group_timeout_s(group: ProcessGroup | None) -> float | None:
    """The shortest timeout of the group's own collectives; None without a process group, or where it cannot be read."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    pg: Any = group if group is not None else dist.group.WORLD
    found = []
    for device in ("cpu", "cuda"):
        # torch has no public getter; tests/multirank/test_rendezvous.py pins this one.
        with contextlib.suppress(AttributeError, RuntimeError):
            found.append(pg._get_backend(torch.device(device)).options._timeout.total_seconds())
    return min(found, default=None)


def local_store() -> Store:
    """A store for a world of one rank."""
    return HashStore()


def host_store() -> tuple[Store, int]:
    """Host a store in this process on a free port. Returns it with its port.

    Ours, because clones of the default store die with ``destroy_process_group``.
    """
    store = TCPStore(
        "localhost", 0, is_master=True, timeout=timedelta(seconds=300), wait_for_workers=False, use_libuv=True
    )
    return store, int(store.port)


def connect_store(host: str, port: int, timeout_s: float) -> Store:
    """Connect to the store that another process hosts.

    Raises:
        torch.distributed.DistNetworkError: nobody listens there.
    """
    return TCPStore(
        host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False, use_libuv=True
    )


def addresses() -> list[str]:
    """Names under which other hosts may reach this one, best first."""
    found = [os.environ.get("MASTER_ADDR", ""), socket.gethostname(), _outward_address()]
    return list(dict.fromkeys(name for name in found if name))


def _outward_address() -> str:
    # Connecting a datagram socket sends nothing; it only makes the kernel choose a source address.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def machine_id() -> str:
    """Equal for two processes exactly when each can look up the other by its pid."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"
    return f"{socket.gethostname()}/{boot}/{namespace}"
