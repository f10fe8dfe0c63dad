"""A directory in which a job keeps its checkpoints, whichever adapter or tool it uses, as one finds it from outside."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safe_ckpt.core.directory import catalog
from safe_ckpt.core.directory.catalog import Candidate
from safe_ckpt.core.directory.workspace import HIDDEN
from safe_ckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from safe_ckpt.inspection.files import Window
from safe_ckpt.inspection.torch_reader import looks_like_archive, open_archive, read_old_file

_HIDDEN_TOO = "_safe_ckpt"  # where the Transformers Trainer would push what begins with a dot
_NAMES = "names"  # in the hidden folder: those of checkpoints that are named one by one
_SHARDED = "meta.pt"  # the last file that Lightning writes into a sharded checkpoint
_NO_STATE = "holds weights only, no state of the training"
_STEP = re.compile(r"^(?:step-|checkpoint_|checkpoint-|global_step|epoch_|step_)(\d{1,18})$")
_STEP_IN_FILE = re.compile(r"step=(\d{1,18})")


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Where checkpoints are kept.

    Attributes:
        folder: which directory they are in.
        hidden: where the lock, saves under way and the quarantine are; None where safe_ckpt never worked.
        usable: what a resume would try, in its order.
        unusable: what it would not, and why (``problem``).
        unreadable: what could not be looked at, and why: nothing is known of it, and a resume stops with that error.
        under_way: folders of saves that are not committed: of a job that saves now, or left by one that was killed.
        quarantined: what was found damaged and moved away.
    """

    folder: Path
    hidden: Path | None
    usable: tuple[Candidate, ...]
    unusable: tuple[Candidate, ...]
    unreadable: Mapping[Path, str]
    under_way: tuple[Path, ...]
    quarantined: tuple[Path, ...]


def find_shelf(directory: Path) -> Listing:
    """Look at names and manifests; payloads are not read.

    Args:
        directory: the one given to safe_ckpt or another tool, or the ``checkpoints`` folder of an Accelerate project.

    Raises:
        OSError: it could not be listed.
    """
    unreadable: dict[Path, str] = {}

    def note(path: Path, error: Exception) -> None:
        if os.path.lexists(path) or isinstance(error, PermissionError):  # else a live job has just let it go
            unreadable[path] = str(error)

    folder, hidden = directory, hidden_of(directory)
    found = catalog.list_directories(folder, _number_of, _problem_of_stock, note)
    files = catalog.list_files(folder, ".ckpt", lambda path: (path / _SHARDED).is_file(), note)
    found += [_told_by_name(candidate) for candidate in files]
    below = directory / "checkpoints"
    if not found and not unreadable and below.is_dir() and not below.is_symlink():  # a project of Accelerate's
        folder = below
        found = catalog.list_directories(folder, _number_of, _problem_of_stock, note)
    return Listing(
        folder=folder,
        hidden=hidden,
        usable=tuple(catalog.newest_first(found)),
        unusable=tuple(candidate for candidate in found if candidate.problem),
        unreadable=unreadable,
        under_way=_listed(hidden, "pending", unreadable),
        quarantined=_listed(hidden, "quarantine", unreadable),
    )


def hidden_of(directory: Path) -> Path | None:
    """Where the lock of a directory is; None where safe_ckpt never worked."""
    own = next((directory / name for name in (HIDDEN, _HIDDEN_TOO) if (directory / name).is_dir()), None)
    if own is None and directory.resolve().name == "checkpoints" and (directory.resolve().parent / HIDDEN).is_dir():
        return directory.resolve().parent / HIDDEN
    return own


def _number_of(name: str) -> int | None:
    found = _STEP.match(name)
    return int(found.group(1)) if found else None


def _problem_of_stock(path: Path) -> str:
    if path.name.startswith("step-"):
        return "has no manifest.json: never committed, or altered"
    if catalog.looks_like_checkpoint(path):
        return ""
    return "holds no checkpoint: empty, or cut off"


def look_inside(candidates: Iterable[Candidate]) -> list[Candidate]:
    """With what only the files of another tool themselves tell: their step, and whether there is more in them than weights.

    Raises:
        OSError: one could not be read.
    """
    return [_looked_into(candidate) if candidate.foreign else candidate for candidate in candidates]


def _looked_into(candidate: Candidate) -> Candidate:
    if candidate.path.suffix != ".ckpt":
        return candidate
    file = candidate.path / _SHARDED if candidate.path.is_dir() else candidate.path
    root: object = None
    with (
        contextlib.suppress(CorruptCheckpointError, UnsupportedFormatError),
        Window(file) as window,
    ):  # verify will say what is wrong with it
        root = open_archive(window).root if looks_like_archive(window) else read_old_file(window)
    if not isinstance(root, dict):
        return candidate
    step = root.get("global_step", -1)
    problem = _NO_STATE if "loops" not in root and ("state_dict" in root or candidate.path.is_dir()) else ""
    return replace(candidate, step=step if isinstance(step, int) else -1, problem=problem)


def _told_by_name(candidate: Candidate) -> Candidate:
    if candidate.manifest is not None and candidate.manifest.notes.get("weights_only"):
        return replace(candidate, problem=_NO_STATE)
    found = _STEP_IN_FILE.search(candidate.path.name) if candidate.foreign else None
    if found is None:
        return candidate
    return replace(candidate, step=int(found.group(1)))


def _listed(hidden: Path | None, name: str, unreadable: dict[Path, str]) -> tuple[Path, ...]:
    """What lies in the folders of this name: the directory's own, and those of what is held by its own name in it."""
    if hidden is None:
        return ()
    found: list[Path] = []
    for place in (hidden, *_entries(hidden / _NAMES, unreadable)):
        found += _entries(place / name, unreadable)
    return tuple(found)


def _entries(folder: Path, unreadable: dict[Path, str]) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        unreadable[folder] = str(error)
        return []
