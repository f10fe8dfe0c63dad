"""Facts about the ranks, and the stores they meet in. The only user of ``torch.distributed``.

No collective is issued here: a collective that times out leaves its group broken for good, a store does not.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup as ProcessGroup  # noqa: PLC0414 - for the other modules

from safe_ckpt.errors import ConfigError

if TYPE_CHECKING:
    # torch exports its stores at run time, but not to type checkers.
    from torch._C._distributed_c10d import Store as Store  # noqa: PLC0414 - for the other modules
    from torch._C._distributed_c10d import TCPStore
else:
    from torch.distributed import Store, TCPStore


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


ALONE: Any = object()
"""Stands for this process by itself in the place of a group, also where there is a process group."""


def itself(group: ProcessGroup | None) -> Any:
    """The process group that ``group`` stands for: None means WORLD. None where there is no process group."""
    if group is ALONE or not (dist.is_available() and dist.is_initialized()):
        return None
    return group if group is not None else dist.group.WORLD


def group_of(group: ProcessGroup | None) -> Group:
    """The facts of ``group``; None means WORLD, or a world of one when there is no process group. See also ``ALONE``.

    Raises:
        ConfigError: it is no process group that this rank is in.
    """
    pg = itself(group)
    if pg is None:
        refused = group is not None and group is not ALONE and dist.is_available()
        if refused and not isinstance(group, dist.ProcessGroup):
            raise ConfigError(key="group", message=f"expected a process group or None, got {type(group).__name__}")
        return Group(rank=0, size=1, meeting_store=None, name="single")
    if not isinstance(pg, dist.ProcessGroup):  # such as what new_group() gives to ranks outside
        message = f"expected a process group that this rank is in, or None, got {pg!r}: only its ranks make this call"
        raise ConfigError(key="group", message=message)
    store = dist.distributed_c10d._get_default_store()
    name = str(getattr(pg, "group_name", "world"))
    return Group(rank=dist.get_rank(pg), size=dist.get_world_size(pg), meeting_store=store, name=name)


def device_types(group: ProcessGroup | None) -> list[str]:
    """The device types of the tensors that a group takes, the host's first; the host's alone without a process group."""
    pg = itself(group)
    named = {device.type for device in getattr(pg, "_device_types", ())} or {"cpu"}
    return sorted(named, key=lambda name: (name != "cpu", name))


Backend = Any
"""One backend of a process group, such as ProcessGroupGloo; torch exports no type for it."""


def backend_timeouts(group: ProcessGroup | None) -> list[tuple[Backend, float]]:
    """The backends of a group, each once, with the timeout of their collectives in seconds; none without a process group."""
    pg = itself(group)
    backends: list[tuple[Backend, float]] = []
    for device in device_types(group) if pg is not None else ():
        # torch has no public getter; tests/multirank/test_lengthy.py pins this one.
        with contextlib.suppress(AttributeError, RuntimeError):
            backend = pg._get_backend(torch.device(device))
            timeout_s = backend.options._timeout.total_seconds()
            if not any(is_same(backend, known) for known, _ in backends):
                backends.append((backend, timeout_s))
    return backends


def is_same(one: Backend, other: Backend) -> bool:
    """Whether two references are to one backend."""
    return one is other or bool(one == other)


def set_backend_timeout(backend: Backend, seconds: float) -> None:
    """From now on a collective that is started on ``backend`` may take so long."""
    # Gloo and NCCL have the first; the others that are derived from torch's class the second, or none before torch has it.
    for name in ("_set_default_timeout", "set_timeout"):
        if (setter := getattr(backend, name, None)) is not None:
            setter(timedelta(seconds=seconds))
            return


def group_timeout_s(group: ProcessGroup | None) -> float | None:
    """The shortest timeout of the group's own collectives; None without a process group, or where it cannot be read."""
    return min((timeout_s for _, timeout_s in backend_timeouts(group)), default=None)


def world_rank() -> int:
    """This process's rank in WORLD, 0 without a process group."""
    return dist.get_rank() if itself(None) is not None else 0


def process_groups(groups: object) -> list[ProcessGroup]:
    """The process groups that ``groups`` stands for, each once: a mesh for all of its own and WORLD, None for WORLD.

    Raises:
        ConfigError: one is neither a group that this process belongs to nor a mesh.
    """
    world = itself(None)
    if world is None:
        return []
    asked = list(groups) if isinstance(groups, list | tuple | set) else [groups]
    members: list[ProcessGroup] = []
    for one in asked:
        if one is None:
            members.append(world)
        elif isinstance(one, dist.ProcessGroup):
            members.append(one)
        elif hasattr(one, "get_all_groups"):
            # A mesh has groups of its own, which WORLD's timeout does not reach.
            mesh: Any = one
            inside = mesh.get_coordinate() is not None  # else it has none here
            members += [world, *(mesh.get_all_groups() if inside else ())]
        else:
            message = f"expected a process group that this rank is in, a DeviceMesh or None, got {one!r}"
            raise ConfigError(key="groups", message=message)
    return list({group.group_name: group for group in members}.values())


def meeting_groups(groups: Sequence[ProcessGroup]) -> list[ProcessGroup | None]:
    """Return those of ``groups`` in which the ranks meet: WORLD alone where it is among them."""
    if not groups or any(group.group_name == itself(None).group_name for group in groups):
        return [None]
    return list(groups)


EVERYWHERE = ("::", "0.0.0.0")  # noqa: S104 - compared
"""The addresses that a socket which listens on all of them gives as its own."""


def host_store(listening: socket.socket) -> Store:
    """Host a store in this process behind a socket that listens already; it is the store's from now on.

    Ours, because clones of the default store die with ``destroy_process_group``.
    """
    address, port = listening.getsockname()[:2]
    return TCPStore(
        "localhost" if address in EVERYWHERE else address,  # its own client comes this way, too
        port,
        is_master=True,
        timeout=timedelta(seconds=300),
        wait_for_workers=False,
        use_libuv=True,
        master_listen_fd=listening.detach(),
    )


def connect_store(host: str, port: int, timeout_s: float) -> Store:
    """Connect to the store that another process hosts.

    Raises:
        torch.distributed.DistNetworkError: nobody listens there.
    """
    return TCPStore(
        host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False, use_libuv=True
    )
