"""From data to a file image: which bytes lie where in the file, before a single one of them is copied.

An image is header bytes at offsets plus tensors at offsets. The arena is filled with it and then *is* the file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from safe_ckpt.core.formats import zip_archive
from safe_ckpt.core.formats.manifest import RECORD_NAME
from safe_ckpt.core.formats.safetensors import ALIASES_KEY, DTYPES, STRIDES_KEY, VERSIONS_KEY
from safe_ckpt.core.formats.torch_archive import pickle_state
from safe_ckpt.core.formats.zip_archive import Record
from safe_ckpt.core.storage.direct_io import PAGE
from safe_ckpt.errors import StateError

ARCHIVE = "archive"
_MOST_STORAGES = 150_000  # with more, the directory of the archive is larger than ``manifest.open_archive`` reads
SAFETENSORS_DTYPES: Mapping[torch.dtype, str] = {
    dtype: code for code, name in DTYPES.items() if (dtype := getattr(torch, name, None)) is not None
}


@dataclass(frozen=True, kw_only=True)
class LazyTensor:
    """A tensor that is fetched when its turn comes to be written, and let go again.

    Attributes:
        dtype: its type.
        shape: its shape.
        fetch: returns it; called on the background thread, so it may take part in no collective.
        release: called there when its bytes have been taken.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], torch.Tensor]
    release: Callable[[], None] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """One file, planned.

    Attributes:
        path: relative to the checkpoint.
        length: bytes of the image; a zip archive gets its manifest and directory appended by the sink.
        pieces: offset -> bytes that are known now.
        tensors: offset -> tensor whose bytes go there, in its own order of elements if it is contiguous.
        lazies: offset -> tensor that is fetched for it; such an image can only be streamed.
        records: the members of a zip archive; None for a plain file.
    """

    path: str
    length: int
    pieces: Sequence[tuple[int, bytes]]
    tensors: Sequence[tuple[int, torch.Tensor]] = ()
    lazies: Sequence[tuple[int, LazyTensor]] = ()
    records: tuple[Record, ...] | None = None
    manifest: Mapping[str, Any] | None = field(default=None)

    @property
    def total_bytes(self) -> int:
        """An upper bound of the file's size."""
        if self.records is None:
            return self.length
        names = sum(len(record.name) for record in self.records)
        return self.length + 8192 + 200 * len(self.records) + 2 * names


def json_image(path: str, data: object) -> FilePlan:
    """A JSON file."""
    body = json.dumps(data, allow_nan=False).encode()
    return FilePlan(path=path, length=len(body), pieces=[(0, body)])


def bytes_image(path: str, data: bytes) -> FilePlan:
    """A file whose content is known."""
    return FilePlan(path=path, length=len(data), pieces=[(0, data)])


def is_exact_json(data: object) -> bool:
    """Whether JSON gives back exactly ``data``: no tuples, no other keys than text, no NaN, no subclasses."""
    kind = type(data)
    if data is None or kind in (bool, int, str):
        return True
    if kind is float:
        return math.isfinite(data)  # type: ignore[arg-type]
    if kind is list:
        return all(is_exact_json(value) for value in data)  # type: ignore[attr-defined]
    if kind is dict:
        return all(type(key) is str and is_exact_json(value) for key, value in data.items())  # type: ignore[attr-defined]
    return False


def fits_safetensors(data: object) -> bool:
    """Whether safetensors gives back exactly ``data``: a flat dict of dense tensors that share memory wholly or not at all."""
    if type(data) is not dict and type(data).__name__ != "OrderedDict":
        return False
    if not isinstance(data, Mapping) or not data or not is_exact_json(_module_versions(data)):
        return False
    spans: dict[tuple[torch.device, int], tuple[Any, ...]] = {}
    for name, tensor in data.items():
        if type(name) is not str or name == "__metadata__" or not _is_dense(tensor):
            return False
        storage = tensor.untyped_storage()
        if tensor.numel():
            view = (tensor.storage_offset(), tensor.dtype, tuple(tensor.size()), tensor.stride())
            if spans.setdefault((tensor.device, storage.data_ptr()), view) != view:
                return False
    return True


def _module_versions(data: object) -> dict[str, Any]:
    # Module.state_dict() carries the version of each module beside the tensors; load_state_dict migrates by it.
    return dict(getattr(data, "_metadata", None) or {})


def _is_dense(tensor: object) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not isinstance(tensor, torch.Tensor):
        return False
    if (
        tensor.layout is not torch.strided
        or tensor.is_meta
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
    ):
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


def safetensors_image(
    path: str, tensors: Mapping[str, torch.Tensor], besides: Mapping[str, str] | None = None
) -> FilePlan:
    """A safetensors file. Tensors that are one and the same memory are stored once, the other names as aliases.

    Args:
        path: relative to the checkpoint.
        tensors: as ``fits_safetensors`` wants them.
        besides: further entries of the file's metadata.
    """
    aliases: dict[str, str] = {}
    first: dict[tuple[torch.device, int], str] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            home = (tensor.device, tensor.untyped_storage().data_ptr())
            if first.setdefault(home, name) != name:
                aliases[name] = first[home]
    kept = sorted((name for name in tensors if name not in aliases), key=lambda n: (-tensors[n].element_size(), n))
    metadata = {"format": "pt", **(besides or {})}
    strides = {name: list(tensors[name].stride()) for name in kept if not tensors[name].is_contiguous()}
    if aliases:
        metadata[ALIASES_KEY] = json.dumps(aliases)
    if strides:
        metadata[STRIDES_KEY] = json.dumps(strides)
    if versions := _module_versions(tensors):
        metadata[VERSIONS_KEY] = json.dumps(versions)
    described = {name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in kept}
    head, places, length = _safetensors_head(described, metadata)
    placed = [(places[name], tensors[name].detach()) for name in kept if tensors[name].numel()]
    return FilePlan(path=path, length=length, pieces=[(0, head)], tensors=placed)


def named_safetensors_image(path: str, tensors: Mapping[str, LazyTensor | torch.Tensor]) -> FilePlan:
    """A safetensors file in which each tensor is stored under its own name, in the order given.

    Lazy ones are fetched one at a time while it is written.
    """
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    head, places, length = _safetensors_head(described, {"format": "pt"})
    held = [(places[n], t.detach()) for n, t in tensors.items() if isinstance(t, torch.Tensor) and t.numel()]
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


def torch_image(path: str, obj: object, *, strict: bool, key: str) -> FilePlan:
    """A torch archive. Storages first, at page-aligned offsets where they are large, then the pickled structure.

    Raises:
        StateError: something in ``obj`` cannot be saved; names where it is.
    """
    pickled = pickle_state(obj, strict=strict, key=key)
    if len(pickled.storages) > _MOST_STORAGES:
        message = f"{len(pickled.storages)} tensors are more than the {_MOST_STORAGES} that one file is read with"
        raise StateError(key=key, message=message)
    records: list[Record] = []
    pieces: list[tuple[int, bytes]] = []
    tensors: list[tuple[int, torch.Tensor]] = []
    at = 0

    def add(name: str, size: int) -> Record:
        nonlocal at
        record = zip_archive.place(f"{ARCHIVE}/{name}", size, at)
        pieces.append((record.header_offset, zip_archive.local_header(record)))
        records.append(record)
        at = record.end
        return record

    for name, storage in pickled.storages.items():
        record = add(f"data/{name}", storage.nbytes())
        if storage.nbytes():
            tensors.append((record.data_offset, _bytes_of(storage)))
    for name, data in (("data.pkl", pickled.data), ("byteorder", sys.byteorder.encode()), ("version", b"3\n")):
        pieces.append((add(name, len(data)).data_offset, data))
    return FilePlan(path=path, length=at, pieces=pieces, tensors=tensors, records=tuple(records))


def single(image: FilePlan, path: str) -> FilePlan:
    """The same image as a checkpoint of its own: it gets the manifest inside."""
    return dataclasses.replace(image, path=path, manifest={})


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


__all__ = [
    "RECORD_NAME",
    "FilePlan",
    "LazyTensor",
    "bytes_image",
    "fits_safetensors",
    "is_exact_json",
    "json_image",
    "named_safetensors_image",
    "safetensors_image",
    "torch_image",
]
