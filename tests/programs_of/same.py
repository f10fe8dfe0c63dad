"""Whether two trees are the same in all that torch.save and torch.load keep: values, order, types, and what is one object."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch


def difference(one: Any, other: Any) -> str:
    """The first place where they differ, and how; empty if they are the same. ``one`` is what it should be."""
    pairs = zip(_parts("", one), _parts("", other), strict=False)
    for (place, left), (where, right) in pairs:
        if place != where:
            return f"order: {where} instead of {place}"
        if how := _unlike(left, right):
            return f"{how.partition(' ')[0]}: {place or 'the whole'}: {how}"
    if (count := sum(1 for _ in _parts("", one))) != (found := sum(1 for _ in _parts("", other))):
        return f"count: {found} parts instead of {count}"
    for kind, shared in (("object", _shared(one, _identity)), ("memory", _shared(one, _memory))):
        theirs = _shared(other, _identity if kind == "object" else _memory)
        if shared != theirs:
            return f"{kind}: one {kind} are {theirs} instead of {shared}"
    return ""


def _parts(place: str, one: Any, *, depth: int = 12) -> Iterator[tuple[str, Any]]:
    """All parts, containers too, with their places."""
    yield place, one
    if not depth:
        return
    if not _holds(one):
        inner = []
    elif isinstance(one, Mapping):
        inner = [(f"{place}[{key!r}]", value) for key, value in one.items()]
    elif dataclasses.is_dataclass(one):
        inner = [(f"{place}.{field.name}", getattr(one, field.name)) for field in dataclasses.fields(one)]
    else:
        inner = [(f"{place}[{n}]", value) for n, value in enumerate(one)]
    for where, value in inner:
        yield from _parts(where, value, depth=depth - 1)


def _holds(one: Any) -> bool:
    """Whether it is a container, whose parts are compared one by one."""
    if isinstance(one, torch.Size | type):
        return False
    return isinstance(one, Mapping | list | tuple | deque) or dataclasses.is_dataclass(one)


def _unlike(one: Any, other: Any) -> str:
    if type(one) is not type(other):
        return f"type {type(other).__name__} instead of {type(one).__name__}"
    if isinstance(one, torch.Tensor):
        return _unlike_tensors(one, other)
    if isinstance(one, numpy.ndarray):
        same = one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        return "" if same else f"array {other!r} instead of {one!r}"
    if _holds(one):
        return ""  # its parts come by themselves
    if isinstance(one, set | frozenset):
        return "" if one == other else f"value {other!r} instead of {one!r}"
    return "" if repr(one) == repr(other) else f"value {other!r} instead of {one!r}"


def _unlike_tensors(one: torch.Tensor, other: torch.Tensor) -> str:
    for name in ("dtype", "layout", "shape", "requires_grad", "is_meta"):
        if getattr(one, name) != getattr(other, name):
            return f"{name} {getattr(other, name)} instead of {getattr(one, name)}"
    if getattr(one, "mine", None) != getattr(other, "mine", None):
        return "attribute lost"
    if one.is_meta:
        return ""
    if one.layout is torch.strided:
        matters = one.numel() > 1
        strides = [(a, b) for a, b, size in zip(one.stride(), other.stride(), one.shape, strict=True) if size > 1]
        if matters and any(a != b for a, b in strides):
            return f"stride {other.stride()} instead of {one.stride()}"
        return "" if _bytes_of(one) == _bytes_of(other) else "numbers differ"
    return "" if _bytes_of(one.to_dense()) == _bytes_of(other.to_dense()) else "numbers differ"


def _bytes_of(one: torch.Tensor) -> bytes:
    one = one.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return torch.empty(one.numel(), dtype=one.dtype).copy_(one.reshape(-1)).view(torch.uint8).numpy().tobytes()


def _shared(tree: Any, key: Any) -> list[list[str]]:
    """Places that hold one and the same thing."""
    found: dict[Any, list[str]] = {}
    for place, one in _parts("", tree):
        if (of := key(one)) is not None:
            found.setdefault(of, []).append(place)
    return [places for places in found.values() if len(places) > 1]


def _identity(one: Any) -> Any:
    return id(one) if isinstance(one, torch.Tensor | list | dict) else None


def _memory(one: Any) -> Any:
    """The storage of a tensor that has one and holds bytes."""
    if not isinstance(one, torch.Tensor) or one.layout is not torch.strided or one.is_meta or not one.numel():
        return None
    return one.untyped_storage().data_ptr()
