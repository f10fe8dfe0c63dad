"""Rank RANK of two, which meet in the file STORE: saves its parts of tensors with DCP to FOLDER, and with us beside it."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from safe_ckpt import Checkpointer

folder, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
w = distribute_tensor(torch.arange(40.0).reshape(8, 5), mesh, [Shard(0)])
v = distribute_tensor(torch.arange(40.0).reshape(8, 5), mesh, [Shard(1)])
dcp.save({"w": w, "v": v, "n": 1}, checkpoint_id=folder)
with Checkpointer(f"{folder}-ours") as ckpt:
    ckpt.save(1, {"m": {"w": w, "v": v}}).result(timeout_s=60)
dist.destroy_process_group()
