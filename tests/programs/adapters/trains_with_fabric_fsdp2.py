"""Trains two ranks with Fabric up to STEP, from what is in FOLDER on, with HOW "checkpointer" or "publishing" to save."""

import sys

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import safe_ckpt


def parallelize(model, mesh):
    for layer in model:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def train(fabric, state, until):
    """Yields after each step."""
    for step in range(state["step"] + 1, until + 1):
        state["step"] = step
        fabric.backward(state["model"](torch.full((2, 4), float(step))).square().mean())
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        yield


def with_a_checkpointer(fabric, state, folder, until):
    with safe_ckpt.Checkpointer(folder) as ckpt:
        ckpt.resume(state)
        for _ in train(fabric, state, until):
            ckpt.save(state["step"], state)


def with_publishing(fabric, state, folder, until):
    newest = safe_ckpt.newest(folder)
    if newest is not None:
        fabric.load(newest.path / "state", state)
    for _ in train(fabric, state, until):
        with safe_ckpt.publishing(folder, state["step"]) as published:
            fabric.save(published / "state", state)


if __name__ == "__main__":
    folder, until, how = sys.argv[1:]
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(1)
    model = fabric.setup(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    {"checkpointer": with_a_checkpointer, "publishing": with_publishing}[how](fabric, state, folder, int(until))
    fabric.print("WEIGHTS", [p.full_tensor().flatten().tolist() for p in model.parameters()])
