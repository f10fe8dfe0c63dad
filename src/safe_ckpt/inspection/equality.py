"""Whether two values that are no tensors are the same, however nested, and without running anything that could tell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from safe_ckpt.inspection.objects import Opaque, Storage, Tensor
from safe_ckpt.inspection.tensors import describe

_MOST_PAIRS = 4_000_000
_UNORDERED = ("builtins.set", "builtins.frozenset")


def same(one: object, other: object) -> bool:
    """Whether they are equal in type and value, NaN to NaN included. What is too large to tell counts as different.

    Of a tensor deep within an object of an unknown class only type and shape are compared.
    """
    stack: list[tuple[Any, Any]] = [(one, other)]
    seen: set[tuple[int, int]] = set()  # what contains itself is compared once
    for _ in range(_MOST_PAIRS):
        if not stack:
            return True
        first, second = stack.pop()
        if isinstance(first, _NESTED):
            if (id(first), id(second)) in seen:
                continue
            seen.add((id(first), id(second)))
        below = _below(first, second)
        if below is None:
            return False
        stack += below
    return False


_NESTED = (dict, list, tuple, Opaque)


def _below(one: Any, other: Any) -> Iterable[tuple[Any, Any]] | None:
    """The pairs that are still to be compared; None when it is clear already that the two differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        alike = list(map(_text, one)) == list(map(_text, other))
        return list(zip(one.values(), other.values(), strict=True)) if alike else None
    if type(one) is not type(other):
        return None
    if isinstance(one, list | tuple):
        return list(zip(one, other, strict=True)) if len(one) == len(other) else None
    if isinstance(one, Opaque):
        return _within(one, other)
    if isinstance(one, Tensor | Storage):
        return [] if _facts(one) == _facts(other) else None
    return [] if one == other or (one != one and other != other) else None  # noqa: PLR0124 - NaN


def _within(one: Opaque, other: Opaque) -> list[tuple[Any, Any]] | None:
    if one.made_by != other.made_by or len(one.items) != len(other.items):
        return None
    pairs = [(one.args, other.args), (one.state, other.state)]
    unordered = str(one.made_by) in _UNORDERED
    rows = (sorted(row, key=describe) if unordered else row for row in (one.items, other.items))
    return pairs + list(zip(*rows, strict=True))


def _text(key: object) -> str | bytes:
    return key if isinstance(key, str | bytes) else describe(key)


def _facts(value: Tensor | Storage) -> tuple[Any, ...]:
    if isinstance(value, Storage):
        return (value.dtype, value.count)
    return (value.dtype, value.shape, value.offset, value.stride)
