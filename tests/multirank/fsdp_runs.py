"""A small model under FSDP2 and its optimizer, trained and saved by ranks."""

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from kit.limits import QUICK
from safe_ckpt import CheckpointConfig, Checkpointer, PerRank
from safe_ckpt.core.state.overlap import OverlapPlan

CONFIG = CheckpointConfig(timeouts=QUICK)


def build(world, *, shape=None, shard=True):
    torch.manual_seed(world)
    model = torch.nn.Sequential(torch.nn.Linear(9, 17), torch.nn.LayerNorm(17), torch.nn.Linear(17, 5))
    model.register_buffer("count", torch.arange(3.0) * world)
    if shard:
        names = ("replicate", "shard")[-len(shape or (world,)) :]
        mesh = init_device_mesh("cpu", shape or (world,), mesh_dim_names=names)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * world)


def train(model, optimizer, steps, rank=0):
    for step in range(steps):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, 9)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model, optimizer):
    def full(value):
        return (value.full_tensor() if isinstance(value, DTensor) else value).clone()

    kept = get_optimizer_state_dict(model, optimizer)
    found = {name: full(value) for name, value in model.state_dict().items()}
    found.update({f"{n}/{key}": full(v) for n, state in kept["state"].items() for key, v in state.items()})
    return found, kept["param_groups"][0]["lr"]


def same(one, other):
    assert one[0].keys() == other[0].keys()
    for name in one[0]:
        assert torch.equal(one[0][name], other[0][name]), name
    assert one[1] == other[1]


def train_and_save(rank, world, folder, shape, snapshot, shard):
    model, optimizer = build(world, shape=shape, shard=shard)
    config = CheckpointConfig(timeouts=QUICK, snapshot=snapshot)
    with Checkpointer(folder, config) as ckpt:
        state = {"model": model, "optimizer": optimizer, "own": PerRank({"rank": rank}), "x": {"a": 3}}
        for step in (1, 2):
            train(model, optimizer, 1, rank)
            handle = ckpt.save(step, state)
            taken = whole(model, optimizer)
            train(model, optimizer, 1, rank)  # changes everything while it is written
        assert OverlapPlan([model], [optimizer])
        handle.result()
    return taken if rank == 0 else None
