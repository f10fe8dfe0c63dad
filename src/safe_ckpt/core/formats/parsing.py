"""From verified bytes in memory to the objects that were saved. Tensors lie in those bytes: nothing is copied."""

from __future__ import annotations

import io
import json
import mmap
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from safe_ckpt.core.formats import file_plan, safetensors

_DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in file_plan.SAFETENSORS_DTYPES.items()}


def parse_json(memory: mmap.mmap, length: int) -> Any:
    """A JSON file."""
    return json.loads(memory[:length])


def parse_safetensors(memory: mmap.mmap, length: int) -> dict[str, torch.Tensor]:
    """A safetensors file as this package writes it, strides, aliases and module versions included."""
    start = 8 + int.from_bytes(memory[:8], "little")
    header = json.loads(memory[8:start])
    metadata = header.pop("__metadata__", {})
    strides = json.loads(metadata.get(safetensors.STRIDES_KEY, "{}"))
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if start + end > length:
            raise ValueError(f"{name} lies behind the end of the file")
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        if begin == end:
            tensor = torch.empty(shape, dtype=dtype)
        else:
            tensor = torch.frombuffer(memory, dtype=torch.uint8, count=end - begin, offset=start + begin)
            tensor = tensor.view(dtype).view(shape)
        if name in strides:
            tensor = torch.empty_strided(tensor.shape, strides[name], dtype=dtype).copy_(tensor)
        tensors[name] = tensor
    for alias, name in json.loads(metadata.get(safetensors.ALIASES_KEY, "{}")).items():
        tensors[alias] = tensors[name]
    if safetensors.VERSIONS_KEY in metadata:
        tensors = OrderedDict(tensors)
        tensors._metadata = OrderedDict(json.loads(metadata[safetensors.VERSIONS_KEY]))  # type: ignore[attr-defined]
    return tensors


def parse_archive(memory: mmap.mmap, length: int) -> Any:
    """A torch archive, as ``torch.load(weights_only=True, map_location="cpu")`` reads it."""
    serialization: Any = torch.serialization
    try:
        # What torch.load does with mmap=True; it has no public way to be given memory instead of a path.
        reader = torch._C.PyTorchFileReader(_View(memory, length))  # type: ignore[call-overload]
        unpickler, whole = serialization._weights_only_unpickler, torch.frombuffer(memory, dtype=torch.uint8)
        load = serialization._load
    except (AttributeError, TypeError):  # another release of torch: with a copy, then
        return torch.load(io.BytesIO(memory[:length]), map_location="cpu", weights_only=True)
    return load(reader, "cpu", unpickler, overall_storage=whole.untyped_storage(), encoding="utf-8")


class _View(io.RawIOBase):
    """Memory as a file."""

    def __init__(self, memory: mmap.mmap, length: int) -> None:
        super().__init__()
        self._memory = memory
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        with memoryview(buffer).cast("B") as room:
            count = max(0, min(len(room), self._length - self._at))
            room[:count] = self._memory[self._at : self._at + count]
        self._at += count
        return count
