"""Memory for snapshots: what can be taken, and in what kind of pages."""

from __future__ import annotations

import os
from pathlib import Path

from safe_ckpt.core.staging import host_memory
from safe_ckpt.doctor import cgroup
from safe_ckpt.doctor.examined import Examined
from safe_ckpt.doctor.finding import Finding, ok, refused, skipped, warn
from safe_ckpt.text import bytes_text

_PROBE_BYTES = 16 << 20
_MEMINFO = Path("/proc/meminfo")
_SHMEM_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
DEV_SHM = "/dev/shm"  # noqa: S108 - looked at, never written to
_SMALL_SHM_BYTES = 1 << 30
_TIGHT_BYTES = 1 << 30


def memory(examined: Examined) -> list[Finding]:
    """How much a snapshot may take on this host."""
    free = host_memory.available_bytes()
    if free is None:
        return [skipped("memory", "the kernel does not tell how much is free")]
    limit = cgroup.allowance().memory_bytes
    return [judge_memory(free_bytes=free, limit_bytes=limit, size=examined.state_bytes)]


def judge_memory(*, free_bytes: int, limit_bytes: int | None, size: int | None) -> Finding:
    """Whether a snapshot of ``size`` bytes fits into what is free, below a control group's limit."""
    limit = f", limited to {bytes_text(limit_bytes)} by a control group" if limit_bytes is not None else ""
    text = f"{bytes_text(free_bytes)} can still be taken{limit}"
    figures = {"free_bytes": free_bytes, "limit_bytes": limit_bytes}
    if size is not None and size > free_bytes:
        advice = (
            f"a snapshot of {bytes_text(size)} on this host alone does not fit: set max_host_bytes, give the job more "
            "memory, or spread the state over more hosts"
        )
        return warn("memory", text, advice, **figures)
    if size is None and free_bytes < _TIGHT_BYTES:
        return warn("memory", text, "that is little: set max_host_bytes, or give the job more memory", **figures)
    return ok("memory", text, **figures)


def shared_memory(_: Examined) -> list[Finding]:
    """The anonymous memory that snapshots lie in, and its pages."""
    try:
        fd = os.memfd_create("safe_ckpt-doctor", os.MFD_CLOEXEC)
    except OSError as error:
        found = refused("shared memory", error, "memfd_create")
        return [warn(found.check, found.measured, "a sandbox forbids it: allow the system call memfd_create")]
    try:
        os.posix_fallocate(fd, 0, _PROBE_BYTES)
    except OSError as error:
        found = refused("shared memory", error, f"{bytes_text(_PROBE_BYTES)} were asked for")
        return [warn(found.check, found.measured, "snapshots live there: give the job more memory")]
    finally:
        os.close(fd)
    pages = chosen(_text(_SHMEM_PAGES))
    if pages in ("always", "advise", "within_size", "force"):
        return [ok("shared memory", f"works, in huge pages ({pages})", huge_pages=pages)]
    hint = f"copying into huge pages is quicker: echo advise > {_SHMEM_PAGES}" if pages else ""
    return [ok("shared memory", "works, in small pages", hint, huge_pages=pages or None)]


def chosen(text: str) -> str:
    """``always [never]`` -> ``never``; "" when nothing is chosen."""
    return next((word[1:-1] for word in text.split() if word.startswith("[")), "")


def dev_shm(_: Examined) -> list[Finding]:
    """``/dev/shm``: snapshots do not use it, loaders' workers and NCCL do."""
    try:
        stat = os.statvfs(DEV_SHM)
    except OSError:
        return [ok(DEV_SHM, "is not there; snapshots do not use it")]
    size = stat.f_blocks * stat.f_frsize
    text = f"{bytes_text(stat.f_bavail * stat.f_frsize)} free of {bytes_text(size)}; snapshots do not use it"
    if size < _SMALL_SHM_BYTES:
        advice = "workers of data loaders and NCCL do use it, and die of a bus error when it is full: docker run --shm-size=8g"
        return [warn(DEV_SHM, text, advice, size_bytes=size)]
    return [ok(DEV_SHM, text, size_bytes=size)]


def swap(_: Examined) -> list[Finding]:
    """Swap: a snapshot that is swapped out makes a save slow."""
    rows = (line.split() for line in _text(_MEMINFO).splitlines())
    found = {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[0] in ("SwapTotal:", "SwapFree:")}
    if not found.get("SwapTotal"):
        return [ok("swap", "none")]
    used = found["SwapTotal"] - found.get("SwapFree", 0)
    text = f"{bytes_text(used)} of {bytes_text(found['SwapTotal'])} in use"
    if used > found["SwapTotal"] // 2:
        return [warn("swap", text, "memory is short on this host: saves will be slow, and so will training")]
    return [ok("swap", text, used_bytes=used)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
