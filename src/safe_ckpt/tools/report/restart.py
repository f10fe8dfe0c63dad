"""The checkpoint that a restart would take now, by manifests and sizes: its age, its health, and what is passed over for it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from safe_ckpt import text
from safe_ckpt.core.formats.manifest import describe_unhealthy
from safe_ckpt.core.home.home import Candidate
from safe_ckpt.core.storage import presence
from safe_ckpt.tools.inspection.listing import read_listing

_MOST_PASSED = 3


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The checkpoint that it would go on from.

    Attributes:
        name: of the checkpoint; "" for none: it would start afresh, or find nothing usable.
        step: its training step; None where that is not known.
        saved_at: seconds since the epoch; None where that is not known.
        verifiable: it has a manifest with checksums.
        passed_over: newer ones that it would not take, with the reason.
    """

    name: str = ""
    step: int | None = None
    saved_at: float | None = None
    verifiable: bool = False
    passed_over: tuple[str, ...] = ()

    @property
    def well(self) -> bool:
        """Whether there is one, and nothing newer is passed over for it."""
        return bool(self.name) and not self.passed_over


def look_at_restart(directory: Path) -> Restart | None:
    """The one that a restart would take of ``directory``; None where that cannot be read. No payload is read."""
    try:
        listing = read_listing(directory)
    except OSError:
        return None
    unusable = [(one.path.name, one.problem, one.number) for one in listing.standing.unusable]
    passed = [(one.name, "found damaged by a resume", -1) for one in listing.quarantined]
    passed += [(path.name, why, -1) for path, why in listing.unreadable.items()]
    for place, rule in listing.standing.by_name_only.items():
        among = [one for one in listing.standing.usable if one.path == place]
        manifest = among[0].manifest if among else None
        bad = manifest is not None and manifest.health.get("healthy") is False
        why = describe_unhealthy(manifest.health) if manifest is not None and bad else rule
        passed.append((place.name, why, max((one.number for one in among), default=-1)))
    for candidate in listing.standing.order:
        if candidate.manifest is not None and candidate.manifest.health.get("healthy") is False:
            passed.append((candidate.path.name, describe_unhealthy(candidate.manifest.health), candidate.number))
        elif problem := _cut(candidate):
            passed.append((candidate.path.name, problem, candidate.number))
        else:
            return _taken(candidate, [*passed, *unusable])
    return Restart(passed_over=_said([*passed, *unusable]))


def sentence(restart: Restart, now: float) -> str:
    """The headline."""
    if not restart.name:
        return "A restart finds no usable checkpoint." if restart.passed_over else "A restart would start afresh."
    which = f"step {restart.step}" if restart.step is not None else restart.name
    age = "" if restart.saved_at is None else f", {text.age(max(0.0, now - restart.saved_at))} old"
    health = "healthy" if restart.verifiable else "without checksums"
    return f"A restart goes on from {which}{age}, {health}."


def _taken(candidate: Candidate, passed: list[tuple[str, str, int]]) -> Restart:
    manifest, saved_at = candidate.manifest, None
    if manifest is not None:
        try:
            saved_at = datetime.fromisoformat(manifest.created_at).timestamp()
        except (ValueError, TypeError, OverflowError):
            saved_at = None
    newer = [one for one in passed if one[2] < 0 or candidate.number < 0 or one[2] > candidate.number]
    step = candidate.number if candidate.number >= 0 else None
    return Restart(
        name=candidate.path.name,
        step=step,
        saved_at=saved_at,
        verifiable=manifest is not None,
        passed_over=_said(newer),
    )


def _said(passed: list[tuple[str, str, int]]) -> tuple[str, ...]:
    said = [text.clean(f"{name}: {why}", 300) for name, why, _ in passed]
    return (*said[:_MOST_PASSED], *([f"{len(said) - _MOST_PASSED} more"] if len(said) > _MOST_PASSED else []))


def _cut(candidate: Candidate) -> str:
    """The first file that is missing or of another size; "" for none."""
    if candidate.manifest is None or not presence.is_directory(path := candidate.file_path):
        return ""
    for entry in candidate.manifest.files:
        try:
            size = (path / entry.path).stat().st_size
        except OSError as error:
            return f"{entry.path}: {error.strerror or error}"
        if size != entry.size_bytes:
            return f"{entry.path} has {size} bytes instead of {entry.size_bytes}"
    return ""
