"""A rank of a group that a launcher describes: saves its number to DIRECTORY."""

import sys

import torch.distributed as dist

from safe_ckpt import Checkpointer, PerRank

dist.init_process_group("gloo")
with Checkpointer(sys.argv[1]) as ckpt:
    ckpt.save(1, {"own": PerRank(dist.get_rank())})
dist.destroy_process_group()
