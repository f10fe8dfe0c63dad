"""How much longer than usual everything takes here and now: what tests wait for is multiplied by it.

For limits that keep a test from hanging. A limit that is a promise ("comes back within 5 s") is scaled only where no time limit
of the product is behind it.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

# What the work below takes on one quiet core of the machines that the limits were made for.
_REFERENCE_S = 0.3
_MOST = 10.0
_Found = TypeVar("_Found")
_NAME = "RANKS_PATIENCE"  # spawn_ranks heeds it, too


def scaled(seconds: float) -> float:
    """So many seconds of a quiet machine, as seconds of this one."""
    return seconds * factor()


def wait_until(condition: Callable[[], _Found], seconds: float = 10.0, what: str = "it") -> _Found:
    """What ``condition`` returns once that is true; TimeoutError after so many seconds of a quiet machine."""
    deadline = time.monotonic() + scaled(seconds)
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {scaled(seconds)} s")
        time.sleep(0.005)
    return found


@functools.cache
def factor() -> float:
    """At least 1, at most 10. Measured once; processes that are started with this one's environment take it over."""
    if _NAME not in os.environ:
        os.environ[_NAME] = f"{_measure():.2f}"
    return float(os.environ[_NAME])


def _measure() -> float:
    """From the time of a fixed piece of work with a new process, and from how many programs want a processor."""
    begun = time.monotonic()
    for _ in range(2):
        subprocess.run([sys.executable, "-IS", "-c", "sum(range(10_000_000))"], check=True)
    slow = (time.monotonic() - begun) / _REFERENCE_S
    crowded = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(_MOST, max(1.0, slow, crowded))


__all__ = ["factor", "scaled", "wait_until"]
