"""All checkpoints in a directory of any adapter or tool, as a resume sees them: for readers, and for the commands."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safe_ckpt.core.formats.manifest import MANIFEST_NAME, read_manifest
from safe_ckpt.core.home.candidates import guarded, list_directories, list_files, looks_like_checkpoint
from safe_ckpt.core.home.home import HIDDEN, Candidate, OnError
from safe_ckpt.core.home.standing import Judge, Standing, named_by, standing_of
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from safe_ckpt.layouts import table as layouts
from safe_ckpt.layouts.judges import is_tag, judges_of
from safe_ckpt.layouts.table import Layout
from safe_ckpt.layouts.top_level import look_inside, read_layout

_NAME = re.compile(r"^(?:step-|epoch_|step_)([0-9]{1,18})\Z")  # ours, and those of Accelerate's examples
_BELOW = "checkpoints"  # where a project of Accelerate's has them


@dataclass(frozen=True, kw_only=True)
class Survey:
    """All that there is.

    Attributes:
        folder: which directory they are in: the one that was given, or the ``checkpoints`` of an Accelerate project.
        candidates: all that may be checkpoints, in no order.
        judges: say what frameworks know besides.
        standing: what a resume takes of them.
        unreadable: what could not be read, and why.
    """

    folder: Path
    candidates: Sequence[Candidate]
    judges: Sequence[Judge]
    standing: Standing
    unreadable: Mapping[Place, str]


def survey(place: Path, read: Callable[[Path], Layout] = read_layout, *, tags_below: bool = True) -> Survey:
    """Read names and manifests, and no payload.

    Args:
        place: the directory given to safe_ckpt or another tool.
        read: reads what a Lightning checkpoint of another tool says of itself.
        tags_below: whether tags of DeepSpeed count that lie in a folder below it, to which its ``latest`` leads. That folder
            has a lock and an order of commits of its own.

    Raises:
        OSError: it could not be listed.
    """
    unreadable: dict[Place, str] = {}

    def note(path: Path, error: Exception) -> None:
        if os.path.lexists(path) or isinstance(error, PermissionError):  # else a live job has just deleted it
            unreadable[path] = str(error)

    folder = place
    candidates = list_directories(folder, _number_of, _problem_of, note)
    files = list_files(folder, ".ckpt", layouts.is_lightning_directory, note)
    with guarded(folder / layouts.LATEST, note):
        candidates += _tags_below(folder, note) if tags_below else ()
        candidates += _named_and_damaged(folder, candidates)
    twice = {file.path for file in files}  # a directory of Lightning's with a manifest of ours was found by both
    candidates = [candidate for candidate in candidates if candidate.path not in twice]
    for file in files:
        with guarded(file.file_path, note):
            # As a resume of Lightning does: the step in another tool's file, and whether it has only weights.
            weights = file.manifest is not None and file.manifest.notes.get("weights_only")
            candidates.append(replace(file, problem=layouts.WEIGHTS_ONLY) if weights else look_inside(file, read))
    below = place / _BELOW
    if not candidates and not unreadable and below.is_dir() and not below.is_symlink():
        folder = below
        candidates = list_directories(folder, _number_of, _problem_of, note)
    judges, standing = judges_of(folder), standing_of(candidates)
    with guarded(folder / layouts.LATEST, note):
        standing = standing_of(candidates, judges)
    return Survey(folder=folder, candidates=candidates, judges=judges, standing=standing, unreadable=unreadable)


def _named_and_damaged(top: Path, listed: Sequence[Candidate]) -> list[Candidate]:
    """The tag that ``latest`` names where its manifest is damaged: of a name of one's own nothing else tells that it is one."""
    named = named_by(top / layouts.LATEST)
    if named is None or any(candidate.path == named for candidate in listed) or not (named / MANIFEST_NAME).is_file():
        return []
    try:
        read_manifest(named)
    except CorruptCheckpointError as error:
        return [Candidate(path=named, problem=f"{error.file} {error.message}", damaged=True)]
    except UnsupportedFormatError:
        return []
    return []


def _tags_below(top: Path, note: OnError) -> list[Candidate]:
    """DeepSpeed's tags in folders below, such as "warmup/step10": beside the one that ``latest`` names, or all without it."""
    named = named_by(top / layouts.LATEST)
    if named is not None:
        folders = [named.parent] if named.parent != top and named.parent.is_dir() else []
    else:
        folders = [path for path in sorted(top.iterdir()) if not path.is_symlink() and (path / HIDDEN).is_dir()]
    found = []
    for folder in folders:
        with guarded(folder, note):
            found += [tag for tag in list_directories(folder, _number_of, _problem_of, note) if is_tag(tag)]
    return found if named is not None else [tag for tag in found if tag.manifest is not None]


def _number_of(name: str) -> int | None:
    number = next((number for kind in layouts.KINDS if (number := kind.number_of(name)) is not None), None)
    match = _NAME.match(name)
    return int(match.group(1)) if number is None and match else number


def _problem_of(path: Path) -> str:
    """The reason why a directory without a manifest cannot be used; "" if another tool may have written it to its end."""
    named_by_other = layouts.TORCHTITAN.number_of(path.name) is not None and layouts.TORCHTITAN.is_one(path)
    if path.name.startswith("step-") and not named_by_other:
        return "has no manifest.json: never committed, or altered"
    layout = layouts.layout_of(path)
    if layout is not None:
        return layout.problem
    return "" if looks_like_checkpoint(path) else "holds no checkpoint: empty, or cut off"
