"""``safe-ckpt doctor``: would checkpoints be safe in this directory, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from safe_ckpt.core.storage.objects.options import is_url
from safe_ckpt.errors import ConfigError
from safe_ckpt.text import bytes_from
from safe_ckpt.tools.cli.output import DAMAGED, AsJson, ending_on_signals, print_json, tell
from safe_ckpt.tools.doctor.check import CheckOptions, Report
from safe_ckpt.tools.doctor.examination import diagnose

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skipped": "cyan"}


def _size(text: str) -> int:
    size = bytes_from(text)
    if size < 1:
        raise typer.BadParameter(f'expected bytes, or text such as "10GiB", got {text!r}')
    return size


def doctor(
    # Not a Path: click would look at it, and on a file system that does not answer never return.
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Where checkpoints are to go; need not exist.")],
    state_bytes: Annotated[
        int | None, typer.Option(parser=_size, metavar="SIZE", help="A checkpoint, as 10GiB; else the newest in DIR.")
    ] = None,
    mebibytes: Annotated[
        int | None,
        typer.Option(min=0, help="Write so much to measure the speed (256; 64 for an address); 0 for not at all."),
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=1, help="For every single check.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Check what safe checkpoints need of DIR, or of an address, and of this machine, and what to do about each problem.

    Everything is tried in a folder of its own below DIR that is removed at the end; a job that uses DIR is not disturbed.
    Exit status: 0 when it works, also with warnings; 1 when something failed; 2 wrong usage.
    """
    try:
        remote = is_url(directory)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    probe_bytes = (64 if remote else 256) << 20 if mebibytes is None else mebibytes << 20
    options = CheckOptions(state_bytes=state_bytes, probe_bytes=probe_bytes, timeout_s=timeout_s)
    try:
        with ending_on_signals():
            report = _of_store(directory, options) if remote else diagnose(Path(directory), options)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    if report.state == "fail":
        raise typer.Exit(DAMAGED)


def _of_store(url: str, options: CheckOptions) -> Report:
    from safe_ckpt.tools.doctor.object_store import (
        diagnose_store,  # an HTTP client: a delay that no other command needs
    )

    return diagnose_store(url, options)


def _print(report: Report) -> None:
    width = max(len(finding.check) for finding in report.findings)
    for finding in report.findings:
        state = typer.style(f"{finding.state:<7}", fg=_COLOURS[finding.state])
        typer.echo(state, nl=False)  # its colours are ours; what follows may hold hostile names
        tell(f"  {finding.check:<{width}}  {finding.measured}")
        if finding.advice:
            tell(f"{'':<{9 + width}}  -> {finding.advice}")
    tell(report.summary)
