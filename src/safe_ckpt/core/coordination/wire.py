"""Errors on their way from one rank or process to another, as JSON-able data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safe_ckpt.errors import SafeCheckpointError, facts_of, named


def to_wire(error: BaseException, *, rank: int, phase: str) -> dict[str, Any]:
    """Turn an error into JSON-able data for other ranks and processes, with all its fields.

    A foreign one travels as ``named`` has it: its class may not be importable where the data arrives.
    """
    ours = named(error, rank=rank, phase=phase)
    return {"type": type(ours).__name__, "fields": facts_of(ours)}


def from_wire(data: Mapping[str, Any]) -> SafeCheckpointError:
    """Rebuild the error that ``to_wire`` described."""
    kind = _tree(SafeCheckpointError)[str(data["type"])]
    facts = {key: tuple(value) if isinstance(value, list) else value for key, value in data["fields"].items()}
    return kind(**facts)


def _tree(root: type[SafeCheckpointError]) -> dict[str, type[SafeCheckpointError]]:
    kinds = {root.__name__: root}
    for child in root.__subclasses__():
        kinds.update(_tree(child))
    return kinds
