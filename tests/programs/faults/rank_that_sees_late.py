"""Rank RANK of two: saves into FOLDER, meeting in the file STORE, and writes what it resumed into the folder OUT."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, Retention, Timeouts, set_up_directory

folder, rank, store, out = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
if rank == 1:
    (out / "session").write_text(str(os.getsid(0)))
    while not (out / "armed").exists():
        time.sleep(0.01)
dist.barrier()
set_up_directory(folder, mode="fresh", timeout_s=30)
config = CheckpointConfig(timeouts=Timeouts(lengthy_s=40, barrier_s=30), retention=Retention(keep_last=2))
begun = time.monotonic()
with Checkpointer(folder, config) as ckpt:
    for step in (1, 2, 3):
        ckpt.save(step, {"own": PerRank({"t": torch.full((1000,), float(step))})}).result(timeout_s=35)
    state = {"own": PerRank({"t": torch.zeros(1000)})}
    resumed = ckpt.resume(state).step
(out / f"rank{rank}").write_text(json.dumps([resumed, float(state["own"].value["t"][0]), time.monotonic() - begun]))
dist.barrier()
dist.destroy_process_group()
