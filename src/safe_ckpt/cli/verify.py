"""``safe-ckpt verify``: are the bytes those that were written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from safe_ckpt.cli.output import DAMAGED, AsJson, print_json
from safe_ckpt.core import manifest
from safe_ckpt.core.verify import verify as verify_bytes
from safe_ckpt.errors import CorruptCheckpointError, UnsupportedFormatError


def verify(
    paths: Annotated[list[Path], typer.Argument(exists=True, help="Checkpoints: directories or files.")],
    as_json: AsJson = False,
) -> None:
    """Read every byte of the checkpoints at PATHS and compare it with what was written."""
    rows = [_verified(path) for path in paths]
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            typer.echo(f"{row['state']:<11} {row['path']}{': ' + row['reason'] if row['reason'] else ''}")
    if any(row["state"] == "damaged" for row in rows):
        raise typer.Exit(DAMAGED)


def _verified(path: Path) -> dict[str, Any]:
    try:
        count = verify_bytes(path, manifest.read_manifest(path))
    except CorruptCheckpointError as error:
        return {"path": str(path), "state": "damaged", "bytes": None, "reason": f"{error.file} {error.message}".strip()}
    except UnsupportedFormatError as error:
        return {"path": str(path), "state": "cannot tell", "bytes": None, "reason": error.message}
    return {"path": str(path), "state": "valid", "bytes": count, "reason": ""}
