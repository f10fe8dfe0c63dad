"""``safe-ckpt list``: which checkpoints there are."""

from __future__ import annotations

from datetime import datetime, timezone

import typer

from safe_ckpt.core.home.holders import runs_below
from safe_ckpt.text import age, bytes_text, metrics_text
from safe_ckpt.text import listed as names_listed
from safe_ckpt.tools.cli.output import DAMAGED, AsJson, Directory, failing, print_json, print_table, say, waiting
from safe_ckpt.tools.inspection.files import place_given
from safe_ckpt.tools.inspection.listing import Row, read_listing, rows

RUNS_BELOW = "not shown, because each is a run of its own: {}. Name one"
_MOST_METRICS = 4  # a Trainer gives a dozen, and a line has to fit a terminal


def list_checkpoints(directory: Directory, as_json: AsJson = False) -> None:
    """List the checkpoints in DIR, or the one that it is.

    They come in the order in which a resume tries them, then what cannot be used, and why.

    Their manifests are read, their payloads are not (``safe-ckpt verify`` does). The states: valid (committed, and its manifest
    is in order), unverified (another tool wrote it), damaged, partial (a save that is under way, or was when its job died),
    quarantined (found damaged by a resume and moved away), unreadable (no permission, a newer format, a failing disk: a resume
    stops there). Exit status: 0, or 1 where something is unreadable.
    """
    with failing(), waiting(f"reading the manifests in {directory}"):
        place = place_given(directory)
        listing = read_listing(place)
        listed, below = list(rows(listing)), [name for name in runs_below(place) if place / name != listing.folder]
    if as_json:
        print_json([vars(row) for row in listed])
    else:
        now = datetime.now(timezone.utc)
        columns = ("name", "step", "age", "size", "metrics", "state", "written by")
        print_table(columns, [_cells(row, now) for row in listed])
        if not listed:
            say(f"no checkpoints in {place}")
        if below:
            say(RUNS_BELOW.format(names_listed(below)))
    if any(row.state == "unreadable" for row in listed):
        raise typer.Exit(DAMAGED)


def _cells(row: Row, now: datetime) -> tuple[object, ...]:
    state = "; ".join([f"{row.state}: {row.reason}" if row.reason else row.state, *filter(None, [row.held_by])])
    metrics, size = metrics_text(row.metrics, _MOST_METRICS), bytes_text(row.size_bytes)
    if row.shared_bytes:
        size += f", {bytes_text(row.shared_bytes)} shared"
    return row.name, row.step, _age_of(row, now), size, metrics, state, _writer(row)


def _age_of(row: Row, now: datetime) -> str:
    try:
        seconds = (now - datetime.fromisoformat(row.created_at or "")).total_seconds()
    except (TypeError, ValueError):
        return ""
    return age(max(0.0, seconds))


def _writer(row: Row) -> str:
    by = row.written_by
    if not by:
        return ""
    where = f" on {by['host']}:{by['pid']}" if {"host", "pid"} <= by.keys() else ""
    ranks = row.world_size
    return f"safe-ckpt {by.get('safe-ckpt', '?')}{where}, {ranks} rank{'s' if ranks != 1 else ''}"
