"""The whole examination: on one process, or on several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safe_ckpt.doctor.checks import ON_DIRECTORY, ON_MACHINE
from safe_ckpt.doctor.examined import Examined, Options, examining
from safe_ckpt.doctor.finding import Finding, State, fail, worst
from safe_ckpt.doctor.runner import StuckError, run_checks
from safe_ckpt.doctor.world import World


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found.

    Attributes:
        directory: what was asked about.
        ranks: how many took part.
        findings: in the order of the checks.
    """

    directory: Path
    ranks: int
    findings: tuple[Finding, ...]

    @property
    def state(self) -> State:
        """The worst of all."""
        return worst(self.findings)

    @property
    def summary(self) -> str:
        """One sentence."""
        counts = {state: sum(finding.state == state for finding in self.findings) for state in ("ok", "warn", "fail")}
        where = f"{self.directory}{f', {self.ranks} ranks' if self.ranks > 1 else ''}"
        if counts["fail"]:
            return (
                f"{where}: checkpoints cannot be relied on here: {counts['fail']} failed, {counts['warn']} to look at"
            )
        if counts["warn"]:
            return f"{where}: works, with {counts['warn']} to look at; {counts['ok']} are fine"
        return f"{where}: all is well"

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data."""
        return {
            "directory": str(self.directory),
            "ranks": self.ranks,
            "state": self.state,
            "summary": self.summary,
            "findings": [finding.to_json() for finding in self.findings],
        }


def diagnose(path: Path, options: Options, world: World | None = None) -> Report | None:
    """Examine a directory, this machine, and with ``world`` what the ranks see of each other. On the main thread.

    Args:
        path: the directory; need not exist.
        options: what the caller wants to know.
        world: the ranks; every one calls this. None for this process alone.

    Returns:
        The report; on ranks other than 0 None.

    Raises:
        SafeCheckpointError: on ranks other than 0: a rank is missing or was lost. On rank 0 that is a finding.
    """
    if world is not None and world.rank:
        from safe_ckpt.doctor.ranks import follow

        follow(world, path, options)
        return None
    try:
        with examining(path, options) as examined:
            findings = _lead(world, examined)
            findings += run_checks(examined, ON_DIRECTORY)
            findings += run_checks(examined, ON_MACHINE)
    except StuckError as error:
        advice = "the disk or its server does not answer: look at dmesg and at the mount, before any training"
        findings = [fail("directory", str(error), advice), *run_checks(Examined(asked=path, existing=path), ON_MACHINE)]
    return Report(directory=path, ranks=world.size if world else 1, findings=tuple(findings))


def _lead(world: World | None, examined: Examined) -> list[Finding]:
    if world is None:
        return []
    from safe_ckpt.doctor.ranks import lead  # imports torch

    return lead(world, examined)
