"""What lies on the disk, going by the events: each checkpoint's path and size. No I/O."""

from __future__ import annotations

import posixpath
from collections.abc import Set as AbstractSet


class Disk:
    """Follows commits and removals.

    Attributes:
        kept_bytes: the size of all that is there.
    """

    def __init__(self) -> None:
        self.kept_bytes = 0
        self._sizes: dict[str, int] = {}
        self._newest = ""

    def put(self, path: str, size_bytes: int) -> None:
        """A checkpoint appeared, or was replaced."""
        self.take(path)
        self._sizes[path] = size_bytes
        self._newest = path
        self.kept_bytes += size_bytes

    def take(self, path: str) -> int | None:
        """It is gone; returns its size if it was known."""
        size_bytes = self._sizes.pop(path, None)
        self.kept_bytes -= size_bytes or 0
        return size_bytes

    def keep_only(self, names: AbstractSet[str]) -> None:
        """Beside the newest only these are there: a job that was killed may have deleted others and not come to say so."""
        folder, newest = posixpath.split(self._newest)
        if names and newest in names:
            gone = [
                path
                for path in self._sizes
                if posixpath.dirname(path) == folder and posixpath.basename(path) not in names
            ]
            for path in gone:
                self.take(path)
