"""``safe-ckpt list`` and ``safe-ckpt resume-path``: which checkpoints there are, and what a job would go on from."""

from __future__ import annotations

import contextlib
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from safe_ckpt.cli.output import CANNOT_TELL, DAMAGED, AsJson, Directory, failing, print_json, print_table, say
from safe_ckpt.core.directory.catalog import Candidate
from safe_ckpt.errors import DirectoryError
from safe_ckpt.inspection.blind_reader import look_inside
from safe_ckpt.inspection.check import judge, plan
from safe_ckpt.inspection.listing import Listing, Row, in_order, read_layout, read_listing, rows
from safe_ckpt.text import bytes_text, duration, metrics_text

_ATTEMPTS = 5


def list_checkpoints(directory: Directory, as_json: AsJson = False) -> None:
    """List the checkpoints in DIR in the order in which a resume tries them, then what cannot be used, and why.

    Their manifests are read, their payloads are not (``safe-ckpt verify`` does). The states: valid (committed, and its manifest
    is in order), unverified (another tool wrote it), damaged, partial (a save that is under way, or was when its job died),
    quarantined (found damaged by a resume and moved away), unreadable (no permission, a newer format, a failing disk: a resume
    stops there). Exit status: 0, or 1 where something is unreadable.
    """
    with failing():
        listing = read_listing(directory)
    listed = list(rows(listing))
    if as_json:
        print_json([vars(row) for row in listed])
    else:
        now = datetime.now(timezone.utc)
        columns = ("name", "step", "age", "size", "metrics", "state", "written by")
        print_table(columns, [_cells(row, now) for row in listed])
        if not listed:
            say(f"no checkpoints in {directory}")
    if listing.unreadable:
        raise typer.Exit(DAMAGED)


def _cells(row: Row, now: datetime) -> tuple[object, ...]:
    state = f"{row.state}: {row.reason}" if row.reason else row.state
    metrics = metrics_text(row.metrics)
    return row.name, row.step, _age_of(row, now), bytes_text(row.size_bytes), metrics, state, _writer(row)


def _age_of(row: Row, now: datetime) -> str:
    try:
        seconds = (now - datetime.fromisoformat(row.created_at or "")).total_seconds()
    except (TypeError, ValueError):
        return ""
    return duration(max(0, round(seconds)))


def _writer(row: Row) -> str:
    by = row.written_by
    if not by:
        return ""
    where = f" on {by['host']}:{by['pid']}" if {"host", "pid"} <= by.keys() else ""
    ranks = row.world_size
    return f"safe-ckpt {by.get('safe-ckpt', '?')}{where}, {ranks} rank{'s' if ranks != 1 else ''}"


def resume_path(
    directory: Directory,
    quick: Annotated[bool, typer.Option("--quick", help="Believe the manifests; do not read the payloads.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the path of the checkpoint that resume="auto" would take: the newest whose every byte is what was written.

    The path alone goes to stdout; why newer ones are passed over to stderr. Exit status: 0; 1 when there is none; 3 when
    the one that it is was written by another tool and cannot be verified.
    """
    with failing():
        listing, chosen, verified, rejected = _chosen_of(directory, quick=quick)
    if as_json:
        reasons = [{"path": str(candidate.path), "reason": reason} for candidate, reason in rejected]
        print_json({"path": str(chosen.path) if chosen else None, "verified": verified, "rejected": reasons})
    else:
        for candidate, reason in rejected:
            say(f"not {candidate.path}: {reason}")
        for path in listing.quarantined:
            say(f"not {path}: in quarantine, since a resume found it damaged")
        if chosen is not None:
            typer.echo(os.fsencode(chosen.path))  # as it is, whatever bytes are in it: programs open it
    if chosen is None:
        unusable = rejected or listing.quarantined
        nothing = f"no checkpoint in {directory}: a job would start afresh"
        say(f"no usable checkpoint in {directory}" if unusable else nothing)
        raise typer.Exit(DAMAGED)
    if chosen.foreign and not verified and not quick:
        say("another tool wrote it, in a format without checksums for all of it: it cannot be verified")
        raise typer.Exit(CANNOT_TELL)


_Rejected = list[tuple[Candidate, str]]


def _chosen_of(directory: Path, *, quick: bool) -> tuple[Listing, Candidate | None, bool, _Rejected]:
    for _ in range(_ATTEMPTS):
        listing = read_listing(directory)
        for path, why in listing.unreadable.items():
            raise DirectoryError(path=str(path), message=f"cannot be read, and a resume would stop there: {why}")
        with contextlib.suppress(FileNotFoundError):  # a live job has just deleted one: look again
            return listing, *_choose(listing, quick=quick)
    raise DirectoryError(
        path=str(directory), message="changes while it is read: its job deletes checkpoints. Try again"
    )


def _choose(listing: Listing, *, quick: bool) -> tuple[Candidate | None, bool, _Rejected]:
    seen = [look_inside(c, read_layout) if c.path.suffix == ".ckpt" else c for c in listing.usable]
    rejected = [(candidate, candidate.problem) for candidate in (*listing.unusable, *seen) if candidate.problem]
    rejected += [(candidate, why) for candidate in seen if (why := listing.unnamed.get(candidate.path))]
    for candidate in in_order(listing.folder, (c for c in seen if c.path not in listing.unnamed)):
        if quick:
            return candidate, False, rejected
        verdict = judge([plan(candidate.path)])[0]
        if verdict.state != "damaged":
            return candidate, verdict.state == "valid", rejected
        rejected.append((candidate, "; ".join(f"{bad.file} {bad.reason}" for bad in verdict.damaged[:3])))
    return None, False, rejected
