"""DCP's save plans as plain data: they go from each rank to rank 0 through a store that strangers may be able to write to.

So reading it can execute nothing: names come from fixed tables, numbers and lengths have bounds, and anything unknown is an
error that names it. Not every field of torch's classes is in every supported release.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from safe_ckpt.errors import StateError

_MOST_ITEMS = 1 << 20
_MOST_DIMENSIONS = 64  # torch has no more
_MOST_CHARACTERS = 1 << 16
_MOST_BYTES = 1 << 62
_SIGNED = [f"int{bits}" for bits in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)]
_DTYPE_NAMES = (
    *_SIGNED,
    *(f"u{name}" for name in _SIGNED),
    *("bool", "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("quint8", "qint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
)
_LAYOUT_NAMES = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged")
_FORMAT_NAMES = ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")


def _table(names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(torch, name) for name in names if hasattr(torch, name)}


_DTYPES, _LAYOUTS, _FORMATS = _table(_DTYPE_NAMES), _table(_LAYOUT_NAMES), _table(_FORMAT_NAMES)
_KINDS = {kind.name: kind for kind in WriteItemType}
_Kind = TypeVar("_Kind")


def plan_to_json(plan: SavePlan) -> dict[str, Any]:
    """A plan of ``DefaultSavePlanner`` as JSON-able data.

    Raises:
        StateError: it says something that cannot be expressed; names the entry.
    """
    _refuse_fields("the plan", plan, ("items", "planner_data", "usable"))
    paths = plan.planner_data
    if paths is not None:
        paths = {name: list(path) for name, path in paths.items()}
    items = [_item_to_json(item) for item in plan.items]
    return {"items": items, "paths": paths, "usable": bool(getattr(plan, "usable", True))}


def plan_from_json(data: Any, *, rank: int) -> SavePlan:
    """Check what ``plan_to_json`` returned on another rank, and build the plan.

    Raises:
        StateError: it is not that.
    """
    read = _Reader(rank)
    row = read.typed(data, dict, "the plan")
    if set(row) != {"items", "paths", "usable"}:
        read.refuse("the plan", f"its fields are {sorted(map(str, row))[:8]!r:.200}")
    items = [read.item(item) for item in read.listed(row["items"], _MOST_ITEMS, "the entries")]
    more: dict[str, Any] = {"planner_data": read.paths(row["paths"])}
    if "usable" in _names_of(SavePlan):
        more["usable"] = read.typed(row["usable"], bool, "usable")
    return SavePlan(items, **more)


def lengths_from_json(data: Any, plan: SavePlan, *, rank: int) -> dict[int, int]:
    """Check how long the objects of a plan are: its entries' numbers, as text, to bytes.

    Raises:
        StateError: that is not what it is, or not of this plan.
    """
    read = _Reader(rank)
    row = read.typed(data, dict, "the lengths")
    wanted = [number for number, item in enumerate(plan.items) if item.type == WriteItemType.BYTE_IO]
    if set(row) != set(map(str, wanted)):
        read.refuse("the lengths", f"{len(row)} are given for {len(wanted)} objects, or for others")
    return {number: read.number(row[str(number)], _MOST_BYTES, "the length of an object") for number in wanted}


def kept_from_json(data: Any, plan: SavePlan, *, rank: int) -> list[int]:
    """Check which entries of its own plan a rank is to write.

    Raises:
        StateError: they are not numbers of entries in their order.
    """
    read = _Reader(rank)
    rows = read.listed(data, len(plan.items), "the entries to write")
    numbers = [read.number(row, len(plan.items) - 1, "the number of an entry") for row in rows]
    if any(one >= other for one, other in itertools.pairwise(numbers)):
        read.refuse("the entries to write", "they are not in their order")
    return numbers


def _item_to_json(item: WriteItem) -> list[Any]:
    name = item.index.fqn
    _refuse_fields(name, item, ("index", "type", "bytes_io_data", "tensor_data"))
    _refuse_fields(name, item.index, ("fqn", "offset", "index"))
    offset = None if item.index.offset is None else list(item.index.offset)
    length = None if item.bytes_io_data is None else item.bytes_io_data.nbytes
    tensor = None if item.tensor_data is None else _tensor_to_json(name, item.tensor_data)
    return [item.type.name, name, offset, item.index.index, length, tensor]


def _tensor_to_json(name: str, data: TensorWriteData) -> list[Any]:
    _refuse_fields(name, data, ("chunk", "properties", "size"))
    _refuse_fields(name, data.chunk, ("offsets", "sizes"))
    known = data.properties
    _refuse_fields(name, known, ("dtype", "layout", "requires_grad", "memory_format", "pin_memory"))
    return [
        _name_in(_DTYPES, known.dtype, name),
        _name_in(_LAYOUTS, getattr(known, "layout", torch.strided), name),
        bool(getattr(known, "requires_grad", False)),
        _name_in(_FORMATS, getattr(known, "memory_format", torch.contiguous_format), name),
        bool(getattr(known, "pin_memory", False)),
        list(data.size),
        list(data.chunk.offsets),
        list(data.chunk.sizes),
    ]


def _name_in(table: Mapping[str, Any], value: object, key: str) -> str:
    name = str(value).removeprefix("torch.")
    if table.get(name) != value:
        raise StateError(key=key, message=f"beside sharded tensors {value} cannot be saved")
    return name


@functools.cache
def _names_of(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind))


def _refuse_fields(key: str, value: Any, known: Sequence[str]) -> None:
    """A release of torch that plans with something else must not have it dropped silently."""
    kind: Any = type(value)
    if _names_of(kind) <= set(known):
        return
    for field in dataclasses.fields(kind):
        if field.name not in known and getattr(value, field.name) != field.default:
            message = f"this release of torch plans with {kind.__name__}.{field.name}, which is not known here"
            raise StateError(key=key, message=message)


class _Reader:
    """Checks what another rank reported."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def refuse(self, what: str, why: str) -> NoReturn:
        raise StateError(key=f"sharded items: {what:.200}", message=f"what this rank reported: {why}", rank=self._rank)

    def typed(self, value: Any, kind: type[_Kind], what: str) -> _Kind:
        if type(value) is not kind:
            self.refuse(what, f"expected {kind.__name__}, got {value!r:.80}")
        return value

    def number(self, value: Any, most: int, what: str) -> int:
        if not 0 <= self.typed(value, int, what) <= most:
            self.refuse(what, f"{value} is not from 0 to {most}")
        return int(value)

    def listed(self, value: Any, most: int, what: str) -> list[Any]:
        if len(items := self.typed(value, list, what)) > most:
            self.refuse(what, f"{len(items)} are more than {most}")
        return items

    def text(self, value: Any, what: str) -> str:
        if len(text := self.typed(value, str, what)) > _MOST_CHARACTERS:
            self.refuse(what, f"{len(text)} characters are more than {_MOST_CHARACTERS}")
        return text

    def named(self, table: Mapping[str, _Kind], value: Any, what: str) -> _Kind:
        if self.typed(value, str, what) not in table:
            self.refuse(what, f"{value!r:.80} is not known")
        return table[value]

    def size(self, value: Any, what: str) -> torch.Size:
        return torch.Size([self.number(part, _MOST_BYTES, what) for part in self.listed(value, _MOST_DIMENSIONS, what)])

    def paths(self, value: Any) -> dict[str, tuple[str | int, ...]] | None:
        if value is None:
            return None
        row = self.typed(value, dict, "the names")
        if len(row) > _MOST_ITEMS:
            self.refuse("the names", f"{len(row)} are more than {_MOST_ITEMS}")
        return {self.text(name, "a name"): tuple(self.steps(name, path)) for name, path in row.items()}

    def steps(self, name: str, value: Any) -> list[str | int]:
        steps = self.listed(value, _MOST_CHARACTERS, name)
        return [self.number(step, _MOST_BYTES, name) if type(step) is int else self.text(step, name) for step in steps]

    def item(self, value: Any) -> WriteItem:
        row = self.listed(value, 6, "an entry")
        if len(row) != 6:
            self.refuse("an entry", f"{len(row)} facts, expected 6")
        name = self.text(row[1], "a name")
        kind = self.named(_KINDS, row[0], name)
        offset = None if row[2] is None else self.size(row[2], name)
        hint = None if row[3] is None else self.number(row[3], _MOST_ITEMS, name)
        more: dict[str, Any] = {}
        if row[4] is not None:
            more["bytes_io_data"] = _bytes_data(self.number(row[4], _MOST_BYTES, name))
        if (row[5] is None) is not (kind == WriteItemType.BYTE_IO):
            self.refuse(name, f"as {kind.name} it has {'no' if row[5] is None else 'a'} tensor")
        if row[5] is not None:
            more["tensor_data"] = self.tensor(row[5], name)
        return WriteItem(index=MetadataIndex(name, offset, hint), type=kind, **more)

    def tensor(self, value: Any, name: str) -> TensorWriteData:
        row = self.listed(value, 8, name)
        if len(row) != 8:
            self.refuse(name, f"{len(row)} facts of a tensor, expected 8")
        facts = {
            "dtype": self.named(_DTYPES, row[0], name),
            "layout": self.named(_LAYOUTS, row[1], name),
            "requires_grad": self.typed(row[2], bool, name),
            "memory_format": self.named(_FORMATS, row[3], name),
            "pin_memory": self.typed(row[4], bool, name),
        }
        whole, offsets, sizes = (self.size(part, name) for part in row[5:])
        if not len(whole) == len(offsets) == len(sizes):
            self.refuse(name, f"a part of {len(sizes)} dimensions at {len(offsets)} of {len(whole)}")
        behind = any(at + size > most for at, size, most in zip(offsets, sizes, whole, strict=True))
        if behind and 0 not in sizes:
            self.refuse(name, f"{list(sizes)} at {list(offsets)} is not in {list(whole)}")
        if functools.reduce(lambda one, other: one * other, whole, 16) > _MOST_BYTES:
            self.refuse(name, f"a tensor of {list(whole)} is larger than any")
        known = {field: fact for field, fact in facts.items() if field in _names_of(TensorProperties)}
        return TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes), properties=TensorProperties(**known), size=whole
        )


def _bytes_data(length: int) -> Any:
    from torch.distributed.checkpoint import planner

    return planner.BytesIOWriteData(nbytes=length)
