"""When to say that other ranks are missing, and what in the script may be the reason."""

from __future__ import annotations

import linecache
import logging
import math
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

logger = logging.getLogger(__name__)
_SOON_S = 2.0
_ONE_ALONE = re.compile(r"(el)?if\b.*(main_process|process_zero|global_zero|rank\w*(\(.*\))?\s*==\s*0|not [\w.]*rank)")
_OURS = f"{Path(__file__).parents[2]}/"


class Reminder:
    """Says once that ranks are missing: after a while, and within seconds where the script lets one alone make the call.

    Args:
        text: what to say, with a place for the ranks.
        after_s: how long to wait with it.
        limit_s: how long the wait may take.
    """

    def __init__(self, text: str, after_s: float, limit_s: float) -> None:
        self._text, self._after_s, self._limit_s = text, after_s, limit_s
        self._begun, self._block = time.monotonic(), ""
        self._look_s = min(_SOON_S, after_s)

    def __call__(self, missing: Callable[[], Iterable[int]]) -> None:
        """Called now and then, on the thread that waits."""
        waited_s = time.monotonic() - self._begun
        if waited_s >= self._look_s:
            self._block, self._look_s = _block_above(sys._getframe(1)), math.inf
        if (waited_s >= self._after_s or self._block) and (ranks := sorted(missing())):
            message = self._text + "%s. Waiting for %.0f s more"
            logger.warning(message, ranks, self._block, self._limit_s - waited_s)
            self._after_s, self._block = math.inf, ""


def _block_above(frame: FrameType | None) -> str:
    """The innermost line, of those under which the calls that led here lie, that lets one process pass, as a sentence."""
    while frame is not None:
        name, depth = frame.f_code.co_filename, math.inf
        # In the code of this package one rank alone waits for the others.
        first = frame.f_lineno if name.startswith(_OURS) else frame.f_code.co_firstlineno - 1
        for number in range(frame.f_lineno, first, -1):
            line = linecache.getline(name, number)
            text = line.strip()
            if text and not text.startswith("#") and (indent := len(line) - len(line.lstrip())) < depth:
                depth = indent
                if _ONE_ALONE.match(text):
                    place = f"{name}:{number}: {text.partition(':')[0]}"
                    return f". {place}: move the call out of this block, which one process alone enters"
        frame = frame.f_back
    return ""
