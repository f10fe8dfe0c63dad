"""The ranks compare what they see: through keys in a store, each step under a deadline that names who is missing.

No process group is needed for that; one is made in the end, only to see whether it can be.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from safe_ckpt import machine as processes
from safe_ckpt.config import CheckpointConfig, Network, Timeouts
from safe_ckpt.core.coordination import process_groups
from safe_ckpt.core.coordination.coordinator import Coordinator
from safe_ckpt.core.coordination.process_groups import Store
from safe_ckpt.core.coordination.rendezvous import Rendezvous, rendezvous
from safe_ckpt.core.home import visibility as shared
from safe_ckpt.core.saving import set_up
from safe_ckpt.errors import ConfigError, PeerLostError, RendezvousTimeout, SafeCheckpointError
from safe_ckpt.tools.doctor import machine, rank_findings
from safe_ckpt.tools.doctor.check import (
    Examined,
    Finding,
    Options,
    StuckError,
    bounded,
    fail,
    look_at,
    ok,
    or_else,
    run_checks,
)
from safe_ckpt.tools.doctor.checks import ON_MACHINE
from safe_ckpt.tools.doctor.examination import World

if TYPE_CHECKING:
    # torch exports its stores at run time, but not to type checkers.
    from torch._C._distributed_c10d import PrefixStore, TCPStore
else:
    from torch.distributed import PrefixStore, TCPStore

_PEER_STALL_S = 30.0
_MISSING = (
    "look at what those ranks said last: are they running, may they reach this host, does every node name the same "
    "MASTER_ADDR and MASTER_PORT"
)
Answers = Mapping[int, Any]


def lead(world: World, examined: Examined) -> list[Finding]:
    """What the ranks see of each other and of the directory. Called on rank 0, on the main thread; never raises for a rank."""
    findings: list[Finding] = []
    timeout_s = examined.options.timeout_s
    begun = time.monotonic()
    try:
        with _coordinator(world, timeout_s) as (coordinator, store):
            met_s = time.monotonic() - begun
            findings.append(ok("ranks", f"all {world.size} met in {met_s:.1f} s", met_s=met_s))
            _lead(coordinator, store, examined, findings, timeout_s)
    except SafeCheckpointError as error:
        findings.append(fail("ranks", str(error), _MISSING))
    return findings


def follow(world: World, path: Path, options: Options) -> None:
    """The other end of ``lead``, on every other rank.

    Raises:
        CoordinationError: a rank did not come, or was lost; names it.
        SafeCheckpointError: rank 0 met another error.
    """
    timeout_s = options.timeout_s
    with _coordinator(world, timeout_s) as (coordinator, store):
        try:
            examined = replace(look_at(path, replace(options, timeout_s=timeout_s / 3)), options=options)
        except StuckError:
            asked = Path(os.path.abspath(path))
            examined = Examined(asked=asked, existing=asked, options=options, state_bytes=options.state_bytes)
        shown = coordinator.agree("doctor", timeout_s=timeout_s, local=lambda: _self(path))
        answer = _look(examined.asked, shown, coordinator.rank, timeout_s)
        answer["findings"] = [finding.to_json() for finding in run_checks(examined, ON_MACHINE)]
        coordinator.agree("doctor: seen", timeout_s=2 * timeout_s, local=lambda: answer)
        end = {"group": _try_group(coordinator, store, timeout_s)}
        coordinator.agree("doctor: end", timeout_s=2 * timeout_s, local=lambda: end)


def _lead(
    coordinator: Coordinator, store: Store, examined: Examined, findings: list[Finding], timeout_s: float
) -> None:
    reported: dict[int, Any] = {}
    seen: dict[int, Any] = {}
    ended: dict[int, Any] = {}
    token = _leave_token(examined)
    name = examined.scratch.name if examined.scratch else ""
    shown = {"levels_up": examined.levels_up, "scratch": name, "token": token}

    def show(answers: Answers) -> dict[str, Any]:
        reported.update(answers)
        return shown

    def complete(answers: Answers) -> None:
        deadline = time.monotonic() + timeout_s / 2
        seen.update((rank, _complete(answer, rank, examined, deadline)) for rank, answer in answers.items())

    coordinator.agree("doctor", timeout_s=timeout_s, local=lambda: _self(examined.asked), decide=show)
    findings += [*rank_findings.versions(reported), rank_findings.settings(reported)]
    coordinator.agree("doctor: seen", timeout_s=2 * timeout_s, local=lambda: {"seen": bool(token)}, decide=complete)
    if token:
        findings += rank_findings.directories(reported, seen)
    findings += rank_findings.machines(reported, seen)
    answer = {"group": _try_group(coordinator, store, timeout_s)}
    coordinator.agree("doctor: end", timeout_s=2 * timeout_s, local=lambda: answer, decide=ended.update)
    findings.append(rank_findings.groups(ended))


@contextlib.contextmanager
def _coordinator(world: World, timeout_s: float) -> Iterator[tuple[Coordinator, Store]]:
    store = _meeting_store(world, timeout_s)
    stall_s, shutdown_s = min(timeout_s, _PEER_STALL_S), min(timeout_s, 10.0)
    timeouts = Timeouts(barrier_s=timeout_s, peer_stall_s=stall_s, shutdown_s=shutdown_s)
    name = f"doctor-{world.attempt}"
    group = process_groups.Group(rank=world.rank, size=world.size, meeting_store=store, name=name)
    met = rendezvous(group, timeouts, Network())
    coordinator = Coordinator(group, timeouts, met if isinstance(met, Rendezvous) else None)
    try:
        yield coordinator, store
    finally:
        coordinator.close()


def _meeting_store(world: World, timeout_s: float) -> Store:
    """The store of the launcher, or one on rank 0.

    Raises:
        PeerLostError: rank 0 cannot host it, or what listens there is no store.
        RendezvousTimeout: nobody listens there.
    """
    where = f"{world.address}:{world.port}"
    hosts = world.rank == 0 and not world.hosted
    if not hosts:
        deadline = time.monotonic() + timeout_s
        try:
            bounded(lambda: _await_listener(world, deadline), timeout_s + 1)
        except OSError as error:
            phase = f"meeting at {where} ({_first(error)})"
            raise RendezvousTimeout(phase=phase, seconds=timeout_s, missing=(0,)) from error
    try:
        if hosts:
            return bounded(lambda: _host(world, timeout_s), timeout_s)
        return bounded(lambda: process_groups.connect_store(world.address, world.port, timeout_s), timeout_s)
    except (OSError, dist.DistNetworkError, dist.DistStoreError) as error:
        doing = f"cannot listen on {where}" if hosts else f"no store answers at {where}"
        raise PeerLostError(phase="meeting", ranks=(0,), reason=f"{doing}: {_first(error)}") from error


def _host(world: World, timeout_s: float) -> Store:
    limit = timedelta(seconds=timeout_s)
    return TCPStore(world.address, world.port, is_master=True, timeout=limit, wait_for_workers=False, use_libuv=True)


def _await_listener(world: World, deadline: float) -> None:
    # While nobody listens, torch's own client continues beyond its timeout and fills the screen.
    while True:
        left_s = max(0.1, deadline - time.monotonic())
        try:
            return socket.create_connection((world.address, world.port), timeout=left_s).close()
        except OSError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.1)


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _self(path: Path) -> dict[str, Any]:
    settings, problem = "", ""
    try:
        settings = CheckpointConfig.from_environment().deviations()
    except ConfigError as error:
        problem = str(error)
    return {
        "host": socket.gethostname(),
        "machine": processes.machine_id(),
        "path": os.path.abspath(path),
        "versions": machine.versions_here(),
        "settings": settings,
        "settings_problem": problem,
    }


def _leave_token(examined: Examined) -> str:
    """The name of a file that other ranks look for; "" where none can be created, and the checks that follow say why."""
    scratch = examined.scratch
    return or_else(lambda: set_up.leave_token(scratch), examined.options.timeout_s, "") if scratch else ""


def _look(asked: Path, shown: Mapping[str, Any], rank: int, timeout_s: float) -> dict[str, Any]:
    """What this rank sees of rank 0's private folder, and what it leaves there for rank 0 to see."""
    if not shown["token"]:
        return {"seen": False}
    levels = int(shown["levels_up"])
    scratch = (asked.parents[levels - 1] if 0 < levels <= len(asked.parents) else asked) / shown["scratch"]
    begun = time.monotonic()
    try:
        seen = bounded(lambda: shared.await_visible(scratch / shown["token"], timeout_s / 3), timeout_s / 2)
    except StuckError:
        return {"seen": False, "problem": "its file system does not answer"}
    answer: dict[str, Any] = {"seen": seen, "after_s": time.monotonic() - begun}
    if seen:
        wrote = scratch / f"rank-{rank}"
        try:
            bounded(wrote.touch, timeout_s / 3)
            answer["wrote"] = wrote.name
        except OSError as error:
            answer["problem"] = f"it cannot write there: {error.strerror or error}"
    return answer


def _complete(answer: Mapping[str, Any], rank: int, examined: Examined, deadline: float) -> dict[str, Any]:
    """An answer, and whether rank 0 sees what that rank has written."""
    full = dict(answer)
    if rank and full.get("wrote") and examined.scratch is not None:
        path = examined.scratch / str(full["wrote"])
        left_s = max(0.1, deadline - time.monotonic())
        if not or_else(lambda: shared.await_visible(path, left_s), left_s + 1, default=False):
            full["problem"] = "rank 0 does not see what it wrote"
    return full


def _try_group(coordinator: Coordinator, store: Store, timeout_s: float) -> str:
    """Make a gloo group and drop it. Returns what went wrong, or nothing."""
    if dist.is_initialized():
        return ""
    prefixed = PrefixStore("safe_ckpt/doctor/gloo", store)
    limit = timedelta(seconds=timeout_s / 2)

    def make() -> None:
        rank, size = coordinator.rank, coordinator.size
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=limit)
        dist.destroy_process_group()

    try:
        bounded(make, timeout_s)
    except Exception as error:  # whatever gloo says, rank 0 reports it
        return _first(error)
    return ""
