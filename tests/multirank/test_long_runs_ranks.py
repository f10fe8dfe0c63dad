"""Ranks that save for ever: neither their processes nor their store take ever more."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from kit.inside import store_keys
from kit.kept import SLACK, kept
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, Retention


def _save_often(rank, folder):
    parts = {"weight": distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])}
    state = {"parts": parts, "whole": torch.ones(2), "place": PerRank({"rank": rank})}
    found = []
    with Checkpointer(folder / "checkpoints", CheckpointConfig(retention=Retention(keep_last=2))) as ckpt:
        for number in range(60):
            handle = ckpt.save(number, state)
            handle = ckpt.export(parts, folder / f"weights-{number % 3}")
            if number in (10, 59):
                handle.wait_until_over(timeout_s=30)
                dist.barrier()
                found.append((store_keys(ckpt) if rank == 0 else 0, kept()))
    return found


def test_store_keys_and_objects_do_not_grow_with_the_saves_of_two_ranks(tmp_path):
    """After 60 saves and 60 exports of two ranks there are as many keys in the store, and objects in each, as after 10."""
    for early, late in values(spawn_ranks(_save_often, 2, tmp_path)):
        assert late[0] <= early[0] + SLACK
        assert late[1] < early[1] + SLACK
