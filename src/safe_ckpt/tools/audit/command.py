"""``safe-ckpt audit``: does this script go on as if nobody had stopped it."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID

from safe_ckpt.errors import AuditError
from safe_ckpt.tools.audit.runs import Options
from safe_ckpt.tools.audit.runs import audit as run


def audit(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="Such as: python train.py --out {out}")],
    stop: Annotated[int, typer.Option(min=1, help="Kill each start behind so many optimizer steps.")] = 20,
    until: Annotated[int, typer.Option(min=2, help="Compare so many optimizer steps.")] = 60,
    stops: Annotated[int, typer.Option(min=1, help="Kill it so often.")] = 1,
    within_save: Annotated[
        bool, typer.Option("--within-save", help="Every second kill comes while files below {out} change.")
    ] = False,
    resume_args: Annotated[str, typer.Option(metavar="TEXT", help="Arguments to add where it is started again.")] = "",
    timeout_s: Annotated[float, typer.Option(min=1, help="For everything.")] = 3600.0,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep what the runs write in this folder, which must be empty.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML, for CI.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")] = False,
) -> None:
    """Run a training script twice, and a third time that is killed and started again; name what its resume forgot.

    Nothing of the script is changed. {out} in the command is a folder of each run's own: let its checkpoints go there.
    Exit status: 0 equal; 1 it goes on differently; 2 it could not be run or compared.
    """
    with tempfile.TemporaryDirectory(prefix="safe-ckpt-audit-") as made, _progress() as progress:
        tasks: dict[str, TaskID] = {}

        def told(name: str, steps: int, of: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=of)
            progress.update(tasks[name], completed=steps)

        try:
            options = Options(
                command=command, folder=folder or Path(made), resume_args=shlex.split(resume_args), stop=stop, stops=stops,
                within_save=within_save, until=until, timeout_s=timeout_s, told=told,
            )  # fmt: skip
            result = run(options)
        except AuditError as error:
            typer.echo(error, err=True)
            raise typer.Exit(2) from error
    typer.echo(json.dumps(result.as_json(), indent=1) if as_json else str(result))
    if junit is not None:
        junit.write_text(result.as_junit(), encoding="utf-8")
    if not result.equal:
        raise typer.Exit(2 if result.cannot else 1)


def _progress() -> Progress:
    console = Console(file=sys.stderr)
    return Progress(
        *Progress.get_default_columns()[:2], MofNCompleteColumn(), console=console, disable=not console.is_terminal
    )
