"""Paths that lead to nothing: each names a checkpoint that is not there, or a run that has saved nothing yet."""

from __future__ import annotations

import contextlib
from pathlib import Path

from safe_ckpt.core.home.candidates import list_directories
from safe_ckpt.core.home.home import HIDDEN, Home, is_anything_at, is_run
from safe_ckpt.core.home.places import candidate_at
from safe_ckpt.core.resuming.items import saved_by
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.source import in_files
from safe_ckpt.errors import CheckpointNotFoundError, SafeCheckpointError
from safe_ckpt.text import listed

_NUMBERED = "checkpoints"  # where Accelerate numbers its own
_NAMES = 3


def refuse_missing(place: Place) -> None:
    """Raise if a path leads to nothing, and lies where checkpoints do: it names one of them. Any other names a run. On rank 0.

    Raises:
        CheckpointNotFoundError: it names a checkpoint.
        OSError: it cannot be looked at.
    """
    if not is_anything_at(place):
        beside = names_in(in_files(place.parent))
        if beside or is_run(place.parent):
            raise not_found(place, beside)


def not_found(place: Place, beside: list[str]) -> CheckpointNotFoundError:
    """Return the error for a checkpoint that was named, where ``beside`` are there."""
    there = f"there are {listed(beside)}" if beside else "there are none"
    return CheckpointNotFoundError(path=str(place), message=f"there is no such checkpoint; beside it {there}")


def names_in(folder: Path) -> list[str]:
    """The checkpoints in a folder that are directories, as far as they can be looked at, the newest first."""
    try:
        found = list_directories(folder, on_error=lambda *_: None)
    except (OSError, SafeCheckpointError):
        return []
    return [one.path.name for one in sorted(found, key=lambda one: (one.number, one.path.name), reverse=True)]


def of_frameworks(home: Home) -> list[str]:
    """Return what frameworks saved there through this package: files, or folders in one of its own. At most three names."""
    names: list[str] = []
    if not home.is_mounted:
        return names
    folder = in_files(home.path)
    with contextlib.suppress(OSError, SafeCheckpointError):
        own = (folder / _NUMBERED / HIDDEN).exists()  # a run of its own, which is another one
        for path in sorted([*folder.glob("*.ckpt"), *(() if own else folder.glob(f"{_NUMBERED}/*"))]):
            one = candidate_at(path) if len(names) < _NAMES else None
            if one is not None and one.manifest is not None and saved_by(one.manifest):
                names.append(path.relative_to(folder).as_posix())
    return names
