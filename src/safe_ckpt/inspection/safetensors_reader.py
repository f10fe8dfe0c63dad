"""safetensors files: what their header says, checked against itself and the file. The format carries no checksums."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from safe_ckpt.core.formats.manifest import parse_json
from safe_ckpt.core.formats.safetensors_names import ALIASES_KEY, DTYPES, STRIDES_KEY, VERSIONS_KEY
from safe_ckpt.errors import CorruptCheckpointError
from safe_ckpt.inspection.files import Window
from safe_ckpt.inspection.pickle_objects import counts_of
from safe_ckpt.inspection.tensors import ITEM_BYTES, Content, Entry, Piece, Value

SUFFIX = ".safetensors"
_MOST_HEADER_BYTES = 64 << 20


def read_safetensors(path: Path) -> Content:
    """The tensors of a file, from its header alone.

    Raises:
        CorruptCheckpointError: the header contradicts itself, or the file's size.
        HostileCheckpointError: the header is larger than any tool writes.
        OSError: it could not be read.
    """
    with Window(path) as window:
        start, header = _header(window)
        length = window.size - start
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _damaged(path, "its metadata is not text")
    spans, entries = [], []
    for name, row in header.items():
        dtype, shape, begin, end = _row(name, row, path)
        spans.append((begin, end))
        starts = tuple(0 for _ in shape)
        whole = Piece(file=path, offset=start + begin, stride=contiguous(shape), starts=starts, shape=shape)
        entries.append(Entry(name=name, dtype=dtype, shape=shape, pieces=(whole,)))
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise _damaged(path, "its tensors overlap or leave a gap")
        at = end
    if at != length:
        raise _damaged(path, f"it has {length} bytes of tensors instead of {at}")
    named = {entry.name: entry for entry in entries}
    aliases = [
        replace(named[name], name=alias, note=f"is {name}")
        for alias, name in _parsed(metadata.get(ALIASES_KEY, "{}").encode(), f"its entry {ALIASES_KEY}", path).items()
        if isinstance(name, str) and name in named and alias not in named
    ]
    ours = (ALIASES_KEY, STRIDES_KEY, VERSIONS_KEY)
    values = [Value(name=key, text=text[:80], value=text) for key, text in metadata.items() if key not in ours]
    return Content(tensors=(*entries, *aliases), values=tuple(values))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor whose last dimension is densest, in elements."""
    strides = [1] * len(shape)
    for index in range(len(shape) - 2, -1, -1):
        strides[index] = strides[index + 1] * max(1, shape[index + 1])
    return tuple(strides)


def _header(window: Window) -> tuple[int, dict[str, Any]]:
    if window.size < 8:
        raise window.damaged("is cut off")
    length = int.from_bytes(window.read(0, 8), "little")
    if length > window.size - 8:
        raise window.damaged("its header is longer than the file")
    if length > _MOST_HEADER_BYTES:
        raise window.refused(f"its header of {length} bytes is refused: at most {_MOST_HEADER_BYTES} are read")
    return 8 + length, _parsed(window.read(8, length), "its header", window.path)


def _row(name: str, row: Any, path: Path) -> tuple[str, tuple[int, ...], int, int]:
    if isinstance(row, dict) and set(row) == {"dtype", "shape", "data_offsets"}:
        dtype, shape, offsets = DTYPES.get(str(row["dtype"])), counts_of(row["shape"]), counts_of(row["data_offsets"])
        if dtype and shape is not None and offsets is not None and len(offsets) == 2:
            begin, end = offsets
            if end - begin == math.prod(shape) * ITEM_BYTES[dtype]:  # so its size is bounded, too
                return dtype, shape, begin, end
    raise _damaged(path, f"what its header says of {name[:200]!r} cannot be")


def _parsed(text: bytes, what: str, path: Path) -> dict[str, Any]:
    try:
        parsed = parse_json(text)
    except ValueError as error:
        raise _damaged(path, f"{what} is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise _damaged(path, f"{what} is not what it should be")
    return parsed


def _damaged(path: Path, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(path=str(path), message=why)
