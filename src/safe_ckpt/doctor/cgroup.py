"""What a control group allows this process: memory and processor time. Versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES = 1 << 60  # version 1 writes "none" as a huge number


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """The tightest limits of the groups that this process is in.

    Attributes:
        memory_bytes: None for no limit.
        cores: how many cores' worth of time; None for no limit.
    """

    memory_bytes: int | None
    cores: float | None


def allowance(membership: Path = _MEMBERSHIP, cgroups: Path = _CGROUPS) -> Allowance:
    """Read it; what cannot be read is no limit."""
    memory: list[int] = []
    cores: list[float] = []
    for line in _text(membership).splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers:
            for level in _levels(cgroups, name):
                memory += _bytes(level / "memory.max")
                cores += _cores(_text(level / "cpu.max").split())
        if "memory" in controllers.split(","):
            for level in _levels(cgroups / "memory", name):
                memory += _bytes(level / "memory.limit_in_bytes")
        if "cpu" in controllers.split(","):
            for level in _levels(cgroups / "cpu", name):
                cores += _cores([_text(level / f"cpu.cfs_{kind}_us").strip() for kind in ("quota", "period")])
    return Allowance(memory_bytes=min(memory, default=None), cores=min(cores, default=None))


def _levels(base: Path, name: str) -> Iterator[Path]:
    """The group and all above it: each of them limits."""
    level = base / name.lstrip("/")
    yield level
    while level not in (base, level.parent):
        level = level.parent
        yield level


def _bytes(path: Path) -> list[int]:
    text = _text(path).strip()
    return [int(text)] if text.isdigit() and int(text) < _NO_LIMIT_BYTES else []


def _cores(words: list[str]) -> list[float]:
    # "max 100000" and "-1" are no limit.
    good = len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]) > 0
    return [int(words[0]) / int(words[1])] if good else []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
