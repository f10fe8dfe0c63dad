"""Whether the code that runs was called from a signal handler."""

from __future__ import annotations

import functools
import signal
import sys
from types import CodeType, FrameType


def in_signal_handler() -> bool:
    """Whether a registered signal handler is on this thread's stack, between any two steps of what it interrupted."""
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


def _code(handler: object) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    code = getattr(handler, "__code__", None)
    if code is None and callable(handler):
        # Lightning composes several handlers in an object that is called.
        code = getattr(type(handler).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None
