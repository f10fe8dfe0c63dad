"""A model's weights as other tools read them: one ``model.safetensors``, or shards of it with an index.

The layout and the names are those of Hugging Face (``model-00001-of-00002.safetensors``, ``model.safetensors.index.json``).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping

import torch

from safe_ckpt.core.formats.file_plan import FilePlan, LazyTensor, bytes_image
from safe_ckpt.core.formats.safetensors import SAFETENSORS_DTYPES, named_safetensors_image, safetensors_image
from safe_ckpt.errors import ConfigError, StateError
from safe_ckpt.text import bytes_from

STEM = "model"
_INDEX = ".safetensors.index.json"
_WEIGHTS = re.compile(r"^(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?$")


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


def images(tensors: Mapping[str, LazyTensor | torch.Tensor], max_shard_bytes: int, stem: str = STEM) -> list[FilePlan]:
    """The files: as many shards as needed, in the order of ``tensors``, and the index when there is more than one.

    Args:
        tensors: every tensor once.
        max_shard_bytes: a shard ends before it would become larger; a single larger tensor gets one for itself.
        stem: how the names of the files begin.
    """
    shards: list[dict[str, LazyTensor | torch.Tensor]] = [{}]
    filled = 0
    for name, lazy in tensors.items():
        if shards[-1] and filled + _size_of(lazy) > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = lazy
        filled += _size_of(lazy)
    if len(shards) == 1:
        return [named_safetensors_image(f"{stem}.safetensors", shards[0])]
    names = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    where = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    index = {"metadata": {"total_size": sum(map(_size_of, tensors.values()))}, "weight_map": where}
    body = json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"
    files = [named_safetensors_image(file, shard) for file, shard in zip(names, shards, strict=True)]
    return [*files, bytes_image(index_name(stem), body)]


def index_name(stem: str) -> str:
    """The file that says which shard has which tensor."""
    return f"{stem}{_INDEX}"


def shards_of(index: str, files: Iterable[str]) -> list[str]:
    """The files among these that are shards of an index; none where the name is not that of one."""
    if not index.endswith(_INDEX):
        return []
    shard = re.compile(re.escape(index.removesuffix(_INDEX)) + r"-\d{5}-of-\d{5}\.safetensors")
    return [file for file in files if shard.fullmatch(file)]


def frozen_apart(
    stem: str, tensors: Mapping[str, torch.Tensor], frozen: Collection[str], least_bytes: int
) -> list[FilePlan]:
    """A module's tensors in two shards with an index before them, those that are not trained in the second one.

    Args:
        stem: the beginning of the files' names.
        tensors: as ``safetensors_image`` takes them.
        frozen: names of those that are not trained.
        least_bytes: with fewer bytes of these, or none of the others, nothing is returned: one file does.
    """
    trained_memory = {tensor.untyped_storage().data_ptr() for name, tensor in tensors.items() if name not in frozen}
    apart = {n: t for n, t in tensors.items() if n in frozen and t.untyped_storage().data_ptr() not in trained_memory}
    if sum(map(_size_of, apart.values())) < least_bytes or len(apart) == len(tensors):
        return []
    trained = OrderedDict((name, tensor) for name, tensor in tensors.items() if name not in apart)
    if hasattr(tensors, "_metadata"):
        trained._metadata = tensors._metadata  # type: ignore[attr-defined]
    names = [f"{stem}-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    where = dict.fromkeys(trained, names[0]) | dict.fromkeys(apart, names[1])
    total = sum(map(_size_of, tensors.values()))
    body = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1, sort_keys=True).encode()
    # The frozen one last: the others keep their places in memory whether it is copied or not.
    return [
        bytes_image(index_name(stem), body + b"\n"),
        safetensors_image(names[0], trained),
        dataclasses.replace(safetensors_image(names[1], apart), frozen=True),
    ]


def admit(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Refuse what safetensors cannot hold.

    Raises:
        StateError: naming it.
    """
    if dtype not in SAFETENSORS_DTYPES or tensor.layout is not torch.strided:
        raise StateError(key=name, message=f"a {dtype} {tensor.layout} tensor does not fit safetensors")


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Without ``torch.compile`` and data parallelism. Accelerate's own ``unwrap_model`` imports 60 MiB of compiler first."""
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        return unwrapped(inner.module)
    return inner


def _size_of(tensor: LazyTensor | torch.Tensor) -> int:
    return tensor.size_bytes if isinstance(tensor, LazyTensor) else tensor.numel() * tensor.element_size()
