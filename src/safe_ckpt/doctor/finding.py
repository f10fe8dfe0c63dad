"""The outcome of a check: a state, the figure behind it, and what to do about it."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["ok", "warn", "fail", "skipped"]
_ORDER: tuple[State, ...] = ("ok", "skipped", "warn", "fail")
Figure = int | float | str | bool | None

_ADVICE = {
    errno.EACCES: "give this user the right to write there (chown, chmod), or choose another directory",
    errno.EPERM: "this user, or this file system, may not do that: choose another directory",
    errno.EROFS: "it is mounted read-only: mount it for writing, or choose another directory",
    errno.ENOSPC: "the file system is full: delete something, or choose another directory",
    errno.EDQUOT: "the quota of this user is used up: delete something, or ask for more",
    errno.EIO: "the disk or its server reports errors: look at dmesg, and do not keep checkpoints there",
    errno.ESTALE: "the server no longer knows this directory: mount it again",
    errno.ENOENT: "the path leads nowhere, as a dangling link does: choose another directory",
    errno.ENOTDIR: "a part of the path is a file: choose another directory",
    errno.ENAMETOOLONG: "choose a directory with a shorter path",
    errno.EMFILE: "too many files are open: ulimit -n 65536",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: the name of the check.
        state: ``"ok"``; ``"warn"``: it works, at a price; ``"fail"``: checkpoints cannot be relied on here; ``"skipped"``: it
            could not be checked.
        measured: what was seen, as text.
        advice: what to do about it, or a hint; "" where there is nothing to do.
        where: the host and ranks concerned, where that is not all of them.
        figures: the same in numbers, for programs; units are in the names.
    """

    check: str
    state: State
    measured: str
    advice: str = ""
    where: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data."""
        return dataclasses.asdict(self)


def ok(check: str, measured: str, advice: str = "", /, **figures: Figure) -> Finding:
    """Nothing to do; ``advice`` is only a hint."""
    return Finding(check=check, state="ok", measured=measured, advice=advice, figures=figures)


def warn(check: str, measured: str, advice: str, /, **figures: Figure) -> Finding:
    """It works, at a price."""
    return Finding(check=check, state="warn", measured=measured, advice=advice, figures=figures)


def warn_if(bad: bool, check: str, measured: str, advice: str, /, **figures: Figure) -> Finding:
    """A warning with ``advice`` where it is ``bad``; else nothing to do."""
    return warn(check, measured, advice, **figures) if bad else ok(check, measured, **figures)


def fail(check: str, measured: str, advice: str, /, **figures: Figure) -> Finding:
    """Checkpoints cannot be relied on here."""
    return Finding(check=check, state="fail", measured=measured, advice=advice, figures=figures)


def skipped(check: str, why: str) -> Finding:
    """The check could not be made."""
    return Finding(check=check, state="skipped", measured=why)


def refused(check: str, error: OSError, doing: str = "") -> Finding:
    """The operating system refused a call."""
    code = errno.errorcode.get(error.errno or 0, "")
    where = f" ({os.path.basename(os.fsdecode(error.filename))})" if isinstance(error.filename, str | bytes) else ""
    text = f"{f'{doing}: ' if doing else ''}{error.strerror or error}{f' [{code}]' if code else ''}{where}"
    advice = _ADVICE.get(error.errno or 0, "choose a directory on another file system")
    return fail(check, text, advice, errno=code or None)


def worst(findings: Iterable[Finding]) -> State:
    """The state of the whole; ``"ok"`` when there is none."""
    return max((finding.state for finding in findings), key=_ORDER.index, default="ok")
