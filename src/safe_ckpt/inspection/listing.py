"""The checkpoints in a directory of any adapter or tool, without its job: usable, damaged, uncommitted and quarantined."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safe_ckpt.adapters import layouts
from safe_ckpt.adapters.layouts import Layout
from safe_ckpt.core.directory import catalog
from safe_ckpt.core.directory.catalog import Candidate
from safe_ckpt.core.directory.workspace import HIDDEN
from safe_ckpt.core.formats.manifest import Manifest
from safe_ckpt.core.health.verdict import described, marked_words
from safe_ckpt.errors import CorruptCheckpointError, HostileCheckpointError, UnsupportedFormatError
from safe_ckpt.inspection.dcp_reader import METADATA
from safe_ckpt.inspection.files import CheckpointFile, Window, inside
from safe_ckpt.inspection.torch_reader import looks_like_archive, open_archive, read_old_file

_HIDDEN_TOO = "_safe_ckpt"  # where the Transformers Trainer would push what begins with a dot
_LONGEST_TAG = 4096
NOT_COMMITTED = "not committed"
FOUND_DAMAGED = "found damaged by a resume"
_NAMES = "names"  # in the hidden folder: those of checkpoints that are named one by one
_NAME = re.compile(r"^(?:step-|epoch_|step_)([0-9]{1,18})$")  # ours, and those of Accelerate's examples
_NOT_NAMED = f"the file {layouts.LATEST} does not name it: it is loaded only by its name"
_DIRECTORIES: Sequence[tuple[str, Callable[[str], bool]]] = (
    ("DeepSpeed directory", lambda name: name.startswith(("zero_pp_rank_", "mp_rank_"))),
    ("DCP directory", lambda name: name == METADATA),
    ("Accelerate directory", lambda name: name.startswith("random_states_")),
    ("Transformers Trainer directory", lambda name: name == "trainer_state.json"),
    ("Hugging Face directory", lambda name: name.endswith(".safetensors")),
)
_FILES = {".ckpt": "Lightning or torch file", ".safetensors": "safetensors file"}


def kind_of(files: Sequence[CheckpointFile]) -> str:
    """The kind of a checkpoint that is not ours, in words. That of a single file follows from its ending."""
    names = [Path(file.name).name for file in files]
    if len(files) == 1 and files[0].path.suffix in _FILES:
        return _FILES[files[0].path.suffix]
    unknown = "files" if len(files) > 1 else "file"
    return next((kind for kind, is_sign in _DIRECTORIES if any(map(is_sign, names))), unknown)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The checkpoints of a directory.

    Attributes:
        folder: which directory they are in.
        hidden: where the lock, saves under way and the quarantine are; None where safe_ckpt never worked.
        usable: those in which nothing is wrong so far, in the order in which a resume tries them.
        unnamed: of these, the ones that no resume takes by itself, and why.
        unusable: those that a resume would not take, and why (``problem``).
        unreadable: what could not be read, and why. A resume stops with that error.
        under_way: folders of saves that are not committed: of a job that saves now, or left by one that was killed.
        quarantined: what was found damaged and moved away.
    """

    folder: Path
    hidden: Path | None
    usable: tuple[Candidate, ...]
    unnamed: Mapping[Path, str]
    unusable: tuple[Candidate, ...]
    unreadable: Mapping[Path, str]
    under_way: tuple[Path, ...]
    quarantined: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a listing.

    Attributes:
        name: relative to the directory that the checkpoints are in.
        step: its training step, or the number in its name; None where neither is known.
        sequence: its place in the order of commits.
        created_at: ISO 8601, UTC.
        size_bytes: of all its files.
        shared_bytes: of those of them that other checkpoints have, too: they are on the disk once.
        world_size: number of ranks that saved it.
        metrics: those given to ``save``.
        written_by: versions, host and process; None where another tool wrote it.
        state: "valid" (its manifest is in order), "unhealthy" (and its numbers are not), "unverified", "damaged", "unreadable",
            "partial" or "quarantined".
        reason: why it cannot be used; "" where nothing is wrong so far.
    """

    name: str
    step: int | None = None
    sequence: int | None = None
    created_at: str | None = None
    size_bytes: int | None = None
    shared_bytes: int | None = None
    world_size: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    written_by: Mapping[str, Any] | None = None
    state: str
    reason: str = ""


def read_listing(directory: Path, *, tags_below: bool = True) -> Listing:
    """Read names and manifests, and no payload.

    Args:
        directory: the one given to safe_ckpt or another tool, or the ``checkpoints`` folder of an Accelerate project.
        tags_below: whether tags of DeepSpeed count that lie in a folder below it, to which its ``latest`` leads. That folder
            has a lock and an order of commits of its own.

    Raises:
        OSError: it could not be listed.
    """
    unreadable: dict[Path, str] = {}

    def note(path: Path, error: Exception) -> None:
        if os.path.lexists(path) or isinstance(error, PermissionError):  # else a live job has just deleted it
            unreadable[path] = str(error)

    folder, hidden = directory, hidden_of(directory)
    candidates = catalog.list_directories(folder, _number_of, _problem_of, note)
    files = catalog.list_files(folder, ".ckpt", layouts.is_lightning_directory, note)
    candidates += [_judged_by_name(candidate) for candidate in files]
    tags = (folder / _named_in(folder)).parent
    if tags_below and tags != folder and tags.is_dir():  # a tag of DeepSpeed such as "warmup/step10"
        listed = catalog.list_directories(tags, _number_of, _problem_of, note)
        candidates += [candidate for candidate in listed if _is_tag(candidate)]
    below = directory / "checkpoints"
    if not candidates and not unreadable and below.is_dir() and not below.is_symlink():  # a project of Accelerate's
        folder = below
        candidates = catalog.list_directories(folder, _number_of, _problem_of, note)
    usable = in_order(folder, candidates)
    return Listing(
        folder=folder,
        hidden=hidden,
        usable=tuple(usable),
        unnamed={**_passed_over(usable), **_unnamed(folder, usable)},
        unusable=tuple(candidate for candidate in candidates if candidate.problem),
        unreadable=unreadable,
        under_way=(*_listed(hidden, "pending", unreadable), *_listed(hidden, "staging", unreadable)),
        quarantined=_listed(hidden, "quarantine", unreadable),
    )


def rows(listing: Listing) -> Iterator[Row]:
    """The lines of a listing: usable checkpoints in the order in which a resume tries them, then the others."""
    for candidate in listing.usable:
        with contextlib.suppress(FileNotFoundError):  # a live job has just deleted it
            yield row_of(_name(listing, candidate.file_path), candidate, "unverified" if candidate.foreign else "valid")
    for candidate in listing.unusable:
        yield row_of(_name(listing, candidate.file_path), candidate, "damaged")
    for path, why in listing.unreadable.items():
        yield Row(name=_name(listing, path), state="unreadable", reason=why)
    for path in listing.under_way:
        yield Row(name=_name(listing, path), state="partial", reason=NOT_COMMITTED)
    for path in listing.quarantined:
        yield Row(name=_name(listing, path), state="quarantined", reason=FOUND_DAMAGED)


def list_existing(directory: Path) -> tuple[tuple[Row, ...], str]:
    """The checkpoints of a run and its quarantine, and why some could not be listed; "" if all were.

    Args:
        directory: as ``read_listing`` takes it.
    """
    try:
        listing = replace(read_listing(directory), folder=directory)  # names are relative to it
        existing = tuple(row for row in rows(listing) if row.state not in ("unreadable", "partial"))
    except OSError as error:
        return (), str(error)
    return existing, "; ".join(f"{path.name}: {why}" for path, why in listing.unreadable.items())


def hidden_of(directory: Path) -> Path | None:
    """Where the lock of a directory is; None where safe_ckpt never worked."""
    own = next((directory / name for name in (HIDDEN, _HIDDEN_TOO) if (directory / name).is_dir()), None)
    if own is None and directory.resolve().name == "checkpoints" and (directory.resolve().parent / HIDDEN).is_dir():
        return directory.resolve().parent / HIDDEN
    return own


def read_layout(path: Path) -> Layout:
    """What a Lightning checkpoint says about itself; of a pickle that is too long to be read, what its name says.

    Bounded like all that the command reads. A resume looks into any length: ``blind_reader.read_layout``.

    Raises:
        OSError: it could not be read.
    """
    layout = layouts.lightning_layout_of(path)
    try:
        with Window(layouts.facts_file(path)) as window:
            return layout.with_content(
                open_archive(window).root if looks_like_archive(window) else read_old_file(window)
            )
    except HostileCheckpointError as error:
        return replace(layout, problem=f"is no checkpoint: {error.message}")
    except CorruptCheckpointError:
        return layout.with_content(None)
    except UnsupportedFormatError:  # too long to be read
        return layout


def _number_of(name: str) -> int | None:
    number = next((number for kind in layouts.KINDS if (number := kind.number_of(name)) is not None), None)
    match = _NAME.match(name)
    return int(match.group(1)) if number is None and match else number


def _problem_of(path: Path) -> str:
    """Why a directory without a manifest cannot be used; "" if another tool may have written it to its end."""
    if path.name.startswith("step-"):
        return "has no manifest.json: never committed, or altered"
    layout = layouts.layout_of(path)
    if layout is not None:
        return layout.problem
    return "" if catalog.looks_like_checkpoint(path) else "holds no checkpoint: empty, or cut off"


def _judged_by_name(candidate: Candidate) -> Candidate:
    if candidate.manifest is not None and candidate.manifest.notes.get("weights_only"):
        return replace(candidate, problem=layouts.WEIGHTS_ONLY)
    number = layouts.LIGHTNING_FILE.number_of(candidate.file_path.name) if candidate.foreign else None
    return candidate if number is None else replace(candidate, step=number)


def in_order(folder: Path, candidates: Iterable[Candidate]) -> list[Candidate]:
    """The order in which a resume tries them: as ``catalog.newest_first``, but what DeepSpeed's file ``latest`` names first."""
    named = folder / _named_in(folder)
    newest_first = catalog.newest_first(candidates)
    return sorted(newest_first, key=lambda candidate: not (candidate.file_path == named and _is_tag(candidate)))


def _passed_over(usable: Sequence[Candidate]) -> dict[Path, str]:
    """Those that a resume leaves alone unless it is told their name: marked ones."""
    ours = [(c.file_path, c.manifest) for c in catalog.newest_first(usable) if c.manifest is not None]
    return {path: marked_words(manifest.health) for path, manifest in ours if manifest.marked}


def _unnamed(folder: Path, usable: Sequence[Candidate]) -> Mapping[Path, str]:
    """The tags that DeepSpeed loads only by their names.

    It loads what ``latest`` names. If that is damaged, ours before it follow, as far as ``latest`` was to name them.
    """
    tags = [candidate for candidate in usable if _is_tag(candidate)]
    ours = [tag for tag in tags if tag.manifest is not None and tag.manifest.notes.get("latest")]
    named = next((tag for tag in tags if tag.file_path == folder / _named_in(folder)), None)
    if named is not None:
        before = [tag for tag in catalog.newest_first(ours) if named in ours and tag.manifest is not None]
        ours = [named, *(before[before.index(named) + 1 :] if named in ours else [])]
    return {tag.file_path: _NOT_NAMED for tag in tags if tag not in ours}


def _is_tag(candidate: Candidate) -> bool:
    if candidate.manifest is not None:
        return candidate.manifest.notes.get("adapter") == "deepspeed"
    return layouts.DEEPSPEED.number_of(candidate.file_path.name) is not None


def _named_in(folder: Path) -> str:
    """The tag that DeepSpeed's file ``latest`` names; "none" where there is no such file, or it leads out."""
    path = folder / layouts.LATEST
    # Any file may have this name: a pipe, a link to itself, that of another user, a long one.
    with contextlib.suppress(OSError, CorruptCheckpointError):
        if path.is_file() and path.stat().st_size <= _LONGEST_TAG:
            name = path.read_text(encoding="utf-8", errors="replace").strip()
            inside(folder, name)
            return name
    return "none"


def row_of(name: str, candidate: Candidate, state: str) -> Row:
    """The line of one checkpoint.

    Raises:
        OSError: it was deleted meanwhile.
    """
    manifest, info = candidate.manifest, candidate.info
    row = Row(name=name, state=state, reason=candidate.problem)
    if manifest is not None and not candidate.problem and manifest.health.get("healthy") is False:
        row = replace(row, state="unhealthy", reason=described(manifest.health))
    if manifest is None or info is None:
        return replace(row, step=candidate.step if candidate.step >= 0 else None)
    return replace(
        row,
        step=manifest.step,
        sequence=manifest.sequence,
        created_at=manifest.created_at,
        size_bytes=info.size_bytes,
        shared_bytes=_shared_bytes(candidate.path, manifest),
        world_size=manifest.world_size,
        metrics=dict(manifest.metrics),
        written_by={**manifest.versions, **manifest.written_by},
    )


def _shared_bytes(path: object, manifest: Manifest) -> int:
    if not isinstance(path, Path):
        return 0
    total = 0
    for entry in manifest.files:
        with contextlib.suppress(OSError):  # it is missing, or a live job has just deleted the checkpoint
            total += entry.size_bytes if (path / entry.path).stat().st_nlink > 1 else 0
    return total


def _name(listing: Listing, path: Path) -> str:
    if path.is_relative_to(listing.folder):
        return path.relative_to(listing.folder).as_posix()
    hidden = listing.hidden or listing.folder
    return f"{hidden.name}/{path.relative_to(hidden).as_posix()}"


def _listed(hidden: Path | None, name: str, unreadable: dict[Path, str]) -> tuple[Path, ...]:
    """The entries of the folders of this name: the directory's own, and that of each checkpoint with a lock of its own."""
    if hidden is None:
        return ()
    places = (hidden, *_entries(hidden / _NAMES, unreadable))
    return tuple(path for place in places for path in _entries(place / name, unreadable))


def _entries(folder: Path, unreadable: dict[Path, str]) -> Iterable[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        unreadable[folder] = str(error)
        return []
