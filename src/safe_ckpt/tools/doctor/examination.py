"""The whole examination of a directory of a file system and of this machine: which checks, in the order of the report."""

from __future__ import annotations

from pathlib import Path

from safe_ckpt.core.staging.worker_thread import StuckError
from safe_ckpt.tools.doctor import disk, durability, machine, speed
from safe_ckpt.tools.doctor.check import (
    STUCK,
    CheckOptions,
    CheckResult,
    Checks,
    Examined,
    Report,
    UnwritableError,
    examining,
    fail,
    not_made,
    ok,
    refused,
    run_checks,
)


def directory(examined: Examined) -> list[CheckResult]:
    """The directory that is examined."""
    if examined.existing != examined.asked:
        text = f"{examined.asked} does not exist yet: {examined.existing} is examined in its place"
        return [ok("directory", text, levels_up=len(examined.asked.parts) - len(examined.existing.parts))]
    if not examined.asked.is_dir():
        return [fail("directory", f"{examined.asked} is no directory", "choose another path")]
    return [ok("directory", str(examined.asked), levels_up=0)]


ON_DIRECTORY: Checks[Examined] = (
    ("directory", directory),
    ("held by", durability.holder),
    ("file system", disk.file_system),
    ("write", durability.creating),
    ("fsync", durability.syncing),
    ("rename", disk.renaming),
    ("lock", durability.locking),
    ("space", disk.space),
    ("speed", speed.speed),
)
ON_MACHINE: Checks[int | None] = (
    ("memory", machine.memory),
    ("shared memory", machine.shared_memory),
    ("file size", machine.file_size),
    ("versions", machine.versions),
)
"""They are given the size of one checkpoint, if it is known."""


def diagnose(path: Path, options: CheckOptions) -> Report:
    """Examine a directory and this machine. On the main thread.

    Args:
        path: the directory; need not exist.
        options: the options of the command.
    """
    try:
        with examining(path, options) as examined:
            findings = run_checks(examined, ON_DIRECTORY, _of_disk, limit_s=options.timeout_s, stop=examined.stop)
            findings += on_machine(examined.state_bytes, options)
    except StuckError as error:
        findings = [fail("directory", str(error), STUCK), *on_machine(options.state_bytes, options)]
    return Report(directory=path, findings=tuple(findings))


def on_machine(state_bytes: int | None, options: CheckOptions) -> list[CheckResult]:
    """Examine this machine, for a checkpoint of ``state_bytes``; None for an unknown size. On the main thread."""
    return run_checks(state_bytes, ON_MACHINE, _of_machine, limit_s=options.timeout_s)


def _of_disk(name: str, error: OSError) -> tuple[CheckResult, str]:
    if isinstance(error, StuckError):
        return fail(name, str(error), STUCK), "the file system has stopped answering"
    if isinstance(error, UnwritableError):
        return not_made(name, f"not tried: {error}"), ""
    return refused(name, error), ""


def _of_machine(name: str, error: OSError) -> tuple[CheckResult, str]:
    return (fail(name, str(error), "try again later") if isinstance(error, StuckError) else refused(name, error)), ""
