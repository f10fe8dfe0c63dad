"""Audits of one script with different omissions: what runs without a stop, and the start that is killed, are shared by all."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from safe_ckpt.tools.audit.compare import Comparison, Finding, Run, compare, noise
from safe_ckpt.tools.audit.runs import Options, Runner


class Audited:
    """A script that was run twice, and killed behind ``stop`` optimizer steps.

    Args:
        command: as of an audit.
        folder: for what the runs write.
        stop: where it is killed.
        until: how many steps are compared.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, *, stop: int = 13, until: int = 30, timeout_s: float = 600
    ) -> None:
        self._folder, self._until = folder, until
        self._options = Options(command=command, folder=folder, stop=stop, until=until, timeout_s=timeout_s)
        runner = Runner(self._options)
        self.whole = runner.run("whole-1", "whole-1", until)
        self.ignored = noise(self.whole, runner.run("whole-2", "whole-2", until))
        runner.run("stopped", "stopped", stop)
        self._out = folder / "stopped"
        shutil.copytree(self._out, folder / "kept", symlinks=True)

    def resumed(self, name: str) -> Run:
        """Start it again from where it was killed; for as many steps as the whole run has."""
        shutil.rmtree(self._out)
        shutil.copytree(self._folder / "kept", self._out, symlinks=True)
        return Runner(self._options).run("stopped", f"{name}-1", self._until)

    def compared(self, name: str) -> Comparison:
        """What such a start came to."""
        return compare(self.whole, self.resumed(name), self.ignored)


def named(comparison: Comparison) -> dict[str, Finding]:
    """Category -> the first finding of it."""
    return {finding.category: finding for finding in reversed(comparison.findings)}
