"""Goes on in FOLDER/near, a disk of its own on each host, with a mirror in FOLDER/far: RANK of two, each on a host of its own.

Says where from, whether each number is that step's, and what is near and far.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from safe_ckpt import CheckpointConfig, Checkpointer, Mirror, PerRank, Retention, Timeouts, events

sys.path[:0] = sys.argv[4:]
from host_runs import move_to_host  # noqa: E402 - it lies there

folder, rank, meeting = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
near = move_to_host(rank, folder)
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
state = {"model": {"w": torch.zeros(100_000)}, "own": PerRank(torch.zeros(100_000)), "step": 0}


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def tell(event):
    if isinstance(event, events.Mirrored) and not event.error:
        say("far", int(event.path[-8:]))


config = CheckpointConfig(
    mirror=Mirror(url=str(folder / "far"), near="per-host", keep_last=2),
    retention=Retention(keep_last=2),
    timeouts=Timeouts(lengthy_s=60, barrier_s=20, peer_stall_s=5, shutdown_s=5),
)
with Checkpointer(near, config, hooks=[tell]) as ckpt:
    ckpt.resume(state)
    step = state["step"]
    exact = bool((state["model"]["w"] == step).all()) and bool((state["own"].value == step * (rank + 1)).all())
    say("resumed", step, exact)
    while step < 100_000:
        step += 1
        state["step"] = step
        state["model"]["w"] += 1
        state["own"].value.add_(rank + 1)
        ckpt.save(step, state).result()
        say("near", step)
