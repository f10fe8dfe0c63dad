"""JSON from a file that anybody may have written: bounded in length and number of values."""

from __future__ import annotations

import json
from typing import Any

MOST_BYTES = 64 << 20
_MOST_VALUES = 3_000_000  # each takes some 60 to 100 bytes in memory


def parse_json(text: bytes, *, exact: bool = False) -> Any:
    """Parse it.

    Args:
        text: what the file has.
        exact: refuse a number that ``json`` would have written with other digits: it was changed since.

    Raises:
        ValueError: it is no JSON, has one key twice in one object, or is larger than any checkpoint needs.
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"{len(text)} bytes are too many")
    if sum(text.count(mark) for mark in (b",", b"[", b"{")) > _MOST_VALUES:
        raise ValueError(f"more than {_MOST_VALUES} values are too many")
    try:
        return json.loads(text, object_pairs_hook=_without_twins, parse_float=_exactly if exact else float)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key stands in it twice")
    return values


def _exactly(digits: str) -> float:
    number = float(digits)
    if repr(number) != digits:
        raise ValueError(f"{digits:.40} is not how a number is written")
    return number
