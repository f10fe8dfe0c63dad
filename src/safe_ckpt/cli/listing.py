"""``safe-ckpt list``: which checkpoints there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safe_ckpt.cli.output import AsJson, Directory, bytes_text, metrics_text, print_json, print_table
from safe_ckpt.core import select
from safe_ckpt.core.root import HIDDEN
from safe_ckpt.core.select import Candidate


def list_checkpoints(directory: Directory, as_json: AsJson = False) -> None:
    """List the checkpoints in DIR, newest first, as their manifests tell; payloads are not read."""
    candidates = [*select.list_directories(directory), *select.list_files(directory, ".ckpt")]
    good = select.newest_first(candidates)
    rows = [_row(directory, candidate) for candidate in [*good, *(c for c in candidates if c.problem)]]
    quarantine = directory / HIDDEN / "quarantine"
    rows += [_quarantined(path) for path in sorted(quarantine.iterdir())] if quarantine.is_dir() else []
    if as_json:
        print_json(rows)
        return
    print_table(
        ("name", "step", "created", "size", "metrics", "state"),
        [
            (r["name"], r["step"], r["created_at"], bytes_text(r["size_bytes"]), metrics_text(r["metrics"]), r["state"])
            for r in rows
        ],
    )


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
