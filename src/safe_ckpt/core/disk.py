"""How much room a file system has, as far as it says."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_NOT_TOLD = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EOVERFLOW)


def free_bytes(path: Path) -> int | None:
    """Free bytes for this user; None where that is not known: some file systems answer with zeros, or not at all.

    Raises:
        OSError: any other reason.
    """
    try:
        found = os.statvfs(path)
    except OSError as error:
        if error.errno in _NOT_TOLD:
            return None
        raise
    return judge_free(found)


def judge_free(found: os.statvfs_result) -> int | None:
    """The same of what ``os.statvfs`` returned. One that is full has a size, one that has no size says nothing."""
    return found.f_bavail * found.f_frsize if found.f_blocks and found.f_frsize else None
