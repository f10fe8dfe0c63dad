"""Decides how often something that failed is tried again."""

from __future__ import annotations

_LONGEST = 16


class Tries:
    """Counts the times at which something could be tried. What failed is tried less and less often. Any thread.

    Attributes:
        count: how often ``begin`` was called.
    """

    def __init__(self) -> None:
        self.count = 0
        self._failures = 0
        self._from = 0

    def begin(self) -> int:
        """The next time has come. Returns its number."""
        self.count += 1
        return self.count

    @property
    def allowed(self) -> bool:
        """Whether it is tried now."""
        return self.count >= self._from

    def failed(self) -> None:
        """Note a failure: it is not tried the next time; nor, after further failures in a row, the 3, 7 or 15 next times."""
        self._failures += 1
        self._from = max(self._from, self.count + min(2**self._failures, _LONGEST))

    def refused(self) -> None:
        """Note that it cannot be done: it is not tried the next 15 times."""
        self._from = self.count + _LONGEST

    def worked(self) -> None:
        """Note that it was done."""
        self._failures = 0
