"""Directories of ``torch.distributed.checkpoint``: ``.metadata`` says which part of which tensor lies where in ``*.distcp``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from safe_ckpt.core.formats.manifest import DCP_METADATA
from safe_ckpt.errors import CorruptCheckpointError
from safe_ckpt.tools.inspection.files import Window, path_inside
from safe_ckpt.tools.inspection.pickle_objects import Global, Opaque, counts_of
from safe_ckpt.tools.inspection.pickle_reader import MOST_BYTES, read_pickle
from safe_ckpt.tools.inspection.tensors import Entry, TensorPiece, TensorTable
from safe_ckpt.tools.inspection.torch_reader import Archive, content_of, looks_like_archive, read_structure

_MOST_CHUNKS = 1_000_000
# Of all tensors together: a million parts in two dimensions. Each takes up to 300 bytes and 3 µs.
_MOST_CORNERS = 4_000_000
_MODULE = "torch.distributed.checkpoint"


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A part of a tensor, or an object, that lies in a file.

    Attributes:
        name: of the tensor or object.
        starts: where in the tensor the part begins; None for an object.
        offset: where it begins in its file.
        size: its bytes.
    """

    name: str
    starts: tuple[int, ...] | None
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A tensor according to ``.metadata``: the whole, and its parts (the start and the shape of each)."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Directory:
    """The content of ``.metadata``.

    Attributes:
        folder: where it lies.
        tensors: the tensors by name.
        items: what each file holds, in order, without overlap.
        paths: where in the nested state each name was, keys and indices from outside in.
    """

    folder: Path
    tensors: dict[str, Shape]
    items: dict[str, list[Item]]
    paths: dict[str, tuple[str | int, ...]]


def read_directory(folder: Path) -> Directory:
    """Read ``.metadata``.

    Raises:
        CorruptCheckpointError: it is not what DCP writes, or contradicts itself.
        OSError: it could not be read.
    """
    with Window(folder / DCP_METADATA) as window:
        if window.size > MOST_BYTES:
            raise CorruptCheckpointError(path=str(folder), file=DCP_METADATA, message="is too large")
        metadata = read_pickle(window.read(0, window.size), str(folder / DCP_METADATA), records=True)
    try:
        return _directory(folder, metadata)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, CorruptCheckpointError):
            raise
        message = f"is no metadata of DCP ({type(error).__name__}: {str(error)[:100]})"
        raise CorruptCheckpointError(path=str(folder), file=DCP_METADATA, message=message) from error


def _directory(folder: Path, metadata: Any) -> Directory:
    facts = _fields(metadata, "metadata.Metadata")
    tensors, objects, count, corners = {}, [], 0, 0
    for name, about in facts["state_dict_metadata"].items():
        if str(about.made_by).endswith("BytesStorageMetadata"):
            objects.append(_name(name))
            continue
        state = _fields(about, "metadata.TensorStorageMetadata")
        count += len(state["chunks"])
        if count > _MOST_CHUNKS:
            raise ValueError(f"more than {_MOST_CHUNKS} parts of tensors")
        chunks = [_fields(chunk, "metadata.ChunkStorageMetadata") for chunk in state["chunks"]]
        parts = tuple((_counts(chunk["offsets"]), _counts(chunk["sizes"])) for chunk in chunks)
        whole = _counts(state["size"])
        corners += len(parts) << len(_divided(whole, parts))
        if corners > _MOST_CORNERS:
            raise ValueError("its tensors are divided in more ways than any are")
        tensors[_name(name)] = _shape(name, _dtype(state["properties"]), whole, parts)
    items: dict[str, list[Item]] = {}
    for index, place in (facts.get("storage_data") or {}).items():
        where, what = _fields(place, "filesystem._StorageInfo"), _fields(index, "metadata.MetadataIndex")
        starts = None if what.get("offset") is None else _counts(what["offset"])
        file = str(where["relative_path"])
        path_inside(folder, file)
        offset, size = _counts((where["offset"], where["length"]))
        item = Item(name=_name(what["fqn"]), starts=starts, offset=offset, size=size)
        items.setdefault(file, []).append(item)
    known = {*tensors, *objects}
    if {item.name for row in items.values() for item in row} != known:
        raise ValueError("it says where a tensor lies that it does not know, or knows one that lies nowhere")
    for row in items.values():
        _order(row)
    paths = _paths(facts.get("planner_data"), known)
    return Directory(folder=folder, tensors=tensors, items=items, paths=paths)


def _order(row: list[Item]) -> None:
    row.sort(key=lambda item: (item.offset, item.size))
    for one, other in pairwise(row):
        if other.offset < one.offset + one.size:
            raise ValueError(f"{one.name[:100]!r} and {other.name[:100]!r} overlap in their file")


def _paths(data: Any, known: set[str]) -> dict[str, tuple[str | int, ...]]:
    paths: dict[str, tuple[str | int, ...]] = {name: (name,) for name in known}
    for name, path in data.items() if isinstance(data, dict) else []:
        fits = name in known and isinstance(path, tuple) and 0 < len(path) <= 64
        if fits and all(isinstance(key, str) or (isinstance(key, int) and 0 <= key < 1 << 53) for key in path):
            paths[name] = path
    return paths


def _fields(value: Any, kind: str) -> dict[str, Any]:
    if not isinstance(value, Opaque) or str(value.made_by) != f"{_MODULE}.{kind}":
        raise ValueError(f"expected {kind}")
    state = value.state
    if isinstance(state, tuple) and len(state) == 2:  # a dataclass with slots
        state = state[1] or state[0]
    if not isinstance(state, dict):
        raise TypeError(f"{kind} is empty")
    return state


def _name(value: object) -> str:
    if not isinstance(value, str) or len(value) > 4096:
        raise ValueError("a name is no text")
    return value


def _counts(value: Any) -> tuple[int, ...]:
    counts = counts_of(value)
    if counts is None:
        raise ValueError("a shape is no row of numbers")
    return counts


def _dtype(properties: Any) -> str:
    state: Any = properties.state if isinstance(properties, Opaque) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if isinstance(state, dict):
        dtype = state.get("dtype")
    return dtype.name if isinstance(dtype, Global) else "unknown"


def _shape(
    name: str, dtype: str, shape: tuple[int, ...], parts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
) -> Shape:
    for starts, sizes in parts:
        if len(starts) != len(shape) or len(sizes) != len(shape):
            raise ValueError(f"the parts of {name[:100]!r} have other dimensions than the whole")
        if any(begin + size > whole for begin, size, whole in zip(starts, sizes, shape, strict=True)):
            raise ValueError(f"a part of {name[:100]!r} reaches behind the whole")
    if math.prod(shape) >= 1 << 62:
        raise ValueError(f"{name[:100]!r} is larger than any tensor")
    if not _tile(shape, parts):
        raise ValueError(f"the parts of {name[:100]!r} overlap, or leave a gap")
    return Shape(dtype=dtype, shape=shape, chunks=parts)


def _tile(shape: tuple[int, ...], parts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether the parts are the whole, each element once.

    How often each element is there is a step function of its place. Two of them are equal exactly if they have the same steps:
    those of a box are at its corners, up or down by the number of its ends among them. Only divided dimensions count.
    """
    whole = (tuple(0 for _ in shape), shape)
    axes = _divided(shape, parts)
    if 0 in shape:  # there are no elements, wherever the parts say that they are
        return True
    steps = Counter[tuple[int, ...]]()
    for sign, (at, count) in ((1, whole), *((-1, part) for part in parts)):
        if 0 in count:
            continue
        for ends in product((0, 1), repeat=len(axes)):
            steps[tuple(at[a] + end * count[a] for a, end in zip(axes, ends, strict=True))] += sign * (-1) ** sum(ends)
    return not any(steps.values())


def _divided(shape: tuple[int, ...], parts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[int]:
    """The dimensions along which some part is not the whole."""
    rows = enumerate(shape)
    return [a for a, size in rows if any((at[a : a + 1], count[a : a + 1]) != ((0,), (size,)) for at, count in parts)]


def archives_in(directory: Directory, file: str, window: Window) -> Iterator[tuple[Item, Archive | None]]:
    """The items of one file in order; with each its archive, None if it is not one.

    Raises:
        CorruptCheckpointError: the file is shorter than it should be, or an archive in it is damaged.
    """
    for item in directory.items.get(file, ()):
        part = window.part(item.offset, item.size)
        yield item, read_structure(part) if looks_like_archive(part) else None


def content_of_directory(directory: Directory) -> TensorTable:
    """Tensors, with the place of every part, and objects.

    Raises:
        CorruptCheckpointError: a file does not hold what ``.metadata`` says.
        OSError: a file could not be read.
    """
    pieces: dict[str, list[TensorPiece]] = {name: [] for name in directory.tensors}
    chunks = {name: set(about.chunks) for name, about in directory.tensors.items()}
    values = []
    for file in sorted(directory.items):
        with Window(path_inside(directory.folder, file)) as window:
            for item, archive in archives_in(directory, file, window):
                content = content_of(archive) if archive is not None else TensorTable()
                if item.name not in directory.tensors:
                    values += [replace(v, name=".".join(filter(None, (item.name, v.name)))) for v in content.values]
                elif len(content.tensors) == 1 and content.tensors[0].pieces:
                    only, about = content.tensors[0], directory.tensors[item.name]
                    piece = only.pieces[0]
                    piece = replace(piece, starts=item.starts or piece.starts)
                    if (piece.starts, piece.shape) not in chunks[item.name] or only.dtype != about.dtype:
                        message = f"does not hold that part of {item.name} which .metadata says"
                        raise CorruptCheckpointError(path=str(directory.folder), file=file, message=message)
                    pieces[item.name].append(piece)
    entries = [
        Entry(name=name, dtype=about.dtype, shape=about.shape, pieces=tuple(pieces[name]), note=_placement(about))
        for name, about in directory.tensors.items()
    ]
    return TensorTable(tensors=tuple(entries), values=tuple(values))


def _placement(about: Shape) -> str:
    """The way in which a tensor is divided: ``in 4 parts along dimension 0``."""
    if len(about.chunks) < 2:
        return ""
    axes = [str(axis) for axis in range(len(about.shape)) if len({starts[axis] for starts, _ in about.chunks}) > 1]
    return f"in {len(about.chunks)} parts along dimension {' and '.join(axes)}"
