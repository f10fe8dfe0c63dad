"""How a writer learns that a file is whole: by one value, which has the digest, so that no part of it can be taken for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from safe_ckpt.core.storage.durable import WrittenFile


@dataclass(frozen=True, kw_only=True)
class Closing:
    """What is known of a file when the last of its bytes has been hashed. It is announced as one value, so never in part.

    Attributes:
        xxh3_128: of the whole file, with the tail.
        health: what was found of its numbers; None where they were not looked at.
        tail: the bytes that follow the image.
    """

    xxh3_128: str
    health: Mapping[str, Any] | None
    tail: bytes = b""

    def written(self, path: str, size_bytes: int, **facts: Any) -> WrittenFile:
        """Of the file at ``path``, which is there now."""
        return WrittenFile(path=path, size_bytes=size_bytes, xxh3_128=self.xxh3_128, health=self.health, **facts)
