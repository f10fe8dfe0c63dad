"""What this process keeps: to show that a run that goes on does not keep ever more."""

from __future__ import annotations

import gc
import threading
from pathlib import PurePath

_WITH_THEM = (PurePath, threading.Event, threading.Condition)
SLACK = 20
"""The last saves may be in different states at two looks."""


def kept():
    """The number of live objects of this package's types, and of those that come with them."""
    gc.collect()
    kinds = map(type, gc.get_objects())
    return sum(str(kind.__module__).startswith("safe_ckpt.") or issubclass(kind, _WITH_THEM) for kind in kinds)
