"""How much fits."""

from __future__ import annotations

import errno
import os

from safe_ckpt.core.storage import durable as disk
from safe_ckpt.doctor.examined import Examined
from safe_ckpt.doctor.finding import Finding, fail, ok, refused, skipped, warn
from safe_ckpt.text import bytes_text

_LITTLE_BYTES = 1 << 30
_FEW_INODES = 10_000
_PROBE_BYTES = 4 << 20


def space(examined: Examined) -> list[Finding]:
    """Free bytes, against the size of a checkpoint."""
    free_bytes = disk.free_bytes(examined.existing)
    if free_bytes is None:
        return [skipped("space", "this file system does not say how much is free, so no save checks it beforehand")]
    stat = os.statvfs(examined.existing)
    total_bytes = stat.f_blocks * stat.f_frsize
    size, why = examined.state_bytes, examined.state_from
    return [judge_space(free_bytes=free_bytes, total_bytes=total_bytes, size=size, why=why)]


def judge_space(*, free_bytes: int, total_bytes: int, size: int | None, why: str = "") -> Finding:
    """Whether that is enough: a new checkpoint is complete before an old one is deleted.

    Args:
        free_bytes: free for this user.
        total_bytes: of the file system.
        size: bytes of one checkpoint, if that is known.
        why: where it is known from.
    """
    text = f"{bytes_text(free_bytes)} free of {bytes_text(total_bytes)}"
    figures = {"free_bytes": free_bytes, "total_bytes": total_bytes, "state_bytes": size}
    if size is None:
        if free_bytes < _LITTLE_BYTES:
            advice = "that is little: free some, or say how large a checkpoint is with --state-bytes"
            return warn("space", text, advice, **figures)
        return ok("space", f"{text}; --state-bytes tells how many checkpoints fit", **figures)
    fit = free_bytes // size
    text += f": {fit} {'checkpoint fits' if fit == 1 else 'checkpoints fit'} of {bytes_text(size)} each ({why})"
    if fit == 0:
        advice = "delete something, keep fewer checkpoints (Retention), or choose another directory"
        return fail("space", text, advice, fit=0, **figures)
    if fit == 1:
        advice = "a new one is complete before an old one is deleted: make room for two"
        return warn("space", text, advice, fit=1, **figures)
    return ok("space", text, fit=fit, **figures)


def inodes(examined: Examined) -> list[Finding]:
    """How many files may still be created."""
    try:
        stat = os.statvfs(examined.existing)
    except OSError as error:
        return [skipped("files", f"this file system does not say how many may be created ({error.strerror})")]
    if not stat.f_files:
        return [ok("files", "no limit on their number")]
    text = f"{stat.f_favail} more can be created"
    if stat.f_favail < _FEW_INODES:
        advice = "delete files that nobody needs: a full table of inodes fails like a full disk, with space left"
        return [warn("files", text, advice, free_inodes=stat.f_favail)]
    return [ok("files", text, free_inodes=stat.f_favail)]


def quota(examined: Examined) -> list[Finding]:
    """Whether space that is free is also given: a quota shows only when something is taken."""
    path = examined.place() / "taken"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.posix_fallocate(fd, 0, _PROBE_BYTES)
    except OSError as error:
        if error.errno in (errno.EDQUOT, errno.ENOSPC, errno.EFBIG):
            return [refused("quota", error, f"{bytes_text(_PROBE_BYTES)} were asked for")]
        return [skipped("quota", f"space cannot be reserved on this file system ({error.strerror})")]
    finally:
        os.close(fd)
        path.unlink()
    return [ok("quota", f"{bytes_text(_PROBE_BYTES)} were given; what a quota leaves beyond that cannot be seen")]
