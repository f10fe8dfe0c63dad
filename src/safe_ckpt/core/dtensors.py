"""Facts about tensors of which every rank has a part: DTensor, and the older ShardedTensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial


def is_sharded(value: object) -> bool:
    """Whether ``value`` is a tensor of which this rank may have a part only."""
    return isinstance(value, DTensor) or type(value).__name__ == "ShardedTensor"


def leaves(value: object) -> Iterator[object]:
    """Everything in nested mappings, lists and tuples that is none of these."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def has_sharded(value: object) -> bool:
    """Whether a module, an optimizer or a state dict holds tensors of which this rank may have a part only."""
    if isinstance(value, torch.nn.Module):
        return any(is_sharded(tensor) for tensor in (*value.parameters(), *value.buffers()))
    if isinstance(value, torch.optim.Optimizer):
        return any(is_sharded(tensor) for group in value.param_groups for tensor in group["params"])
    return any(is_sharded(leaf) for leaf in leaves(value))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, or the tensor itself where it is whole."""
    found: Any = tensor.detach()
    return found.to_local() if isinstance(tensor, DTensor) else found  # type: ignore[no-any-return]


def chunk_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Where this rank's part lies in the whole, as offsets and sizes; None where it has none."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    if tensor.device_mesh.get_coordinate() is None:
        return None
    if is_partial(tensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)  # once it is reduced
    (chunk,) = tensor.__create_chunk_list__()
    if any(size == 0 for size in chunk.sizes):
        return None
    return tuple(chunk.offsets), tuple(chunk.sizes)


def is_partial(tensor: torch.Tensor) -> bool:
    """Whether the ranks' parts must be reduced, such as summed, to give the whole."""
    return isinstance(tensor, DTensor) and any(isinstance(placement, Partial) for placement in tensor.placements)


def reduced(tensor: DTensor) -> torch.Tensor:
    """The whole of a partial tensor, on every rank of its mesh. A collective of that mesh."""
    return tensor.full_tensor()


def mesh_groups(tensors: Iterator[torch.Tensor] | list[torch.Tensor]) -> list[Any]:
    """The meshes of the DTensors among ``tensors``, each once."""
    found = {id(tensor.device_mesh): tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    return list(found.values())
