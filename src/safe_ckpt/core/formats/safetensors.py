"""safetensors files: what fits one, which bytes lie where in it, and from verified bytes back to tensors."""

from __future__ import annotations

import json
import math
import mmap
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from safetensors import SafetensorError, deserialize

from safe_ckpt.core.formats.dtypes import ALIASES_KEY, DTYPES, GRADIENTS_KEY, ORDER_KEY, STRIDES_KEY, VERSIONS_KEY
from safe_ckpt.core.formats.file_plan import FilePlan, LazyTensor, is_exact_json, is_unresolved, values_of, view_of
from safe_ckpt.core.formats.refusals import refuse_short
from safe_ckpt.core.storage.direct_io import PAGE

_DTYPES: Mapping[str, torch.dtype] = {
    code: dtype for code, name in DTYPES.items() if (dtype := getattr(torch, name, None)) is not None
}


def _is_read(code: str) -> bool:
    """Whether the release of safetensors that is installed reads tensors of this type: older ones know fewer."""
    header = json.dumps({"t": {"dtype": code, "shape": [0], "data_offsets": [0, 0]}}).encode()
    try:
        deserialize(len(header).to_bytes(8, "little") + header)  # type: ignore[no-untyped-call]
    except SafetensorError:
        return False
    return True


SAFETENSORS_DTYPES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in _DTYPES.items() if _is_read(code)}
"""The types that are written. Other types go to a torch archive; all that torch has are read."""


def fits_safetensors(data: object) -> bool:
    """Whether safetensors gives back exactly ``data``: a flat dict of dense tensors that share memory wholly or not at all.

    Attributes that somebody has set on a tensor count for nothing.
    """
    if (type(data) is not dict and type(data) is not OrderedDict) or not data:
        return False
    if not getattr(data, "__dict__", {}).keys() <= {"_metadata"} or not is_exact_json(_module_versions(data)):
        return False
    spans: dict[tuple[torch.device, int], tuple[Any, ...]] = {}
    for name, tensor in data.items():
        if type(name) is not str or name == "__metadata__" or not _is_dense(tensor):
            return False
        if not name.isascii() and name.encode(errors="replace").decode() != name:
            return False  # lone surrogates are no text to most who read safetensors
        storage = tensor.untyped_storage()
        if tensor.numel():
            view = view_of(tensor)
            if spans.setdefault((tensor.device, storage.data_ptr()), view) != view:
                return False
    return True


def _module_versions(data: object) -> dict[str, Any]:
    # Module.state_dict() carries the version of each module beside the tensors; load_state_dict migrates by it.
    return dict(getattr(data, "_metadata", None) or {})


def _is_dense(tensor: object) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not isinstance(tensor, torch.Tensor):
        return False
    odd = tensor.is_meta or tensor.is_nested or tensor.is_quantized or is_unresolved(tensor)
    if odd or tensor.layout is not torch.strided:
        return False
    return tensor.dtype in SAFETENSORS_DTYPES and _fills_its_extent(tensor)


def _fills_its_extent(tensor: torch.Tensor) -> bool:
    # Dense in memory in some order of dimensions, such as channels_last.
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and tensor.numel():
            if stride != expected:
                return False
            expected *= size
    return True


def aliases_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The names of tensors that are stored under another name, and that name."""
    aliases: dict[str, str] = {}
    first: dict[tuple[torch.device, int], str] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            home = (tensor.device, tensor.untyped_storage().data_ptr())
            if first.setdefault(home, name) != name:
                aliases[name] = first[home]
    return aliases


def places_of(names: Iterable[str], mapping: Iterable[str]) -> list[int]:
    """The places of the names in a mapping; none where they are in its order."""
    place = {name: number for number, name in enumerate(mapping)}
    places = [place[name] for name in names]
    return places if places != sorted(places) else []


def in_order(tensors: dict[str, torch.Tensor], order: Sequence[int]) -> dict[str, torch.Tensor]:
    """The same in the order that ``places_of`` told."""
    if not order:
        return tensors
    return dict(pair for _, pair in sorted(zip(order, tensors.items(), strict=True), key=itemgetter(0)))


def safetensors_plan(
    path: str, tensors: Mapping[str, torch.Tensor], besides: Mapping[str, str] | None = None
) -> FilePlan:
    """A safetensors file. Tensors that are one and the same memory are stored once, the other names as aliases.

    Args:
        path: relative to the checkpoint.
        tensors: as ``fits_safetensors`` wants them.
        besides: further entries of the file's metadata.

    Raises:
        StateError: a tensor's memory is shorter than its shape says; names it.
    """
    for name, tensor in tensors.items():
        refuse_short(f"{path}: {name}", tensor)
    aliases = aliases_of(tensors)
    kept = sorted((name for name in tensors if name not in aliases), key=lambda n: (-tensors[n].element_size(), n))
    kinds = {name: (isinstance(one, torch.nn.Parameter), one.requires_grad) for name, one in tensors.items()}
    facts: dict[str, Any] = {
        ALIASES_KEY: aliases,
        STRIDES_KEY: {name: list(tensors[name].stride()) for name in kept if not tensors[name].is_contiguous()},
        ORDER_KEY: places_of([*kept, *aliases], tensors),
        GRADIENTS_KEY: {name: kind for name, kind in kinds.items() if any(kind)},
    }
    metadata = {"format": "pt", **(besides or {}), **{key: json.dumps(fact) for key, fact in facts.items() if fact}}
    if type(tensors) is OrderedDict:
        metadata[VERSIONS_KEY] = json.dumps(_module_versions(tensors))
    described = {name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in kept}
    head, places, length = _safetensors_head(described, metadata)
    placed = [(places[name], tensors[name].detach()) for name in kept if tensors[name].numel()]
    return FilePlan(path=path, length=length, pieces=[(0, head)], tensors=placed, fixed=1)


def named_safetensors_plan(path: str, tensors: Mapping[str, LazyTensor | torch.Tensor]) -> FilePlan:
    """A safetensors file in which each tensor is stored under its own name, in the order given.

    Lazy ones are fetched one at a time while it is written.

    Raises:
        StateError: a tensor's memory is shorter than its shape says; names it.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            refuse_short(f"{path}: {name}", tensor)
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    head, places, length = _safetensors_head(described, {"format": "pt"})
    held = [(places[n], values_of(t)) for n, t in tensors.items() if isinstance(t, torch.Tensor) and t.numel()]
    lazies = [(places[n], t) for n, t in tensors.items() if isinstance(t, LazyTensor) and t.size_bytes]
    return FilePlan(path=path, length=length, pieces=[(0, head)], tensors=held, lazies=lazies)


def _safetensors_head(
    described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """The bytes before the first tensor, where each tensor goes, and the length of the file."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at, begins = 0, {}
    for name, (dtype, shape) in described.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        begins[name] = at
        at += size
    text = json.dumps(header).encode()
    start = -(-(8 + len(text)) // PAGE) * PAGE  # the format allows blanks behind the header
    head = (start - 8).to_bytes(8, "little") + text.ljust(start - 8)
    return head, {name: start + begin for name, begin in begins.items()}, start + at


def parse_safetensors(memory: mmap.mmap, length: int) -> dict[str, torch.Tensor]:
    """A safetensors file as this package writes it, with all that its metadata says of the mapping."""
    start = 8 + int.from_bytes(memory[:8], "little")
    header = json.loads(memory[8:start])
    metadata = header.pop("__metadata__", {})
    strides = json.loads(metadata.get(STRIDES_KEY, "{}"))
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if start + end > length:
            raise ValueError(f"{name} lies behind the end of the file")
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        if begin == end:
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
        else:
            tensor = torch.frombuffer(memory, dtype=torch.uint8, count=end - begin, offset=start + begin)
            tensor = tensor.view(dtype).view(shape)
        if name in strides:
            tensor = torch.empty_strided(tensor.shape, strides[name], dtype=dtype, device="cpu").copy_(tensor)
        tensors[name] = tensor
    for alias, name in json.loads(metadata.get(ALIASES_KEY, "{}")).items():
        tensors[alias] = tensors[name]
    tensors = in_order(tensors, json.loads(metadata.get(ORDER_KEY, "[]")))
    _put_gradients(tensors, json.loads(metadata.get(GRADIENTS_KEY, "{}")))
    if VERSIONS_KEY in metadata:
        tensors = OrderedDict(tensors)
        if versions := json.loads(metadata[VERSIONS_KEY]):
            tensors._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    return tensors


def _put_gradients(tensors: dict[str, torch.Tensor], kinds: Mapping[str, Sequence[bool]]) -> None:
    made: dict[tuple[int, bool, bool], torch.Tensor] = {}  # two names of one Parameter are one
    for name, (is_parameter, required) in kinds.items():
        key = id(tensors[name]), is_parameter, required
        if key not in made:
            plain = tensors[name].detach()
            made[key] = torch.nn.Parameter(plain, required) if is_parameter else plain.requires_grad_(required)
        tensors[name] = made[key]
