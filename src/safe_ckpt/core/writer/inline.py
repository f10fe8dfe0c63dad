"""Inline saves: no process is started for them, and they are over when they return."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_changing = threading.RLock()
_entered = 0


@contextlib.contextmanager
def inline() -> Iterator[None]:
    """Have what is opened in the block save inline, in this process, on all threads."""
    global _entered  # noqa: PLW0603 - of the process, as the processes and locks are that it is about
    with _changing:
        _entered += 1
    try:
        yield
    finally:
        with _changing:
            _entered -= 1


def saves_inline() -> bool:
    """Whether what is opened now saves inline."""
    return _entered > 0
