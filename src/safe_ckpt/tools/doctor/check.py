"""The findings of checks, and the runner of checks: none can hang the caller.

Each runs on a daemon thread, under a deadline; those of a directory in a private folder of it.

If the server of a file system is lost, a system call may block for ever, and nothing in the process can end it. So the
call is abandoned and reported, and no further check touches the same disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from safe_ckpt.core.home.holders import Held
from safe_ckpt.core.staging.worker_thread import StuckError, bounded
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.tools.inspection.listing import read_listing

logger = logging.getLogger(__name__)
PREFIX = ".safe_ckpt_doctor-"
STUCK = "the disk or its server does not answer: look at dmesg and at the mount, before any training"
_T = TypeVar("_T")

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
class CheckResult:
    """The outcome of one check.

    Attributes:
        check: the name of the check.
        state: ``"ok"``; ``"warn"``: it works, at a price; ``"fail"``: checkpoints cannot be relied on here; ``"skipped"``: it
            could not be checked.
        measured: what was seen, as text.
        advice: what to do about it, or a hint; "" where there is nothing to do.
        figures: the same in numbers, for programs; units are in the names.
    """

    check: str
    state: State
    measured: str
    advice: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)


def ok(check: str, measured: str, advice: str = "", /, **figures: Figure) -> CheckResult:
    """A finding with nothing to do; ``advice`` is only a hint."""
    return CheckResult(check=check, state="ok", measured=measured, advice=advice, figures=figures)


def at_a_price(check: str, measured: str, advice: str, /, **figures: Figure) -> CheckResult:
    """A finding of what works, at a price."""
    return CheckResult(check=check, state="warn", measured=measured, advice=advice, figures=figures)


def warn_if(bad: bool, check: str, measured: str, advice: str, /, **figures: Figure) -> CheckResult:
    """A warning with ``advice`` where it is ``bad``; else nothing to do."""
    return at_a_price(check, measured, advice, **figures) if bad else ok(check, measured, **figures)


def fail(check: str, measured: str, advice: str, /, **figures: Figure) -> CheckResult:
    """Checkpoints cannot be relied on here."""
    return CheckResult(check=check, state="fail", measured=measured, advice=advice, figures=figures)


def not_made(check: str, why: str) -> CheckResult:
    """The check could not be made."""
    return CheckResult(check=check, state="skipped", measured=why)


def refused(check: str, error: OSError, doing: str = "") -> CheckResult:
    """The operating system refused a call."""
    code = errno.errorcode.get(error.errno or 0, "")
    where = f" ({os.path.basename(os.fsdecode(error.filename))})" if isinstance(error.filename, str | bytes) else ""
    text = f"{f'{doing}: ' if doing else ''}{error.strerror or error}{f' [{code}]' if code else ''}{where}"
    advice = _ADVICE.get(error.errno or 0, "choose a directory on another file system")
    return fail(check, text, advice, errno=code or None)


def held_by(held: Sequence[Held], advice: str, **figures: Figure) -> list[CheckResult]:
    """The job that holds the directory; ``advice`` where it may be alive."""
    if not held:
        return [ok("held by", "no job", **figures)]
    lease = held[0].holder
    who = f"process {lease.pid} on host {lease.host}" if lease.host else "a job that has not written its name"
    figures |= {"pid": lease.pid, "host": lease.host, "alive": lease.alive}
    if lease.alive is False:
        return [ok("held by", f"no job: {who} is gone, and the next job takes over at once", **figures)]
    return [ok("held by", f"{who}, since {lease.started_at}", advice, **figures)]


def worst(findings: Iterable[CheckResult]) -> State:
    """The state of the whole; ``"ok"`` when there is none."""
    return max((finding.state for finding in findings), key=_ORDER.index, default="ok")


@dataclass(frozen=True, kw_only=True)
class Report:
    """The findings on one directory.

    Attributes:
        directory: what was asked about.
        findings: in the order of the checks.
    """

    directory: Place
    findings: tuple[CheckResult, ...]

    @property
    def state(self) -> State:
        """The worst of all."""
        return worst(self.findings)

    @property
    def summary(self) -> str:
        """One sentence."""
        counts = Counter(finding.state for finding in self.findings)
        if counts["fail"]:
            failed = f"{counts['fail']} failed, {counts['warn']} to look at"
            return f"{self.directory}: checkpoints cannot be relied on here: {failed}"
        if counts["warn"]:
            return f"{self.directory}: works, with {counts['warn']} to look at; {counts['ok']} are fine"
        return f"{self.directory}: all is well"

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data."""
        return {
            "directory": str(self.directory),
            "state": self.state,
            "summary": self.summary,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }


class UnwritableError(OSError):
    """There is no private folder, so that nothing that writes can be tried."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The options of the command.

    Attributes:
        state_bytes: the size of one checkpoint; None to take that of the newest one in the directory.
        probe_bytes: how much is written and read to measure the speed, at most a tenth of what is free; 0 for not at all.
        timeout_s: how long any single check may take.
    """

    state_bytes: int | None = None
    probe_bytes: int = 256 << 20
    timeout_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class Examined:
    """The input of a check.

    Attributes:
        asked: the directory that was asked about, absolute.
        existing: that, or the nearest of its parents that exists.
        scratch: a private folder below ``existing``; None where it could not be made.
        problem: why not.
        options: the options of the command.
        state_bytes: the size of one checkpoint, if it is known.
        state_from: how it is known, in words.
        stop: set when the checks are to end early; long ones look at it.
    """

    asked: Path
    existing: Path
    scratch: Path | None = None
    problem: OSError | None = None
    options: CheckOptions = field(default_factory=CheckOptions)
    state_bytes: int | None = None
    state_from: str = ""
    stop: threading.Event = field(default_factory=threading.Event)

    def folder(self, name: str) -> Path:
        """A new folder in the private folder.

        Raises:
            UnwritableError: there is none.
        """
        if self.scratch is None:
            raise UnwritableError("nothing can be written there")
        folder = self.scratch / name
        folder.mkdir()
        return folder


Checks = Sequence[tuple[str, Callable[[_T], list[CheckResult]]]]
"""The name of each where it cannot give one itself, and the check; an ``OSError`` that it raises becomes a finding."""
Judge = Callable[[str, OSError], tuple[CheckResult, str]]
"""The meaning of an error of the check of this name, and why no other is tried after it; "" where they are."""


def nearest_existing(path: Path) -> Path:
    """``path``, absolute, or the nearest of its parents that exists. Follows no link at the end of the path."""
    path = Path(os.path.abspath(path))
    return next(candidate for candidate in (path, *path.parents) if os.path.lexists(candidate) or not candidate.name)


def known_size(directory: Path, options: CheckOptions) -> tuple[int | None, str]:
    """The size of one checkpoint, as given or as that of the newest one in ``directory``, and how it is known."""
    if options.state_bytes is not None:
        return options.state_bytes, "as given"
    # Without an answer: no directory, a live job that deletes one just now, or a disk that the first check reports anyway.
    with contextlib.suppress(OSError):
        usable = bounded(lambda: read_listing(directory).standing.usable, options.timeout_s)
        newest = next((one.info for one in usable if one.info is not None and one.info.size_bytes), None)
        if newest is not None:
            return newest.size_bytes, f"as {newest.path.name} is"
    return None, ""


@contextlib.contextmanager
def examining(path: Path, options: CheckOptions) -> Iterator[Examined]:
    """The directory with its private folder, which is removed at the end, also after an error or Ctrl-C.

    Where the folder cannot be made, ``problem`` says why. Called on the main thread.

    Raises:
        StuckError: the file system does not answer.
    """
    asked = Path(os.path.abspath(path))
    existing = bounded(lambda: nearest_existing(asked), options.timeout_s)
    size, known_from = known_size(asked, options)
    examined = Examined(asked=asked, existing=existing, options=options, state_bytes=size, state_from=known_from)
    scratch = examined.existing / f"{PREFIX}{uuid.uuid4().hex}"
    try:
        try:
            bounded(scratch.mkdir, options.timeout_s)
        except StuckError:
            raise
        except OSError as error:
            yield replace(examined, problem=error)
        else:
            yield replace(examined, scratch=scratch)
    finally:
        examined.stop.set()
        try:
            bounded(lambda: _remove(scratch), options.timeout_s)
        except OSError as error:
            logger.warning("%s could not be removed, delete it by hand: %s", scratch, error)


def _remove(scratch: Path) -> None:
    for _ in range(3):  # an abandoned check may create a file there meanwhile
        shutil.rmtree(scratch, ignore_errors=True)
    if os.path.lexists(scratch):
        shutil.rmtree(scratch)


def run_checks(
    subject: _T, checks: Checks[_T], judge: Judge, *, limit_s: float, stop: threading.Event | None = None
) -> list[CheckResult]:
    """Run the checks in their order and collect their findings. Called on the main thread.

    Args:
        subject: what each of them is given.
        checks: what to do.
        judge: what an error means.
        limit_s: how long any single one may take.
        stop: see ``bounded``.

    Raises:
        BaseException: a check raised something other than ``OSError``, or Ctrl-C came; the check that was under way was
            asked to end, and was given a few seconds for that.
    """
    findings: list[CheckResult] = []
    why = ""
    for name, check in checks:
        if why:
            findings.append(not_made(name, f"not tried: {why}"))
            continue
        try:
            findings += bounded(partial(check, subject), limit_s, stop)
        except OSError as error:
            finding, why = judge(name, error)
            findings.append(finding)
    return findings
