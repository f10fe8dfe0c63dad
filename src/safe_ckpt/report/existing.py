"""What lies in the directory now, as the manifests tell. No payload is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safe_ckpt.core import select
from safe_ckpt.core.root import HIDDEN
from safe_ckpt.core.select import Candidate
from safe_ckpt.errors import UnsupportedFormatError
from safe_ckpt.report import words

_BELOW = "checkpoints"  # where Accelerate's automatic naming puts them


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
    """The checkpoints in ``directory``, or in ``checkpoints`` below it, and what kept this from listing all; "" for nothing."""
    candidates: list[Candidate] = []
    problem = ""
    for folder in (directory, directory / _BELOW):
        if folder.is_dir():
            try:
                candidates += select.list_directories(folder)
            except (OSError, UnsupportedFormatError) as error:
                problem = words.clean(str(error))
    try:
        candidates += select.list_files(directory, ".ckpt")
    except (OSError, UnsupportedFormatError) as error:
        problem = words.clean(str(error))
    ordered = [*select.newest_first(candidates), *(candidate for candidate in candidates if candidate.problem)]
    rows = [_described(candidate, directory) for candidate in ordered]
    quarantine = directory / HIDDEN / "quarantine"
    aside = sorted(quarantine.iterdir()) if quarantine.is_dir() else []
    return (*rows, *(_set_aside(path) for path in aside)), problem


def _described(candidate: Candidate, directory: Path) -> Existing:
    info = candidate.info
    state = f"damaged: {candidate.problem}" if candidate.problem else "unverified" if candidate.foreign else "valid"
    metrics = {} if info is None else info.metrics
    return Existing(
        name=words.clean(candidate.path.relative_to(directory).as_posix()),
        step=info.step if info else None,
        created_at=words.clean(info.created_at[:19].replace("T", " ") + " UTC") if info else "",
        size_bytes=info.size_bytes if info else None,
        metrics=words.clean(", ".join(f"{key} {_short(value)}" for key, value in metrics.items())),
        state=words.clean(state),
        good=not candidate.problem,
    )


def _set_aside(path: Path) -> Existing:
    name, state = words.clean(path.name), "quarantined: its bytes were wrong"
    return Existing(name=name, step=None, created_at="", size_bytes=None, metrics="", state=state, good=False)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
