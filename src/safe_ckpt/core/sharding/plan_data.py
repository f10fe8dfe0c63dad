"""DCP's save plans as plain data: they go from each rank to rank 0 through a store that strangers may be able to write to.

So reading it can execute nothing: names come from tables, numbers and lengths have bounds, and anything else is an error that
names it. Not every field of torch's classes is in every supported release. What a newer release plans with besides is passed
through as it is, where it is plain data.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import torch
from torch.distributed.checkpoint import metadata, planner
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from safe_ckpt.errors import StateError

logger = logging.getLogger(__name__)
_MOST_ITEMS = 1 << 20
_MOST_DIMENSIONS = 64  # torch has no more
_MOST_CHARACTERS = 1 << 16
_MOST_BYTES = 1 << 62
_MOST_DEPTH = 8
_TOLD = {  # of a plan's classes, by their names: the fields that have a place of their own
    "SavePlan": frozenset({"items", "planner_data", "usable"}),
    "WriteItem": frozenset({"index", "type", "bytes_io_data", "tensor_data"}),
    "MetadataIndex": frozenset({"fqn", "offset", "index"}),
    "BytesIOWriteData": frozenset({"nbytes"}),
    "TensorWriteData": frozenset({"chunk", "properties", "size"}),
    "ChunkStorageMetadata": frozenset({"offsets", "sizes"}),
    "TensorProperties": frozenset({"dtype", "layout", "requires_grad", "memory_format", "pin_memory"}),
}
_reported: set[str] = set()


def _table(kind: type[Any]) -> dict[str, Any]:
    """All that this release of torch has of a kind, by the names that it prints."""
    return {_name_of(value): value for value in vars(torch).values() if isinstance(value, kind)}


def _name_of(value: object) -> str:
    return str(value).removeprefix("torch.")


_DTYPES, _LAYOUTS, _FORMATS = _table(torch.dtype), _table(torch.layout), _table(torch.memory_format)
_NAMED: Mapping[str, tuple[type[Any], Mapping[str, Any]]] = {
    "dtype": (torch.dtype, _DTYPES),
    "layout": (torch.layout, _LAYOUTS),
    "memory_format": (torch.memory_format, _FORMATS),
}
_ROWS: Mapping[str, type[Any]] = {"size": torch.Size, "tuple": tuple, "list": list}
_KINDS = {kind.name: kind for kind in WriteItemType}
_Kind = TypeVar("_Kind")


def plan_to_json(plan: SavePlan) -> dict[str, Any]:
    """A plan of ``DefaultSavePlanner`` as JSON-able data.

    Raises:
        StateError: it says something that cannot be expressed; names the entry.
    """
    if plan.storage_data is not None:
        raise StateError(key="the plan", message="it has SavePlan.storage_data, of a writer that is not ours")
    paths = plan.planner_data
    if paths is not None:
        paths = {name: list(path) for name, path in paths.items()}
    items = [_item_to_json(item) for item in plan.items]
    more = _more_of(plan)
    return {
        "items": items,
        "paths": paths,
        "usable": bool(getattr(plan, "usable", True)),
        **({"more": more} if more else {}),
    }


def plan_from_json(data: Any, *, rank: int) -> SavePlan:
    """Check what ``plan_to_json`` returned on another rank, and build the plan.

    Raises:
        StateError: it is not that.
    """
    read = _Reader(rank)
    row = read.typed(data, dict, "the plan")
    if row.keys() - {"more"} != {"items", "paths", "usable"}:
        read.refuse("the plan", f"its fields are {sorted(map(str, row))[:8]!r:.200}")
    items = [read.item(item) for item in read.listed(row["items"], _MOST_ITEMS, "the entries")]
    facts = {"planner_data": read.paths(row["paths"]), "usable": read.typed(row["usable"], bool, "usable")}
    made: SavePlan = read.built(SavePlan, {"items": items, **facts}, read.more(row.get("more", {}), "the plan"))
    return made


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
    offset = None if item.index.offset is None else list(item.index.offset)
    about = getattr(item, "bytes_io_data", None)  # since torch 2.7
    length = None if about is None else about.nbytes
    tensor = None if item.tensor_data is None else _tensor_to_json(name, item.tensor_data)
    parts = [item, item.index, about]
    if item.tensor_data is not None:
        parts += [item.tensor_data, item.tensor_data.chunk, item.tensor_data.properties]
    more = _more_of(*parts)
    return [item.type.name, name, offset, item.index.index, length, tensor, *([more] if more else [])]


def _tensor_to_json(name: str, data: TensorWriteData) -> list[Any]:
    known = data.properties
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
    name = _name_of(value)
    if table.get(name) != value:
        raise StateError(key=key, message=f"beside sharded tensors {value} cannot be saved")
    return name


@functools.cache
def _names_of(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind) if field.init)


def _more_of(*parts: Any) -> dict[str, dict[str, Any]]:
    """What this release of torch plans with and has no place of its own here, by class and field, as JSON-able data."""
    more: dict[str, dict[str, Any]] = {}
    for part in parts:
        made_of: Any = type(part)
        if part is None or _names_of(made_of) <= _TOLD[kind := _class_of(made_of)]:
            continue
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if (
                field.name in _TOLD[kind]
                or not field.init
                or (field.default is not dataclasses.MISSING and value == field.default)
            ):
                continue
            try:
                more.setdefault(kind, {})[field.name] = _value_to_json(value)
            except TypeError as error:
                _report(f"{kind}.{field.name}", error)
    return more


def _class_of(kind: type[Any]) -> str:
    """The name of the class of torch's that ``kind`` is, or derives from."""
    return next(parent.__name__ for parent in kind.__mro__ if parent.__name__ in _TOLD)


def _report(field: str, why: TypeError) -> None:
    if field not in _reported:
        _reported.add(field)
        text = "torch plans with %s, which cannot be told to rank 0 (%s). Its default is saved: upgrade safe_ckpt"
        logger.warning(text, field, why)


def _value_to_json(value: Any, depth: int = 0) -> Any:
    """Plain data, sizes, and what torch has names for.

    Raises:
        TypeError: it is something else.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if depth < _MOST_DEPTH:
        for name, row in _ROWS.items():
            if kind is row:
                return {name: [_value_to_json(inner, depth + 1) for inner in value]}
        if kind is dict and all(type(key) is str for key in value):
            return {"dict": {key: _value_to_json(inner, depth + 1) for key, inner in value.items()}}
    for name, (named, table) in _NAMED.items():
        if kind is named and table.get(_name_of(value)) == value:
            return {name: _name_of(value)}
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__}")


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

    def more(self, value: Any, what: str) -> dict[str, dict[str, Any]]:
        """What ``_more_of`` returned."""
        rows = self.typed(value, dict, what)
        if not rows.keys() <= _TOLD.keys():
            self.refuse(what, f"{sorted(map(str, rows))[:8]!r:.200} is not known")
        return {
            kind: {field: self.value(inner, what) for field, inner in self.typed(row, dict, what).items()}
            for kind, row in rows.items()
        }

    def value(self, value: Any, what: str, depth: int = 0) -> Any:
        """What ``_value_to_json`` returned."""
        if value is None or type(value) in (bool, float):
            return value
        if type(value) is int:
            if abs(value) > _MOST_BYTES:
                self.refuse(what, f"a number of {value.bit_length()} bits is out of range")
            return value
        if type(value) is str:
            return self.text(value, what)
        if depth > _MOST_DEPTH or len(row := self.typed(value, dict, what)) != 1:
            self.refuse(what, f"{value!r:.80} is no value")
        ((kind, inner),) = row.items()
        if kind in _ROWS:
            found = [self.value(one, what, depth + 1) for one in self.listed(inner, _MOST_ITEMS, what)]
            if kind == "size" and not all(type(one) is int for one in found):
                self.refuse(what, f"{inner!r:.80} is no size")
            return _ROWS[kind](found)
        if kind in _NAMED:
            return self.named(_NAMED[kind][1], inner, what)
        if kind != "dict":
            self.refuse(what, f"{value!r:.80} is no value")
        return {
            self.text(key, what): self.value(one, what, depth + 1) for key, one in self.typed(inner, dict, what).items()
        }

    def built(self, kind: Any, facts: Mapping[str, Any], more: Mapping[str, Mapping[str, Any]]) -> Any:
        """One of torch's classes, of the facts that this release has."""
        fields, besides = _names_of(kind), more.get(_class_of(kind), {})
        if not besides.keys() <= fields - facts.keys():
            self.refuse(kind.__name__, f"{sorted(besides)[:8]!r:.200} are not its further fields")
        try:
            return kind(**{name: fact for name, fact in facts.items() if name in fields}, **besides)
        except TypeError as error:  # a field without a default, of which nothing could be told
            self.refuse(kind.__name__, str(error))

    def item(self, value: Any) -> WriteItem:
        row = self.listed(value, 7, "an entry")
        if len(row) not in (6, 7):
            self.refuse("an entry", f"{len(row)} facts, expected 6 or 7")
        name = self.text(row[1], "a name")
        kind = self.named(_KINDS, row[0], name)
        offset = None if row[2] is None else self.size(row[2], name)
        hint = None if row[3] is None else self.number(row[3], _MOST_ITEMS, name)
        more = self.more(row[6] if len(row) > 6 else {}, name)
        data = tensor = None
        if row[4] is not None:
            about = {"nbytes": self.number(row[4], _MOST_BYTES, name)}
            if hasattr(planner, "BytesIOWriteData"):
                data = self.built(planner.BytesIOWriteData, about, more)
        if (row[5] is None) is not (kind == WriteItemType.BYTE_IO):
            self.refuse(name, f"as {kind.name} it has {'no' if row[5] is None else 'a'} tensor")
        if row[5] is not None:
            tensor = self.tensor(row[5], name, more)
        index = self.built(metadata.MetadataIndex, {"fqn": name, "offset": offset, "index": hint}, more)
        facts = {"index": index, "type": kind, "bytes_io_data": data, "tensor_data": tensor}
        made: WriteItem = self.built(WriteItem, facts, more)
        return made

    def tensor(self, value: Any, name: str, more: Mapping[str, Mapping[str, Any]]) -> TensorWriteData:
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
        properties = self.built(metadata.TensorProperties, facts, more)
        chunk = self.built(metadata.ChunkStorageMetadata, {"offsets": offsets, "sizes": sizes}, more)
        made: TensorWriteData = self.built(
            TensorWriteData, {"chunk": chunk, "properties": properties, "size": whole}, more
        )
        return made
