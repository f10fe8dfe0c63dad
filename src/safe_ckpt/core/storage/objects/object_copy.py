"""An object of an earlier checkpoint that gets a copy within its bucket: the store does it, and no byte of it is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from safe_ckpt.core.storage.copier import FileCopy

MOST_BYTES = 5 << 30
"""S3 copies no larger object in one request."""


@dataclass(frozen=True, kw_only=True)
class ObjectCopy:
    """One object to copy.

    Attributes:
        sources: addresses of objects with its bytes, in the same bucket. The first of them that is still there is copied.
        path: the address of the copy.
        size_bytes: its length.
        xxh3_128: of its bytes.
        instead: the file that is sent where the store makes no copy; None: one of the sources is read and sent.
    """

    sources: tuple[str, ...]
    path: str
    size_bytes: int
    xxh3_128: str
    instead: FileCopy | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ObjectCopy:
        """From what ``to_json`` returned."""
        instead = FileCopy.from_json(data["instead"]) if data["instead"] is not None else None
        return cls(**{**data, "sources": tuple(data["sources"]), "instead": instead})
