"""What lies on the disk, going by the events: each checkpoint's path and size. No I/O."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence


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

    def keep_only(self, names: Sequence[str], count: int) -> None:
        """Only so many are there: a job that was killed may have deleted others and not come to say so.

        Args:
            names: of the newest of them, or of all, oldest first.
            count: of all that are there. Where that is more than there are names, those that were committed last of the
                others are taken to be there.
        """
        folder, newest = posixpath.split(self._newest)
        if newest not in names:
            return
        known = set(names)
        others = [
            path for path in self._sizes if posixpath.dirname(path) == folder and posixpath.basename(path) not in known
        ]
        for path in others[: max(0, len(others) - (count - len(names)))]:
            self.take(path)
