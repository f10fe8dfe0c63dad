"""What this process may take: ``ulimit``, and cores."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

from safe_ckpt.doctor import cgroup
from safe_ckpt.doctor.examined import Examined
from safe_ckpt.doctor.finding import Finding, fail, ok, warn
from safe_ckpt.text import bytes_text


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One resource limit.

    Attributes:
        name: what is limited.
        number: of ``resource``.
        least: below this it is told of; None for any limit at all.
        advice: what to do then.
        in_bytes: whether it counts bytes.
    """

    name: str
    number: int
    least: int | None
    advice: str
    in_bytes: bool = False


LIMITS = (
    Limit(
        name="open files",
        number=resource.RLIMIT_NOFILE,
        least=1024,
        advice="every shard, worker and connection needs some: ulimit -n 65536",
    ),
    Limit(
        name="file size",
        number=resource.RLIMIT_FSIZE,
        least=None,
        advice="a checkpoint file that grows beyond it fails: ulimit -f unlimited",
        in_bytes=True,
    ),
    Limit(
        name="processes",
        number=resource.RLIMIT_NPROC,
        least=512,
        advice="the writer process and threads need some: ulimit -u 4096",
    ),
    Limit(
        name="address space",
        number=resource.RLIMIT_AS,
        least=None,
        advice="snapshots are mapped memory, and torch maps much more: ulimit -v unlimited",
        in_bytes=True,
    ),
    Limit(
        name="locked memory",
        number=resource.RLIMIT_MEMLOCK,
        least=0,  # only pinned buffers of others need it
        advice="",
        in_bytes=True,
    ),
)


def limits(examined: Examined) -> list[Finding]:
    """The resource limits of this process; those that it starts inherit them."""
    soft = {limit.name: resource.getrlimit(limit.number)[0] for limit in LIMITS}
    return judge_limits(soft, examined.state_bytes)


def judge_limits(soft: dict[str, int], size: int | None) -> list[Finding]:
    """One finding per limit that is too low, or one for all of them.

    Args:
        soft: name to limit, as ``getrlimit`` gives it.
        size: bytes of one checkpoint, if that is known.
    """
    low = [limit for limit in LIMITS if _is_low(limit, soft[limit.name])]
    found = []
    for limit in low:
        too_small = limit.name == "file size" and size is not None and soft[limit.name] < size
        make = fail if too_small else warn
        found.append(make(f"limit: {limit.name}", _text(limit, soft[limit.name]), limit.advice, soft=soft[limit.name]))
    rest = [f"{limit.name} {_text(limit, soft[limit.name])}" for limit in LIMITS if limit not in low]
    return [*found, ok("limits", ", ".join(rest))]


def _is_low(limit: Limit, soft: int) -> bool:
    return soft != resource.RLIM_INFINITY and (limit.least is None or soft < limit.least)


def _text(limit: Limit, soft: int) -> str:
    if soft == resource.RLIM_INFINITY:
        return "unlimited"
    return bytes_text(soft) if limit.in_bytes else str(soft)


def cores(_: Examined) -> list[Finding]:
    """Cores that this process may use, against the ranks on this host."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    allowed = len(os.sched_getaffinity(0))
    return [judge_cores(allowed, cgroup.allowance().cores, int(local) if local.isdigit() else 1)]


def judge_cores(allowed: int, quota: float | None, ranks: int) -> Finding:
    """Whether the writer process has a core beside those of the ranks."""
    usable = min(float(allowed), quota) if quota is not None else float(allowed)
    text = f"{usable:g} for {ranks} {'rank' if ranks == 1 else 'ranks'}"
    if quota is not None and quota < allowed:
        text += f" (of {allowed}; a control group gives {quota:g})"
    figures = {"usable": usable, "ranks_here": max(ranks, 1)}
    if usable <= ranks:
        advice = "writing takes a part of a core from training: ask for one more core per rank"
        return warn("cores", text, advice, **figures)
    return ok("cores", text, **figures)
