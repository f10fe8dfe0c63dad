"""``safe-ckpt list``, ``verify`` and ``unlock``. Exit status: 0 all good, 1 something is damaged or held, 2 wrong usage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from safe_ckpt.core import manifest, select
from safe_ckpt.core import unlock as unlocking
from safe_ckpt.core.root import HIDDEN
from safe_ckpt.core.select import Candidate
from safe_ckpt.core.verify import verify as verify_bytes
from safe_ckpt.errors import CorruptCheckpointError, UnsupportedFormatError

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")]


@app.command("list")
def list_(directory: Annotated[Path, typer.Argument(exists=True, file_okay=False)], as_json: AsJson = False) -> None:
    """List the checkpoints in DIRECTORY, newest first, as their manifests tell; payloads are not read."""
    candidates = [*select.list_directories(directory), *select.list_files(directory, ".ckpt")]
    good = select.newest_first(candidates)
    rows = [_row(directory, candidate) for candidate in [*good, *(c for c in candidates if c.problem)]]
    quarantine = directory / HIDDEN / "quarantine"
    rows += [_quarantined(path) for path in sorted(quarantine.iterdir())] if quarantine.is_dir() else []
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    table = Table("name", "step", "created", "bytes", "metrics", "state")
    for row in rows:
        metrics = ", ".join(f"{key}={value:g}" for key, value in row["metrics"].items())
        cells = (row["name"], row["step"], row["created_at"], row["size_bytes"], metrics, row["state"])
        table.add_row(*("" if cell is None else str(cell) for cell in cells))
    Console().print(table)


@app.command()
def verify(
    paths: Annotated[list[Path], typer.Argument(exists=True, help="Checkpoints: directories or files.")],
    as_json: AsJson = False,
) -> None:
    """Read every byte of the checkpoints at PATHS and compare it with what was written."""
    rows = [_verified(path) for path in paths]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        for row in rows:
            typer.echo(f"{row['state']:<11} {row['path']}{': ' + row['reason'] if row['reason'] else ''}")
    if any(row["state"] == "damaged" for row in rows):
        raise typer.Exit(1)


@app.command()
def unlock(
    directory: Annotated[Path, typer.Argument(exists=True, file_okay=False)],
    break_lock: Annotated[
        bool, typer.Option("--break-lock", help="Take the lock away. A job that still lives fails at its next commit.")
    ] = False,
) -> None:
    """Say which job holds DIRECTORY, and with --break-lock take it away from that job.

    Mostly there is no need: the lock of a process of this host that is gone is taken over at once, and that of another host
    after it showed no sign of life for 60 seconds (lease_s).
    """
    found = unlocking.holder(directory)
    if found is None:
        typer.echo(f"{directory} is free")
        return
    who = f"process {found.pid} on host {found.host}, started {found.started_at}"
    if not break_lock:
        typer.echo(f"{directory} is held by {who}. If that job is gone: safe-ckpt unlock {directory} --break-lock")
        raise typer.Exit(1)
    unlocking.break_lock(directory)
    typer.echo(f"{directory} was taken away from {who}")


def _row(directory: Path, candidate: Candidate) -> dict[str, Any]:
    info = candidate.info
    state = f"damaged: {candidate.problem}" if candidate.problem else "unverified" if candidate.foreign else "valid"
    return {
        "name": candidate.path.relative_to(directory).as_posix(),
        "step": info.step if info else None,
        "sequence": info.sequence if info else None,
        "created_at": info.created_at if info else None,
        "size_bytes": info.size_bytes if info else None,
        "metrics": dict(info.metrics) if info else {},
        "state": state,
    }


def _quarantined(path: Path) -> dict[str, Any]:
    unknown = dict.fromkeys(("step", "sequence", "created_at", "size_bytes"))
    return {"name": f"{HIDDEN}/quarantine/{path.name}", **unknown, "metrics": {}, "state": "quarantined"}


def _verified(path: Path) -> dict[str, Any]:
    try:
        count = verify_bytes(path, manifest.read_manifest(path))
    except CorruptCheckpointError as error:
        return {"path": str(path), "state": "damaged", "bytes": None, "reason": f"{error.file} {error.message}".strip()}
    except UnsupportedFormatError as error:
        return {"path": str(path), "state": "cannot tell", "bytes": None, "reason": error.message}
    return {"path": str(path), "state": "valid", "bytes": count, "reason": ""}
