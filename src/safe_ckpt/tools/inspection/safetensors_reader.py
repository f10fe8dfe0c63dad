"""safetensors files: what their header says, checked against itself and the file. The format carries no checksums."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from safe_ckpt.core.formats.dtypes import ALIASES_KEY, DTYPES, ITEM_BYTES, KEYS
from safe_ckpt.core.formats.manifest import json_of
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.source import files_in
from safe_ckpt.errors import CorruptCheckpointError, HostileCheckpointError
from safe_ckpt.tools.inspection.files import Window
from safe_ckpt.tools.inspection.pickle_objects import counts_of
from safe_ckpt.tools.inspection.tensors import Entry, TensorPiece, TensorTable, Value

SUFFIX = ".safetensors"
_MOST_HEADER_BYTES = 64 << 20


def read_safetensors(path: Path) -> TensorTable:
    """The tensors of a file, from its header alone.

    Raises:
        CorruptCheckpointError: the header contradicts itself, or the file's size.
        HostileCheckpointError: the header is larger than any tool writes.
        OSError: it could not be read.
    """
    with Window(path) as window:
        return content_of_header(path, window.size, window.read)


def content_of_header(path: Place, size: int, read: Callable[[int, int], bytes]) -> TensorTable:
    """As ``read_safetensors``, of anything that can be read at offsets.

    Args:
        path: where it is. Tensors in an object store have no ``pieces``: these are read in files alone.
        size: how many bytes it has.
        read: returns so many bytes (the second) at an offset (the first).

    Raises:
        CorruptCheckpointError: as there.
        HostileCheckpointError: as there.
        OSError: as there.
    """
    start, header = _header(path, size, read)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _damaged(path, "its metadata is not text")
    entries = _entries(path, header, start, size - start)
    named = {entry.name: entry for entry in entries}
    aliases = [
        replace(named[name], name=alias, note=f"is {name}")
        for alias, name in _parsed(metadata.get(ALIASES_KEY, "{}").encode(), f"its entry {ALIASES_KEY}", path).items()
        if isinstance(name, str) and name in named and alias not in named
    ]
    values = [Value(name=key, text=text[:80], value=text) for key, text in metadata.items() if key not in KEYS]
    return TensorTable(tensors=(*entries, *aliases), values=tuple(values))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor whose last dimension is densest, in elements."""
    strides = [1] * len(shape)
    for index in range(len(shape) - 2, -1, -1):
        strides[index] = strides[index + 1] * max(1, shape[index + 1])
    return tuple(strides)


def _header(path: Place, size: int, read: Callable[[int, int], bytes]) -> tuple[int, dict[str, Any]]:
    if size < 8:
        raise _damaged(path, "is cut off")
    length = int.from_bytes(read(0, 8), "little")
    if length > size - 8:
        raise _damaged(path, "its header is longer than the file")
    if length > _MOST_HEADER_BYTES:
        message = f"its header of {length} bytes is refused: at most {_MOST_HEADER_BYTES} are read"
        raise HostileCheckpointError(path=str(path), message=message)
    return 8 + length, _parsed(read(8, length), "its header", path)


def _entries(path: Place, header: dict[str, Any], start: int, length: int) -> list[Entry]:
    """The tensors, which fill the ``length`` bytes from ``start`` on."""
    spans, entries, files = [], [], files_in([path])
    for name, row in header.items():
        dtype, shape, begin, end = _row(name, row, path)
        spans.append((begin, end))
        starts = tuple(0 for _ in shape)
        offset = start + begin
        pieces = [
            TensorPiece(file=file, offset=offset, stride=contiguous(shape), starts=starts, shape=shape)
            for file in files
        ]
        entries.append(Entry(name=name, dtype=dtype, shape=shape, pieces=tuple(pieces)))
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise _damaged(path, "its tensors overlap or leave a gap")
        at = end
    if at != length:
        raise _damaged(path, f"it has {length} bytes of tensors instead of {at}")
    return entries


def _row(name: str, row: Any, path: Place) -> tuple[str, tuple[int, ...], int, int]:
    if isinstance(row, dict) and set(row) == {"dtype", "shape", "data_offsets"}:
        dtype, shape, offsets = DTYPES.get(str(row["dtype"])), counts_of(row["shape"]), counts_of(row["data_offsets"])
        if dtype and shape is not None and offsets is not None and len(offsets) == 2:
            begin, end = offsets
            if end - begin == math.prod(shape) * ITEM_BYTES[dtype]:  # so its size is bounded, too
                return dtype, shape, begin, end
    raise _damaged(path, f"what its header says of {name[:200]!r} cannot be")


def _parsed(text: bytes, what: str, path: Place) -> dict[str, Any]:
    try:
        parsed = json_of(text)
    except ValueError as error:
        raise _damaged(path, f"{what} is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise _damaged(path, f"{what} is not what it should be")
    return parsed


def _damaged(path: Place, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(path=str(path), message=why)
