"""How much memory this process may still take: what the kernel has, and what its control group leaves it.

A control group that runs out does not refuse, it kills; so whoever wants much asks here first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes(
    *, meminfo: Path = _MEMINFO, membership: Path = _MEMBERSHIP, cgroups: Path = _CGROUPS
) -> int | None:
    """Bytes that can still be taken without anybody being killed; None where that cannot be told.

    Args:
        meminfo: the kernel's table, for tests.
        membership: which control groups this process is in, for tests.
        cgroups: where the control groups are mounted, for tests.
    """
    found = [*_of_machine(meminfo), *_of_cgroups(membership, cgroups)]
    return max(0, min(found)) if found else None


def _of_machine(meminfo: Path) -> Iterator[int]:
    try:
        for line in meminfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return


def _of_cgroups(membership: Path, cgroups: Path) -> Iterator[int]:
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":  # version 2; every group above limits as well
            folder = cgroups / name.lstrip("/")
            for level in (folder, *folder.parents):
                if level == cgroups.parent:
                    break
                yield from _left(level, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for level in (cgroups / "memory" / name.lstrip("/"), cgroups / "memory"):
                yield from _left(level, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _left(folder: Path, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    try:
        most = int((folder / limit).read_text(encoding="utf-8"))  # "max" is no number: no limit
        used = int((folder / usage).read_text(encoding="utf-8"))
        rows = (line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
        cached = next((int(row[1]) for row in rows if row[0] == reclaimable), 0)
    except (OSError, ValueError):
        return
    yield most - used + cached
