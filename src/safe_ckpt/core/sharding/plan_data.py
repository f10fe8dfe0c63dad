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
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from safe_ckpt.errors import StateError

logger = logging.getLogger(__name__)
_MOST_ITEMS = 1 << 20
_MOST_DIMENSIONS = 64  # torch has no more
_MOST_CHARACTERS = 1 << 16
_MOST_BYTES = 1 << 62
_MOST_DEPTH = 8
_FIELDS: Mapping[str, Mapping[str, str]] = {
    "SavePlan": {"items": "items", "planner_data": "paths?", "usable": "flag"},
    "WriteItem": {
        "index": "MetadataIndex",
        "type": "type",
        "bytes_io_data": "BytesIOWriteData?",
        "tensor_data": "TensorWriteData?",
    },
    "MetadataIndex": {"fqn": "text", "offset": "size?", "index": "hint?"},
    "BytesIOWriteData": {"nbytes": "length"},
    "TensorWriteData": {"chunk": "ChunkStorageMetadata", "properties": "TensorProperties", "size": "size"},
    "ChunkStorageMetadata": {"offsets": "size", "sizes": "size"},
    "TensorProperties": {
        "dtype": "dtype",
        "layout": "layout",
        "requires_grad": "flag",
        "memory_format": "memory_format",
        "pin_memory": "flag",
    },
}
"""Of a plan's classes, by their names: the fields that have a place of their own in a row, and what is there.

That is a class, a kind of ``_NAMED``, or a method of ``_Reader``; with a question mark it may be None.
"""
_reported: set[str] = set()


def _table(kind: type[Any]) -> dict[str, Any]:
    """Return all values of a kind that this release of torch has, by the names that it prints."""
    return {_name_of(value): value for value in vars(torch).values() if isinstance(value, kind)}


def _name_of(value: object) -> str:
    return value.name if isinstance(value, WriteItemType) else str(value).removeprefix("torch.")


_NAMED: Mapping[str, tuple[type[Any], Mapping[str, Any]]] = {
    "dtype": (torch.dtype, _table(torch.dtype)),
    "layout": (torch.layout, _table(torch.layout)),
    "memory_format": (torch.memory_format, _table(torch.memory_format)),
    "type": (WriteItemType, {kind.name: kind for kind in WriteItemType}),
}
_TABLES = dict(_NAMED.values())
_ROWS: Mapping[str, type[Any]] = {"size": torch.Size, "tuple": tuple, "list": list}
_Kind = TypeVar("_Kind")


def plan_to_json(plan: SavePlan) -> list[Any]:
    """A plan of ``DefaultSavePlanner`` as JSON-able data.

    Raises:
        StateError: it says something that cannot be expressed; names the entry.
    """
    if plan.storage_data is not None:
        raise StateError(key="the plan", message="it has SavePlan.storage_data, of a writer that is not ours")
    return _row("the plan", plan)


def plan_from_json(data: Any, *, rank: int) -> SavePlan:
    """Check what ``plan_to_json`` returned on another rank, and build the plan.

    Raises:
        StateError: it is not that.
    """
    made: SavePlan = _Reader(rank).row("SavePlan", data, "the plan")
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


def _row(name: str, part: Any) -> list[Any]:
    """A part of a plan, of the entry ``name``: its fields in the order of ``_FIELDS``, and behind them what it has besides."""
    made_of: Any = type(part)
    kind, names = _class_of(made_of), _names_of(made_of)
    row = [_told(name, getattr(part, field)) if field in names else None for field in _FIELDS[kind]]
    more = {} if names <= _FIELDS[kind].keys() else _more_of(kind, part)
    return [*row, more] if more else row


def _told(name: str, value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (str, int, bool):
        return value
    if (table := _TABLES.get(kind)) is not None:
        if table.get(_name_of(value)) != value:
            raise StateError(key=name, message=f"beside sharded tensors {value} cannot be saved")
        return _name_of(value)
    if isinstance(value, list) and value and all(isinstance(item, WriteItem) for item in value):
        return [_row(item.index.fqn, item) for item in value]
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, Mapping):
        return {key: list(path) for key, path in value.items()}
    return _row(name, value)


@functools.cache
def _names_of(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind) if field.init)


def _more_of(kind: str, part: Any) -> dict[str, Any]:
    """Return the fields of this release of torch that have no place of their own here, by name, as JSON-able data."""
    more: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        known = field.default is not dataclasses.MISSING and value == field.default
        if field.name in _FIELDS[kind] or not field.init or known:
            continue
        try:
            more[field.name] = _value_to_json(value)
        except TypeError as error:
            _report(f"{kind}.{field.name}", error)
    return more


@functools.cache
def _class_of(kind: Any) -> str:
    """The name of the class of torch's that ``kind`` is, or derives from."""
    for parent in kind.__mro__:
        if parent.__name__ in _FIELDS:
            return str(parent.__name__)
    message = "a plan of shards has no place for it: this release of torch is not known"
    raise StateError(key=kind.__name__, message=message)


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

    def flag(self, value: Any, what: str) -> bool:
        return self.typed(value, bool, what)

    def hint(self, value: Any, what: str) -> int:
        return self.number(value, _MOST_ITEMS, what)

    def length(self, value: Any, what: str) -> int:
        return self.number(value, _MOST_BYTES, what)

    def paths(self, value: Any, _: str) -> dict[str, tuple[str | int, ...]]:
        row = self.typed(value, dict, "the names")
        if len(row) > _MOST_ITEMS:
            self.refuse("the names", f"{len(row)} are more than {_MOST_ITEMS}")
        return {self.text(name, "a name"): tuple(self.steps(name, path)) for name, path in row.items()}

    def steps(self, name: str, value: Any) -> list[str | int]:
        steps = self.listed(value, _MOST_CHARACTERS, name)
        return [self.number(step, _MOST_BYTES, name) if type(step) is int else self.text(step, name) for step in steps]

    def value(self, value: Any, what: str, depth: int = 0) -> Any:
        """Rebuild the value that ``_value_to_json`` described."""
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
        pairs = self.typed(inner, dict, what).items()
        return {self.text(key, what): self.value(one, what, depth + 1) for key, one in pairs}

    def items(self, value: Any, _: str) -> list[WriteItem]:
        rows = self.listed(value, _MOST_ITEMS, "the entries")
        return [self.item(self.row("WriteItem", row, "an entry")) for row in rows]

    def row(self, kind: str, value: Any, what: str) -> Any:
        """Rebuild an object of one of torch's classes from what ``_row`` returned, with the fields that this release has."""
        fields, row = _FIELDS[kind], self.listed(value, len(_FIELDS[kind]) + 1, what)
        if len(row) < len(fields):
            self.refuse(what, f"{len(row)} facts of a {kind}, expected {len(fields)}")
        made_of: Any = getattr(metadata, kind, None) or getattr(planner, kind)
        names, facts = _names_of(made_of), dict[str, Any]()
        for (field, how), fact in zip(fields.items(), row, strict=False):
            if field in names:
                facts[field] = self.fact(how, fact, what)
                what = facts.get("fqn", getattr(facts[field], "fqn", what))
        besides = self.typed(row[len(fields)], dict, what) if len(row) > len(fields) else {}
        if not besides.keys() <= names - facts.keys():
            self.refuse(kind, f"{sorted(map(str, besides))[:8]!r:.200} are not its further fields")
        try:
            return made_of(**facts, **{field: self.value(inner, what) for field, inner in besides.items()})
        except TypeError as error:  # a field without a default, of which nothing could be told
            self.refuse(kind, str(error))

    def fact(self, how: str, value: Any, what: str) -> Any:
        kind = how.removesuffix("?")
        if value is None and kind != how:
            return None
        if kind in _FIELDS:
            return self.row(kind, value, what)
        if kind in _NAMED:
            return self.named(_NAMED[kind][1], value, what)
        return getattr(self, kind)(value, what)

    def item(self, item: WriteItem) -> WriteItem:
        """Refuse an entry whose facts do not fit together."""
        name, tensor = item.index.fqn, item.tensor_data
        if (tensor is None) is not (item.type == WriteItemType.BYTE_IO):
            self.refuse(name, f"as {item.type.name} it has {'no' if tensor is None else 'a'} tensor")
        if tensor is None:
            return item
        whole, offsets, sizes = tensor.size, tensor.chunk.offsets, tensor.chunk.sizes
        if not len(whole) == len(offsets) == len(sizes):
            self.refuse(name, f"a part of {len(sizes)} dimensions at {len(offsets)} of {len(whole)}")
        behind = any(at + size > most for at, size, most in zip(offsets, sizes, whole, strict=True))
        if behind and 0 not in sizes:
            self.refuse(name, f"{list(sizes)} at {list(offsets)} is not in {list(whole)}")
        if functools.reduce(lambda one, other: one * other, whole, 16) > _MOST_BYTES:
            self.refuse(name, f"a tensor of {list(whole)} is larger than any")
        return item
