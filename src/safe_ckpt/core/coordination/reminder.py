"""When to say that other ranks are missing, and what in the script may be the reason."""

from __future__ import annotations

import linecache
import math
import re
import sys
import time
from types import FrameType

_SOON_S = 2.0
_ONE_ALONE = re.compile(
    r"(el)?if\b.*(main_process|process_zero|global_zero|rank\w*(\(.*\))?\s*==\s*0|not\s+[\w.]*rank)"
)


class Reminder:
    """Due once: after a while, and within seconds where the script lets one process alone make the call.

    Args:
        after_s: how long to wait with it otherwise.
    """

    def __init__(self, after_s: float) -> None:
        self._begun, self._after_s = time.monotonic(), after_s
        self._block: str | None = None

    @property
    def waited_s(self) -> float:
        """How long ago the wait began."""
        return time.monotonic() - self._begun

    def is_due(self) -> bool:
        """Whether to say it. Called on the thread that waits."""
        if self._block is None and self.waited_s >= min(_SOON_S, self._after_s):
            self._block = _block_above(sys._getframe(1))
            if self._block:
                self._after_s = 0.0
        return self.waited_s >= self._after_s

    def said(self) -> str:
        """It is said now, and not again. Returns what may be the reason, as a sentence; "" where nothing shows it."""
        self._after_s = math.inf
        return (
            f". {self._block}: move the call out of this block, which one process alone enters" if self._block else ""
        )


def _block_above(frame: FrameType | None) -> str:
    """The innermost line, of those under which the calls that led here lie, that lets one process pass; "" for none."""
    while frame is not None:
        name, depth = frame.f_code.co_filename, math.inf
        for number in range(frame.f_lineno, frame.f_code.co_firstlineno - 1, -1):
            line = linecache.getline(name, number)
            text = line.strip()
            if text and not text.startswith("#") and (indent := len(line) - len(line.lstrip())) < depth:
                depth = indent
                if _ONE_ALONE.match(text):
                    condition, _, _ = text.partition(":")
                    return f"{name}:{number}: {condition}"
        frame = frame.f_back
    return ""
