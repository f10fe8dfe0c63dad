"""What programs of sharded training train: a model, wrapped in one of many ways, and its optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from safe_ckpt.tools.audit.recorder import digest

OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "SGD": partial(torch.optim.SGD, lr=0.01),
    "SGD momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "tensor lr": partial(torch.optim.AdamW, lr=torch.tensor(0.01)),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "ASGD": partial(torch.optim.ASGD, lr=0.01),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.1),
}
OF_DATA = ("root", "blocks", "two meshes", "replicated and sharded", "flattened mesh", "last dimension")
"""Ways to wrap in which each rank has data of its own."""
BESIDE = ("tensor parallel", "both", "a part")
"""Those with tensors of two kinds, or on two meshes."""
WRAPS = (*OF_DATA, "tensor parallel", "both", "replicated", "a part", "none")


class Block(nn.Module):
    """Two layers, and a norm."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, inner), nn.Linear(inner, width), nn.LayerNorm(width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Adds to the values."""
        return values + self.down(torch.tanh(self.up(self.norm(values))))


class Net(nn.Module):
    """Blocks between two layers; with what the choices say besides."""

    def __init__(self, chosen: Mapping[str, Any]) -> None:
        super().__init__()
        width = chosen["width"]
        self.first = nn.Linear(4, width, bias=chosen["bias"])
        self.blocks = nn.ModuleList(Block(width, chosen["inner"]) for _ in range(chosen["blocks"]))
        self.dropout = nn.Dropout(0.2 if chosen["dropout"] else 0.0)
        self.later = nn.Linear(width, width) if chosen["unused"] else None
        self.last = nn.Linear(width, 4, bias=chosen["bias"])
        if chosen["tied"]:
            self.last.weight = nn.Parameter(self.first.weight.detach().t().clone(memory_format=torch.contiguous_format))
            self.again = nn.Linear(width, 4, bias=False)
            self.again.weight = self.last.weight
        if chosen["buffer"]:
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(3), persistent=chosen["buffer"] != "not saved")
        if chosen["frozen"]:
            self.first.requires_grad_(False)
        self._used_at = {"": 0, "always": 1000, "later": 4}[chosen["unused"]]

    def forward(self, values: torch.Tensor, step: int) -> torch.Tensor:
        """Through all of it, and through ``later`` from a step on."""
        if hasattr(self, "seen"):
            self.seen += 1
            self.mean.fill_(float(self.seen))
        values = self.first(values)
        for block in self.blocks:
            values = self.dropout(block(values))
        if self.later is not None and step >= self._used_at:
            values = self.later(values)
        return self.last(values) + self.again(values) if hasattr(self, "again") else self.last(values)


def wrap(model: Net, how: str, chosen: Mapping[str, Any]) -> nn.Module:
    """The model on all ranks, in place."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    if how == "none":
        return model
    is_mixed = chosen["mixed"] and chosen["root"] and how != "a part"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_mixed else MixedPrecisionPolicy()
    shard = partial(fully_shard, mp_policy=policy, reshard_after_forward=chosen["reshard"])
    if how == "both":
        shape = (size // 2, 2) if size % 2 == 0 else (1, size)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        _in_parts(model, mesh["tensor"])
        _shard(model, partial(shard, mesh=mesh["data"]), chosen["root"])
    elif how == "replicated and sharded":
        mesh = init_device_mesh("cpu", (2, size // 2) if size % 2 == 0 else (size, 1), mesh_dim_names=("r", "s"))
        _shard(model, partial(shard, mesh=mesh), chosen["root"])
    elif how == "tensor parallel":
        _in_parts(model, init_device_mesh("cpu", (size,)))
    elif how == "replicated":
        distribute_module(model, init_device_mesh("cpu", (size,)))
    else:
        _of_one_mesh(model, how, shard, size)
    return model


def _of_one_mesh(model: Net, how: str, shard: Any, size: int) -> None:
    ranks = list(range(size))
    mesh = DeviceMesh("cpu", ranks)
    if how == "flattened mesh":
        mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("one", "other"))._flatten("data")
    if how == "a part":
        shard(model.blocks[0], mesh=mesh)
        return
    if how == "last dimension" and size != 3:  # which FSDP2 does evenly alone
        shard = partial(shard, shard_placement_fn=lambda one: Shard(one.ndim - 1))
    if how == "two meshes":
        shard(model.blocks[0], mesh=DeviceMesh("cpu", ranks))
    for block in model.blocks if how == "blocks" else ():
        shard(block, mesh=mesh)
    shard(model, mesh=mesh)


def _in_parts(model: Net, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _shard(model: Net, shard: Any, whole: bool) -> None:
    for block in model.blocks:
        shard(block)
    if whole:
        shard(model)


def groups(model: nn.Module, how: str) -> list[dict[str, Any]]:
    """Of the parameters, for an optimizer."""
    named = list(model.named_parameters())
    if how.startswith("of "):
        return [{"params": list(model.get_submodule(how[3:]).parameters())}]
    if how == "by decay":
        of = [[one for _, one in named if one.ndim > 1], [one for _, one in named if one.ndim < 2]]
        return [{"params": of[0], "weight_decay": 0.1}, {"params": of[1], "weight_decay": 0.0}]
    if how == "the last first":
        return [{"params": [one]} for name, one in named[::-1] if name.startswith("last")] + [
            {"params": [one for name, one in named if not name.startswith("last")], "lr": 0.02}
        ]
    if how == "trained alone":
        return [{"params": [one for _, one in named if one.requires_grad]}]
    return [{"params": [one for _, one in named]}]


def average_plain(model: nn.Module) -> None:
    """Gradients that nothing has averaged."""
    for one in model.parameters():
        if one.grad is not None and not isinstance(one.grad, DTensor) and dist.is_initialized():
            dist.all_reduce(one.grad)
            one.grad /= dist.get_world_size()


def as_given(values: torch.Tensor, model: nn.Module, how: str) -> torch.Tensor:
    """What goes into a model that is wrapped so."""
    if how != "replicated":
        return values
    mesh = next(model.parameters()).device_mesh
    return distribute_tensor(values, mesh, [Replicate()])


def whole(tensor: Any) -> Any:
    """The whole tensor; a collective for DTensors."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def named_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Its parameters, without the names of what wraps."""
    return [(name.replace("_checkpoint_wrapped_module.", ""), one) for name, one in model.named_parameters()]


def _is_begun(values: Mapping[str, Any]) -> bool:
    """By its steps; SGD, which counts none, by its momentum."""
    of = [values["step"]] if "step" in values else list(values.values())
    return any(bool((one != 0).any()) if isinstance(one, torch.Tensor) else one != 0 for one in of)


def all_of(
    model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], more: Mapping[str, Any], *, whole_ones: bool
) -> dict[str, Any]:
    """Digests of all that is trained: of whole tensors, whatever they are wrapped in, which is a collective; or of parts."""
    seen = whole if whole_ones else lambda one: one
    named = named_of(model)
    found = {f"weights {name}": digest(seen(one), 1 << 20) for name, one in named}
    found |= {
        f"buffer {name}": digest(one, 1 << 20) for name, one in model.state_dict().items() if name in ("seen", "mean")
    }
    names = {id(one): name for name, one in named}
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            for one in group["params"]:
                values = {key: seen(value) for key, value in sorted(optimizer.state.get(one, {}).items())}
                # Of a parameter that was never used torch's functions make zeros, which is as if there were none.
                for key, value in values.items() if _is_begun(values) else ():
                    plain = value if not isinstance(value, torch.Tensor) else digest(value, 1 << 20)
                    found[f"state {key} of {names[id(one)]}"] = plain
                settings = {key: str(value).strip("()[]") for key, value in group.items() if key != "params"}
                found |= {f"group {key} of {names[id(one)]}": value for key, value in settings.items()}
    return found | {f"more {name}": digest(seen(one), 1 << 20) for name, one in more.items()}
