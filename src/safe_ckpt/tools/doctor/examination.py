"""The whole examination: on one process, or on several ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.errors import ConfigError
from safe_ckpt.tools.doctor.check import (
    STUCK,
    Examined,
    Finding,
    Options,
    State,
    StuckError,
    examining,
    fail,
    run_checks,
    worst,
)
from safe_ckpt.tools.doctor.checks import ON_DIRECTORY, ON_MACHINE


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks that were started together.

    Attributes:
        rank: this process's.
        size: how many there are; more than one.
        address: the host where they meet.
        port: the port there.
        hosted: the launcher has a store there already; otherwise rank 0 makes it.
        attempt: how often the launcher has started over.
    """

    rank: int
    size: int
    address: str
    port: int
    hosted: bool
    attempt: str


def world_of(environment: Mapping[str, str]) -> World | None:
    """The ranks that a launcher such as torchrun describes in ``environment``; None for a process alone.

    Raises:
        ConfigError: a part is missing or is no number.
    """
    if environment.get("WORLD_SIZE", "1") == "1":
        return None

    def number(key: str) -> int:
        text = environment.get(key, "")
        if not (text.isascii() and text.isdecimal()):
            advice = "start the ranks with torchrun, or unset WORLD_SIZE for one process"
            raise ConfigError(key=key, message=f"expected a number, got {text!r}: {advice}")
        return int(text)

    rank, size = number("RANK"), number("WORLD_SIZE")
    if rank >= size:
        raise ConfigError(key="RANK", message=f"expected below WORLD_SIZE, got {rank}")
    if not environment.get("MASTER_ADDR"):
        raise ConfigError(key="MASTER_ADDR", message="expected the host of rank 0: start the ranks with torchrun")
    return World(
        rank=rank,
        size=size,
        address=environment["MASTER_ADDR"],
        port=number("MASTER_PORT"),
        hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


@dataclass(frozen=True, kw_only=True)
class Report:
    """The findings on one directory.

    Attributes:
        directory: what was asked about.
        ranks: how many took part.
        findings: in the order of the checks.
    """

    directory: Place
    ranks: int
    findings: tuple[Finding, ...]

    @property
    def state(self) -> State:
        """The worst of all."""
        return worst(self.findings)

    @property
    def summary(self) -> str:
        """One sentence."""
        counts = Counter(finding.state for finding in self.findings)
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
        options: the options of the command.
        world: the ranks; every one calls this. None for this process alone.

    Returns:
        The report; on ranks other than 0 None.

    Raises:
        SafeCheckpointError: on ranks other than 0: a rank is missing or was lost. On rank 0 that is a finding.
    """
    if world is not None and world.rank:
        from safe_ckpt.tools.doctor.ranks import follow

        follow(world, path, options)
        return None
    try:
        with examining(path, options) as examined:
            findings: list[Finding] = []
            if world is not None:
                from safe_ckpt.tools.doctor.ranks import lead  # imports torch

                findings += lead(world, examined)
            findings += run_checks(examined, (*ON_DIRECTORY, *ON_MACHINE))
    except StuckError as error:
        findings = [fail("directory", str(error), STUCK), *run_checks(Examined(asked=path, existing=path), ON_MACHINE)]
    return Report(directory=path, ranks=world.size if world else 1, findings=tuple(findings))
