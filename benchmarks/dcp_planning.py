"""The planning of a sharded save by DCP and by ours, in the same processes, on the same state, without files.

DCP's is what ``torch.distributed.checkpoint.state_dict_saver._save_state_dict`` does before it writes, less its storage's part:
``DefaultSavePlanner`` and one ``_DistWrapper.reduce_scatter`` over gloo. Ours is ``ShardPlanner.agree``. Every rank has its
part of the same DTensors, over a mesh of all ranks. Ours also makes the bytes of ``.metadata``; DCP does so after writing.

With TORCH_GLOO_LAZY_INIT=1 in the environment, gloo connects two ranks when they first talk, which makes large groups sooner.
"""

from __future__ import annotations

import pickle
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from control_rounds import LIMIT_S, Tally, count_requests
from rank_processes import await_all, forked, met, refuse_too_many
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from safe_ckpt.config import Timeouts
from safe_ckpt.core.coordination.coordinator import open_coordinator
from safe_ckpt.core.sharding.dcp_plan import ShardPlanner

WAYS = ("DCP, no plan cache", "DCP, plan cache", "ours")
_FIRST_GUESS_BYTES = 24 << 20
_ROWS, _COLUMNS = 4, 8  # of every rank's part of a tensor


def planning(
    ranks: int, tensors: int, saves: int, ways: Sequence[str] = WAYS, each_bytes: float = _FIRST_GUESS_BYTES
) -> list[dict[str, Any]]:
    """Plan some saves on so many gloo processes: a row of the table for each way.

    Raises:
        Refused: they would not fit into memory.
    """
    refuse_too_many(ranks, max(each_bytes, _FIRST_GUESS_BYTES))  # the kernel needs some for gloo's connections, too
    _warm_up()
    found = forked(ranks, _rank, tensors, saves, ways, limit_s=2 * LIMIT_S)
    return [_row(way, [one["ways"][way] for one in found], found) for way in ways]


def _row(way: str, ranks: list[dict[str, Any]], found: list[dict[str, Any]]) -> dict[str, Any]:
    def medians(name: str) -> list[float]:
        return [statistics.median(column) for column in zip(*(one[name][:2] for one in ranks[1:]), strict=True)]

    return {
        "way": way,
        "ranks": len(ranks),
        "seconds": [max(times) for times in zip(*(one["seconds"] for one in ranks), strict=True)],
        "cpu_s": medians("cpu_s"),
        "cpu_0_s": ranks[0]["cpu_s"][:2],
        "sent_bytes": medians("sent_bytes"),
        "requests": medians("requests")[-1],
        "group_s": max(one["group_s"] for one in found),
        "private_bytes": statistics.median(one["private_bytes"] for one in found[1:]),
        "private_0_bytes": found[0]["private_bytes"],
    }


def _warm_up() -> None:
    """Import and fill here what every process would for itself: a plan of two DTensors in a group that talks to nobody."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    planner = DefaultSavePlanner()
    planner.set_up_planner(_state(2, 2), is_coordinator=True)
    planner.create_global_plan([planner.create_local_plan()])
    dist.destroy_process_group()


def _state(ranks: int, tensors: int) -> dict[str, DTensor]:
    mesh, shape = init_device_mesh("cpu", (ranks,)), torch.Size((_ROWS * ranks, _COLUMNS))
    return {
        f"model.layer{number}.weight": DTensor.from_local(
            torch.zeros(_ROWS, _COLUMNS), mesh, [Shard(0)], run_check=False, shape=shape, stride=(_COLUMNS, 1)
        )
        for number in range(tensors)
    }


def _rank(
    rank: int, ranks: int, listening: socket.socket, tensors: int, saves: int, ways: Sequence[str]
) -> dict[str, Any]:
    meeting = met(rank, listening)
    await_all(meeting, "group", ranks)
    begun = time.monotonic()
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks)
    dist.barrier()
    group_s = time.monotonic() - begun
    _plan_with_dcp(_state(ranks, 2), 1, caching=False)  # whoever comes first would else connect for all
    state = _state(ranks, tensors)
    found = {way: _plan_with_dcp(state, saves, caching=way == WAYS[1]) for way in WAYS[:2] if way in ways}
    if WAYS[2] in ways:
        found[WAYS[2]] = _plan_with_ours(state, saves)
    return {"ways": found, "group_s": group_s}


def _measured(plan: Callable[[], object], saves: int, tally: Tally | None = None) -> dict[str, list[float]]:
    """Plan some times, all ranks at once: seconds of each, CPU seconds of this process, and what it asked of the store."""
    found: dict[str, list[float]] = {"seconds": [], "cpu_s": [], "requests": [], "sent_bytes": []}
    for _ in range(saves):
        asked, sent = (tally.calls.total(), tally.sent_bytes) if tally else (0, 0)
        dist.barrier()
        begun, cpu_s = time.monotonic(), time.process_time()
        plan()
        found["seconds"].append(time.monotonic() - begun)
        found["cpu_s"].append(time.process_time() - cpu_s)
        if tally:
            found["requests"].append(tally.calls.total() - asked)
            found["sent_bytes"].append(tally.sent_bytes - sent)
    return found


def _plan_with_dcp(state: dict[str, DTensor], saves: int, *, caching: bool) -> dict[str, list[float]]:
    wrapper, sent = _DistWrapper(None, use_dist=True, coordinator_rank=0), []

    def plan() -> None:
        planner = DefaultSavePlanner(enable_plan_caching=caching)

        def local_step() -> SavePlan:
            planner.set_up_planner(state, is_coordinator=wrapper.is_coordinator)
            sent.append(planner.create_local_plan())
            return sent[-1]

        def global_step(plans: list[SavePlan]) -> list[SavePlan]:
            return planner.create_global_plan(plans)[0]

        planner.finish_plan(wrapper.reduce_scatter("plan", local_step, global_step))

    found = _measured(plan, saves)
    for cache in ("save_plan", "all_plans", "global_plan", "metadata", "final_save_plan"):
        getattr(SavePlanner, f"_cached_{cache}").clear()
    # reduce_scatter is a gather and a scatter of objects; each is preceded by a collective for the sizes.
    return {**found, "requests": [4] * saves, "sent_bytes": [len(pickle.dumps(one)) for one in sent]}


def _plan_with_ours(state: dict[str, DTensor], saves: int) -> dict[str, list[float]]:
    tally = count_requests()
    coordinator = open_coordinator(None, Timeouts())
    planner = ShardPlanner(coordinator, barrier_s=LIMIT_S)
    coordinator.agree("start", timeout_s=LIMIT_S)
    found = _measured(lambda: planner.agree({"": state}), saves, tally)
    coordinator.release()
    return found
