"""What lies in the directory now, as the manifests tell. No payload is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safe_ckpt import text
from safe_ckpt.core.directory.catalog import Candidate
from safe_ckpt.inspection.listing import find_shelf


@dataclass(frozen=True, kw_only=True)
class Existing:
    """One checkpoint, newest first. ``state`` is "valid" (its manifest is in order), "unverified" or why it is damaged."""

    name: str
    step: int | None
    created_at: str
    size_bytes: int | None
    metrics: str
    state: str
    good: bool


def list_existing(directory: Path) -> tuple[tuple[Existing, ...], str]:
    """The checkpoints of a run, its quarantine, and what kept this from listing all; "" for nothing.

    Args:
        directory: as ``find_shelf`` takes it.
    """
    try:
        shelf = find_shelf(directory)
        found = [_described(candidate, directory) for candidate in (*shelf.usable, *shelf.unusable)]
    except OSError as error:
        return (), text.clean(str(error))
    problems = [f"{path.name}: {problem}" for path, problem in shelf.unreadable.items()]
    rows = [row for row in found if row is not None]
    return (*rows, *map(_set_aside, shelf.quarantined)), text.clean("; ".join(problems))


def _described(candidate: Candidate, directory: Path) -> Existing | None:
    try:
        info = candidate.info
    except FileNotFoundError:  # a live job has just let it go
        return None
    state = f"damaged: {candidate.problem}" if candidate.problem else "unverified" if candidate.foreign else "valid"
    metrics = {} if info is None else info.metrics
    by_name = candidate.step if candidate.step >= 0 else None
    return Existing(
        name=text.clean(candidate.path.relative_to(directory).as_posix()),
        step=info.step if info else by_name,
        created_at=text.clean(info.created_at[:19].replace("T", " ") + " UTC") if info else "",
        size_bytes=info.size_bytes if info else None,
        metrics=text.clean(", ".join(f"{key} {_short(value)}" for key, value in metrics.items())),
        state=text.clean(state),
        good=not candidate.problem,
    )


def _set_aside(path: Path) -> Existing:
    name, state = text.clean(path.name), "quarantined: its bytes were wrong"
    return Existing(name=name, step=None, created_at="", size_bytes=None, metrics="", state=state, good=False)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
