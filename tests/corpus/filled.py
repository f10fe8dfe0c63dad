"""Values that follow from the name of a tensor and a number alone: what was saved with them is known without a stored copy."""

from __future__ import annotations

import zlib

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def value(name, number, shape, *, trained=True):
    """Another one for each name, number and place within the tensor; exact in 32 bits. What is not trained stays."""
    places = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return places / 1024 + zlib.crc32(name.encode()) % 64 + (number if trained else 0)


def tensors(model, optimizer=None):
    """A model's parameters and all that an optimizer has for them, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter
        kept = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        found |= {f"{name}/{key}": tensor for key, tensor in kept.items() if isinstance(tensor, torch.Tensor)}
    return found


def _trained(tensor, name):
    return tensor.requires_grad or "/" in name


@torch.no_grad()
def fill(number, model, optimizer=None):
    """Set all of them. An optimizer has stepped before."""
    for name, tensor in tensors(model, optimizer).items():
        whole = value(name, number, tensor.shape, trained=_trained(tensor, name))
        if isinstance(tensor, DTensor):
            whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.copy_(whole)
    for group in () if optimizer is None else optimizer.param_groups:
        group["lr"] = number / 1000


@torch.no_grad()
def same(number, model, optimizer=None):
    """Raise with the names of what is not as ``fill`` made it; every rank of a sharded model calls it."""
    found, wrong = tensors(model, optimizer), []
    for name, parameter in model.named_parameters():
        if optimizer is not None and parameter.requires_grad:
            wrong += [f"no {name}/{key}" for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}/{key}" not in found]
    for name, tensor in found.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not torch.equal(whole, value(name, number, whole.shape, trained=_trained(tensor, name))):
            wrong.append(name)
    rates = [] if optimizer is None else [group["lr"] for group in optimizer.param_groups]
    wrong += [f"lr {rate}" for rate in rates if rate != number / 1000]
    assert not wrong, wrong


def step(model, optimizer, inputs):
    """One step of training, so that the optimizer has all that it keeps."""
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
