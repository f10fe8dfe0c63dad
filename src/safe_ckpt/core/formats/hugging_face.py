"""A model's weights as other tools read them: one ``model.safetensors``, or shards of it with an index.

The layout and the names are those of Hugging Face (``model-00001-of-00002.safetensors``, ``model.safetensors.index.json``).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from safe_ckpt.core.formats import file_plan
from safe_ckpt.core.formats.dtypes import ORDER_KEY
from safe_ckpt.core.formats.file_plan import FilePlan, LazyTensor, bytes_plan
from safe_ckpt.core.formats.names import is_parallel, plain_name
from safe_ckpt.core.formats.refusals import refuse_short
from safe_ckpt.core.formats.safetensors import (
    SAFETENSORS_DTYPES,
    aliases_of,
    named_safetensors_plan,
    places_of,
    safetensors_plan,
)
from safe_ckpt.errors import ConfigError, StateError
from safe_ckpt.text import bytes_from

STEM = "model"
_INDEX = ".safetensors.index.json"
_Shards = Sequence[Mapping[str, "LazyTensor | torch.Tensor"]]
_Tensor = TypeVar("_Tensor", bound="LazyTensor | torch.Tensor")
_WEIGHTS = re.compile(r"^(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?\Z")


def is_named(name: str, names: Collection[str]) -> bool:
    """Whether a parameter of a state dict is one of these, which are plain names, with or without what wraps its modules."""
    return name in names or plain_name(name) in names


def is_weight_file(name: str) -> bool:
    """Whether a file of this name holds a model's weights, or says where they are."""
    return _WEIGHTS.match(name) is not None


def parse_size(value: int | str, key: str) -> int:
    """Bytes from a number or from text such as ``"5GB"`` or ``"512MiB"``.

    Raises:
        ConfigError: it is neither, or not above 0.
    """
    number = bytes_from(value) if isinstance(value, str) else 0 if isinstance(value, bool) else value
    if not isinstance(number, int) or number < 1:
        raise ConfigError(key=key, message=f'expected a number of bytes or text such as "5GB", got {value!r}')
    return number


def plans(tensors: Mapping[str, LazyTensor | torch.Tensor], max_shard_bytes: int, stem: str = STEM) -> list[FilePlan]:
    """The files: as many shards as needed, in the order of ``tensors``, and the index when there is more than one.

    Args:
        tensors: every tensor once.
        max_shard_bytes: a shard ends before it would become larger; a single larger tensor gets one for itself.
        stem: how the names of the files begin.
    """
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        return [named_safetensors_plan(f"{stem}.safetensors", shards[0])]
    names = _names(stem, len(shards))
    files = [named_safetensors_plan(file, shard) for file, shard in zip(names, shards, strict=True)]
    return [*files, _index_of(stem, names, shards)]


def index_name(stem: str) -> str:
    """The file that says which shard has which tensor."""
    return f"{stem}{_INDEX}"


def shards_of(index: str, files: Iterable[str]) -> list[str]:
    """The files among these that are shards of an index, in their order; none where the name is not that of one.

    A manifest lists first what a save shares with the one before it.
    """
    if not index.endswith(_INDEX):
        return []
    shard = re.compile(re.escape(index.removesuffix(_INDEX)) + r"-\d{5}-of-\d{5}\.safetensors")
    return sorted(file for file in files if shard.fullmatch(file))


def frozen_apart(
    stem: str, tensors: Mapping[str, torch.Tensor], frozen: Collection[str], least_bytes: int
) -> list[FilePlan]:
    """A module's tensors in shards with an index before them: first those that are trained, then the others.

    Args:
        stem: the beginning of the files' names.
        tensors: as ``safetensors_plan`` takes them.
        frozen: names of those that are not trained.
        least_bytes: with fewer bytes of these, nothing is returned: one file does. Also where there are none of the others,
            and these fit into one shard.
    """
    stepped = {_memory(tensor) for name, tensor in tensors.items() if name not in frozen}
    apart = {name: one for name, one in tensors.items() if name in frozen and _memory(one) not in stepped}
    if sum(map(_size_of, apart.values())) < least_bytes:
        return []
    trained = OrderedDict((name, tensor) for name, tensor in tensors.items() if name not in apart)
    # The frozen ones last: the others keep their places in memory whether they are copied or not.
    shards = [*([trained] if trained else []), *_split(apart, file_plan.FROZEN_BYTES)]
    if len(shards) == 1:
        return []
    if hasattr(tensors, "_metadata"):
        shards[0]._metadata = tensors._metadata  # type: ignore[attr-defined]
    names = _names(stem, len(shards))
    plans = [safetensors_plan(name, shard) for name, shard in zip(names, shards, strict=True)]
    first = 1 if trained else 0
    stored = [{name: shard[name] for name in shard.keys() - aliases_of(shard).keys()} for shard in shards]
    return [
        _index_of(stem, names, stored, places_of((name for shard in shards for name in shard), tensors)),
        *plans[:first],
        *(dataclasses.replace(plan, frozen=True) for plan in plans[first:]),
    ]


def _split(tensors: Mapping[str, _Tensor], most_bytes: int) -> list[OrderedDict[str, _Tensor]]:
    """Split into shards, in order: a new one where the last would get too large. A tensor with several names counts once."""
    shards: list[OrderedDict[str, _Tensor]] = [OrderedDict()]
    filled = 0
    homes: dict[object, OrderedDict[str, _Tensor]] = {}
    for name, tensor in tensors.items():
        itself: object = None  # equal for several names of one tensor; None for an empty one
        if not isinstance(tensor, LazyTensor) and tensor.numel():
            itself = str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
        if itself in homes:
            homes[itself][name] = tensor
            continue
        if shards[-1] and filled + _size_of(tensor) > most_bytes:
            shards.append(OrderedDict())
            filled = 0
        shards[-1][name] = tensor
        filled += _size_of(tensor)
        if itself is not None:
            homes[itself] = shards[-1]
    return shards


def _memory(tensor: torch.Tensor) -> object:
    """Return what is equal for tensors of one memory; None for an empty one."""
    return (str(tensor.device), tensor.untyped_storage().data_ptr()) if tensor.numel() else None


def _names(stem: str, count: int) -> list[str]:
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _index_of(stem: str, names: Sequence[str], shards: _Shards, order: Sequence[int] = ()) -> FilePlan:
    where = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    total = sum(_size_of(tensor) for shard in shards for tensor in shard.values())
    said = {"total_size": total, **({ORDER_KEY: json.dumps(order)} if order else {})}
    body = json.dumps({"metadata": said, "weight_map": where}, indent=2, sort_keys=True)
    return bytes_plan(index_name(stem), body.encode() + b"\n")


def refuse_unsaveable(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Refuse what safetensors cannot hold, or what cannot be converted to ``dtype`` or read.

    Raises:
        StateError: naming it.
    """
    if dtype not in SAFETENSORS_DTYPES or tensor.layout is not torch.strided:
        raise StateError(key=name, message=f"a {dtype} {tensor.layout} tensor does not fit safetensors")
    refuse_short(name, tensor)
    if tensor.dtype != dtype and not _converts(tensor.dtype, dtype):
        raise StateError(key=name, message=f"torch cannot convert {tensor.dtype} to {dtype}: convert it before")


@functools.cache
def _converts(dtype: torch.dtype, other: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=dtype, device="cpu").to(other)
    except RuntimeError:  # such as of two numbers that share a byte
        return False
    return True


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Without ``torch.compile`` and data parallelism. Accelerate's own ``unwrap_model`` imports 60 MiB of compiler first."""
    inner: torch.nn.Module = getattr(model, "_orig_mod", model)
    return unwrapped(inner.module) if is_parallel(inner) else inner  # type: ignore[arg-type]


def _size_of(tensor: LazyTensor | torch.Tensor) -> int:
    return tensor.size_bytes if isinstance(tensor, LazyTensor) else tensor.numel() * tensor.element_size()
