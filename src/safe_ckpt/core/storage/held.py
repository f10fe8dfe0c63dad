"""Files that were written before and are relied upon. As long as one is open its bytes cannot vanish, whoever deletes its name.

An object cannot be held.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from safe_ckpt.core.storage.copier import Stamp
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.presence import opened


def can_be_held(place: Place) -> bool:
    """Whether what lies there stays as long as it is open."""
    return isinstance(place, Path)


def stamp_at(place: Place) -> Stamp | None:
    """Return the stamp of a file; None where there is none: it is gone, or is an object."""
    try:
        return Stamp.of(os.stat(place)) if isinstance(place, Path) else None
    except OSError:
        return None


def hold(places: Iterable[Place], known: Stamp | None, size_bytes: int) -> int | None:
    """Open the first of these that was not touched since. The ctime tells nothing: a further name changes that.

    Args:
        places: names of the file; some may be gone, or another file's by now.
        known: its stamp then; None where that is not known.
        size_bytes: how long it was when it was written.

    Returns:
        The descriptor; None if there is none.
    """
    if known is None or known.size_bytes != size_bytes:
        return None
    for place in places:
        try:
            with opened(str(place), os.O_RDONLY | os.O_NOFOLLOW) as fd:
                if _facts(Stamp.of(os.fstat(fd))) == _facts(known):
                    return os.dup(fd)
        except OSError:
            continue
    return None


def _facts(stamp: Stamp) -> tuple[int, ...]:
    return stamp.size_bytes, stamp.device, stamp.inode, stamp.mtime_ns
