"""Facts from the kernel: which processes run, since when and in what state; how much memory and processor time is left.

A control group that runs out of memory kills instead of refusing, so a caller that wants much memory asks here first. Versions
1 and 2 of control groups are read; what cannot be read is no limit.
"""

from __future__ import annotations

import functools
import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path


def process_start(pid: int) -> int | None:
    """The time when a process began, in clock ticks since the kernel did; None when it has ended.

    Raises:
        OSError: there is no such process, or it cannot be looked at.
    """
    fields = _stat(pid).split()
    return None if len(fields) < 20 or fields[0] in ("Z", "X") else int(fields[19])


def process_began() -> float | None:
    """The time when this process began, in seconds since the epoch by the clock as it is now; None where that is not known."""
    try:
        ticks = process_start(os.getpid())
        return (
            None
            if ticks is None
            else time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
        )
    except (OSError, ValueError, AttributeError):
        return None


def process_state(pid: int) -> str:
    """The kernel's one-letter state of a process on this machine, "" when it is gone, "?" where one cannot look just now."""
    try:
        return _stat(pid)[:1]
    except (FileNotFoundError, ProcessLookupError):
        return "" if Path("/proc/self/stat").exists() else "?"
    except OSError:  # no descriptors left, say: no sign of a death
        return "?"


def _stat(pid: int) -> str:
    """The fields of ``/proc/<pid>/stat`` behind the process's name."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text[text.rfind(")") + 2 :]


@functools.cache
def kernel_id() -> str:
    """Different for every boot of every machine; "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def pid_namespace() -> int:
    """The number of this process's PID namespace; 0 if unknown."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def machine_id() -> str:
    """Equal for two processes exactly when each can look up the other by its pid, and reach it through the loopback."""
    boot, spaces = kernel_id(), []
    try:
        spaces = [Path("/proc/self/ns", kind).stat().st_ino for kind in ("pid", "net")]
    except OSError:
        boot = ""
    if not boot:
        return f"{socket.gethostname()}/{os.getpid()}"
    return f"{socket.gethostname()}/{boot}/{spaces}"


_MEMINFO = Path("/proc/meminfo")
_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_PAGES = Path("/proc/self/statm")
_NO_LIMIT_BYTES = 1 << 60  # version 1 writes "none" as a huge number
# Of version 2 and 1: the limit, the usage, and the rows of memory.stat that the kernel reclaims before it kills. The page cache
# in use is among them; shared memory is not.
_MEMORY_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def available_bytes(
    *, meminfo: Path = _MEMINFO, membership: Path = _MEMBERSHIP, cgroups: Path = _CGROUPS
) -> int | None:
    """Bytes that can still be taken without anything being killed; None where that is unknown.

    Args:
        meminfo: the kernel's table, for tests.
        membership: which control groups this process is in, for tests.
        cgroups: where the control groups are mounted, for tests.
    """
    rows = (line.split() for line in _text(meminfo).splitlines() if line.startswith("MemAvailable:"))
    sizes = [int(row[1]) * 1024 for row in rows if len(row) > 1 and row[1].isdigit()]
    sizes += [left for group in _groups(membership, cgroups) for _, left in _memory(group)]
    return max(0, min(sizes)) if sizes else None


def memory_limit_bytes(membership: Path = _MEMBERSHIP, cgroups: Path = _CGROUPS) -> int | None:
    """The memory that the control groups allow; None for no limit. For the arguments see ``available_bytes``."""
    return min((limit for group in _groups(membership, cgroups) for limit, _ in _memory(group)), default=None)


def address_space_left() -> int | None:
    """Bytes that this process may still map (``ulimit -v``); None for no limit. Memory may be free, and not be had."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _text(_PAGES).split()
    if limit == resource.RLIM_INFINITY or not pages:
        return None
    return max(0, limit - int(pages[0]) * resource.getpagesize())


def largest_file_bytes() -> int | None:
    """The size to which a file of this process may grow (``ulimit -f``), one in memory as well; None for no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit == resource.RLIM_INFINITY else limit


def _groups(membership: Path, cgroups: Path) -> Iterator[Path]:
    """The groups of this process and all above them: each of them limits."""
    for line in _text(membership).splitlines():
        _, controllers, name = line.split(":", 2)
        for controller in {"", "memory"}.intersection(controllers.split(",")):  # "" is version 2
            base = cgroups / controller
            group = base / name.lstrip("/")
            for level in (group, *group.parents):
                if level == base.parent:
                    break
                yield level


def _memory(group: Path) -> Iterator[tuple[int, int]]:
    """The limit of a group, and what it leaves."""
    for limit_file, usage_file, reclaimable in _MEMORY_FILES:
        limit, used = _text(group / limit_file).strip(), _text(group / usage_file).strip()
        if limit.isdigit() and int(limit) < _NO_LIMIT_BYTES:  # "max" is no limit
            rows = (line.split() for line in _text(group / "memory.stat").splitlines())
            cached = sum(int(row[1]) for row in rows if row[0] in reclaimable)
            yield int(limit), int(limit) - int(used or 0) + cached


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
