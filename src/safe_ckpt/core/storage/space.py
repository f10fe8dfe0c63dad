"""How much room a file system has, as far as it says."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

_NOT_TOLD = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EOVERFLOW)


def free_bytes(path: Path) -> int | None:
    """Free bytes for this user; None where that is not known: some file systems answer with zeros, or not at all.

    Raises:
        OSError: any other reason.
    """
    try:
        found = shutil.disk_usage(path)
    except OSError as error:
        if error.errno in _NOT_TOLD:
            return None
        raise
    return judge_free(found.total, found.free)


def judge_free(total_bytes: int, free_bytes: int) -> int | None:
    """The same of figures. What is full has a size; what has no size says nothing."""
    return free_bytes if total_bytes else None
