"""A sharded model goes on however it is wrapped then and now: compiled, recomputed, with data parallelism, or whole."""

import itertools

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from kit.limits import QUICK
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer

CONFIG = CheckpointConfig(timeouts=QUICK)


def sharded(model):
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def each(wrap, model):
    for number, layer in enumerate(model):
        model[number] = wrap(layer)
    return model


def in_place(model):
    sharded(model).compile()
    return model


SHARDED = {
    "plain": sharded,
    "compiled": lambda model: torch.compile(sharded(model)),
    "layers behind": lambda model: each(torch.compile, sharded(model)),
    "layers before": lambda model: sharded(each(torch.compile, model)),
    "in place": in_place,
    "recomputed": lambda model: sharded(each(checkpoint_wrapper, model)),
    "all": lambda model: torch.compile(sharded(each(torch.compile, each(checkpoint_wrapper, model)))),
}
WHOLE = {
    "whole": lambda model: model,
    "parallel": lambda model: torch.compile(DistributedDataParallel(each(torch.compile, model))),
}
PAIRS = [
    *itertools.product(SHARDED, SHARDED),
    *itertools.product(("plain", "layers before", "all"), WHOLE),
    *itertools.product(WHOLE, ("plain", "layers before", "all", *WHOLE)),
]


def made(way, seed):
    torch.manual_seed(seed)
    inner = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6))
    model = {**SHARDED, **WHOLE}[way](torch.nn.Sequential(torch.nn.Linear(4, 6), inner, torch.nn.Linear(6, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, seed)
    optimizer.step()
    return model, optimizer


def numbers(model, optimizer):
    state = [*model.state_dict().values(), *(optimizer.state[p]["exp_avg"] for p in model.parameters())]
    return [one.full_tensor() if isinstance(one, DTensor) else one.clone() for one in state]


def _pairs(rank, folder):
    expected = numbers(*made("whole", 1))
    for way, pairs in itertools.groupby(sorted(PAIRS), key=lambda pair: pair[0]):
        with Checkpointer(f"{folder}/{way}", CONFIG) as ckpt:
            model, optimizer = made(way, 1)
            ckpt.save(1, {"model": model, "optimizer": optimizer}).result()
            for _, other in pairs:
                model, optimizer = made(other, 2)
                ckpt.resume({"model": model, "optimizer": optimizer})
                found = numbers(model, optimizer)
                assert all(map(torch.equal, found, expected)), (way, other)


def test_every_way_of_wrapping_goes_on_in_every_other(tmp_path):
    """All 49 pairs of sharded ones, and those with whole ones that make sense: parameters, buffers and optimizer state."""
    values(spawn_ranks(_pairs, 2, str(tmp_path), timeout_s=100))
