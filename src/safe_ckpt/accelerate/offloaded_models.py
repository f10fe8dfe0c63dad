"""The tensors of a model that may be offloaded. Each is fetched when it is written."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from accelerate.utils import OffloadedWeightsLoader

from safe_ckpt.adapters.extras import file_plan, refuse_short
from safe_ckpt.errors import StateError


def is_offloaded(model: torch.nn.Module) -> bool:
    """Whether some of its values are offloaded."""
    return any(tensor.is_meta for _, tensor in _named(model))


@dataclass(frozen=True)
class OffloadedValue:
    """A tensor of a model.

    Attributes:
        tensor: as the model has it; on the meta device if it is offloaded.
        held: the one in memory with its values; None if they are on disk.
        fetch: returns that, or reads it.
    """

    tensor: torch.Tensor
    held: torch.Tensor | None
    fetch: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> OffloadedValue:
        """Make the value of a tensor that is not offloaded."""
        return cls(tensor, tensor, tensor.detach)

    @property
    def identity(self) -> set[object]:
        """Return marks, of which two names of one tensor share one. Equal values are not enough: zeros are equal to zeros.

        Ties between two files of weights that were offloaded to disk are unknown: each name gets its values.
        """
        identity: set[object] = {id(self.tensor)}
        if (held := self.held) is not None and held.numel():
            identity.add((str(held.device), held.untyped_storage().data_ptr(), file_plan.view_of(held)))
        return identity


def values(model: torch.nn.Module) -> dict[str, OffloadedValue]:
    """Every parameter and persistent buffer under its name, module by module.

    Raises:
        StateError: one is on the meta device and no hook knows where it was offloaded to, or it has lost its memory.
    """
    found: dict[str, OffloadedValue] = {}
    homes = _homes(model)
    for name, tensor in _named(model):
        found[name] = _offloaded(homes, name, tensor) if tensor.is_meta else OffloadedValue.of(tensor)
        if (held := found[name].held) is not None:
            refuse_short(name, held)
    return found


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    # Not state_dict(): hooks of the user's may copy the tensors that are not offloaded.
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield dot + name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield dot + name, buffer


@dataclass(frozen=True)
class _Home:
    """The place where a hook keeps values: under ``prefix`` and the name, in host memory or on disk."""

    prefix: str
    values: Mapping[str, torch.Tensor]
    names: frozenset[str]

    def held(self, name: str) -> torch.Tensor | None:
        """The tensor itself where it lies in host memory."""
        memory = self.values if isinstance(self.values, dict) else getattr(self.values, "state_dict", None)
        tensor = memory.get(self.prefix + name) if isinstance(memory, dict) else None
        return tensor if isinstance(tensor, torch.Tensor) else None


def _homes(model: torch.nn.Module) -> dict[str, _Home]:
    """Prefix of a module's names to where the hook on it finds their values."""
    homes = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        own = getattr(module, "_hf_hook", None)
        for hook in getattr(own, "hooks", [own] if own is not None else []):
            values, prefix = getattr(hook, "weights_map", None), ""
            if not getattr(hook, "offload", False) or values is None:
                continue
            while hasattr(values, "dataset") and hasattr(values, "prefix"):  # accelerate.utils.offload.PrefixedDataset
                prefix, values = values.prefix + prefix, values.dataset
            homes[f"{module_name}." if module_name else ""] = _Home(prefix, values, frozenset(values))
    return homes


def _offloaded(homes: Mapping[str, _Home], name: str, tensor: torch.Tensor) -> OffloadedValue:
    for prefix in sorted(homes, key=len, reverse=True):  # a hook may stand for all modules below it
        home, local = homes[prefix], name[len(prefix) :]
        if name.startswith(prefix) and home.prefix + local in home.names:
            return OffloadedValue(
                tensor, home.held(local), functools.partial(_look_up, home.values, home.prefix + local)
            )
    message = "is on the meta device, and no hook of Accelerate has its values: load the model first"
    raise StateError(key=name, message=message)


def _look_up(values: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Map the file that a tensor was offloaded to, where there is one: Accelerate's own reading takes its size twice."""
    if not isinstance(values, OffloadedWeightsLoader) or name in values.state_dict or values.save_folder is None:
        return values[name].detach()
    facts = values.index[name]
    kind = getattr(torch, facts["dtype"], None) if facts.get("safetensors_file") is None else None
    shape = tuple(facts["shape"])
    if not isinstance(kind, torch.dtype) or not math.prod(shape):
        read: torch.Tensor = values[name]
        return read.detach()
    file = np.memmap(f"{values.save_folder}/{name}.dat", dtype=np.uint8, mode="c")  # private: never written to the file
    return torch.from_numpy(file).view(kind).view(shape)
