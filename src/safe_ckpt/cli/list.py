"""``safe-ckpt list``: which checkpoints there are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import typer

from safe_ckpt.cli.output import DAMAGED, AsJson, Directory, metrics_text, print_json, print_table, say
from safe_ckpt.core.directory.catalog import Candidate
from safe_ckpt.errors import SafeCheckpointError
from safe_ckpt.inspection.listing import Listing, find_shelf
from safe_ckpt.text import bytes_text

_UNKNOWN: dict[str, Any] = {
    "step": None,
    "sequence": None,
    "created_at": None,
    "size_bytes": None,
    "world_size": None,
    "metrics": {},
    "written_by": None,
    "reason": "",
}


def list_checkpoints(directory: Directory, as_json: AsJson = False) -> None:
    """List the checkpoints in DIR in the order in which a resume tries them, then what cannot be used, and why.

    Their manifests are read, their payloads are not (``safe-ckpt verify`` does). The states: valid (committed, and its manifest
    is in order), unverified (another tool wrote it), damaged, partial (a save that is under way, or was when its job died),
    quarantined (found damaged by a resume and moved away), unreadable (no permission, a newer format, a failing disk: a resume
    stops there). Exit status: 0, or 1 where something is unreadable.
    """
    try:
        shelf = find_shelf(directory)
    except (SafeCheckpointError, OSError) as error:
        say(str(error))
        raise typer.Exit(DAMAGED) from error
    rows = list(_rows(shelf))
    if as_json:
        print_json(rows)
    else:
        now = datetime.now(timezone.utc)
        columns = ("name", "step", "age", "size", "metrics", "state", "written by")
        print_table(columns, [_cells(row, now) for row in rows])
        if not rows:
            say(f"no checkpoints in {directory}")
    if shelf.unreadable:
        raise typer.Exit(DAMAGED)


def _rows(shelf: Listing) -> Iterator[dict[str, Any]]:
    for candidate in shelf.usable:
        with contextlib.suppress(FileNotFoundError):  # a live job has just let it go
            yield _row(shelf.folder, candidate, "unverified" if candidate.foreign else "valid")
    for candidate in shelf.unusable:
        yield {**_row(shelf.folder, candidate, "damaged"), "reason": candidate.problem}
    for path, why in shelf.unreadable.items():
        yield {"name": _name(shelf, path), **_UNKNOWN, "state": "unreadable", "reason": why}
    for path in shelf.under_way:
        yield {"name": _name(shelf, path), **_UNKNOWN, "state": "partial", "reason": "not committed"}
    for path in shelf.quarantined:
        yield {"name": _name(shelf, path), **_UNKNOWN, "state": "quarantined", "reason": "found damaged by a resume"}


def _name(shelf: Listing, path: Path) -> str:
    if path.is_relative_to(shelf.folder):
        return path.relative_to(shelf.folder).as_posix()
    hidden = shelf.hidden or shelf.folder
    return f"{hidden.name}/{path.relative_to(hidden).as_posix()}"


def _row(folder: Path, candidate: Candidate, state: str) -> dict[str, Any]:
    row = {"name": candidate.path.relative_to(folder).as_posix(), **_UNKNOWN, "state": state}
    manifest, info = candidate.manifest, candidate.info
    if manifest is None or info is None:
        return {**row, "step": candidate.step if candidate.step >= 0 else None}
    return {
        **row,
        "step": manifest.step,
        "sequence": manifest.sequence,
        "created_at": manifest.created_at,
        "size_bytes": info.size_bytes,
        "world_size": manifest.world_size,
        "metrics": dict(manifest.metrics),
        "written_by": {**manifest.versions, **manifest.written_by},
    }


def _cells(row: dict[str, Any], now: datetime) -> tuple[object, ...]:
    state = f"{row['state']}: {row['reason']}" if row["reason"] else row["state"]
    metrics = metrics_text(row["metrics"])
    return row["name"], row["step"], _age(row, now), bytes_text(row["size_bytes"]), metrics, state, _writer(row)


def _age(row: dict[str, Any], now: datetime) -> str:
    try:
        seconds = (now - datetime.fromisoformat(row["created_at"])).total_seconds()
    except (TypeError, ValueError):
        return ""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _writer(row: dict[str, Any]) -> str:
    by = row["written_by"]
    if not by:
        return ""
    where = f" on {by['host']}:{by['pid']}" if {"host", "pid"} <= by.keys() else ""
    ranks = row["world_size"]
    return f"safe-ckpt {by.get('safe-ckpt', '?')}{where}, {ranks} rank{'s' if ranks != 1 else ''}"
