"""What this process keeps: to show that a run that goes on does not keep ever more."""

from __future__ import annotations

import gc
import threading
from pathlib import PurePath

from safe_ckpt.core.formats.zip_archive import Record

_WITH_THEM = (PurePath, threading.Event, threading.Condition)
SLACK = 20
"""The last saves may be in different states at two looks."""


def kept():
    """The number of live objects of this package's types, and of those that come with them.

    Without the places of tensors in the last file: its many may be in a thread's hands until the next save.
    """
    gc.collect()
    kinds = map(type, gc.get_objects())
    ours = (kind for kind in kinds if str(kind.__module__).startswith("safe_ckpt.") or issubclass(kind, _WITH_THEM))
    return sum(kind is not Record for kind in ours)
