"""The checkpoints in a directory of any adapter or tool, without its job: usable, damaged, uncommitted and quarantined."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from safe_ckpt.core.formats.manifest import DCP_METADATA, MANIFEST_NAME, describe_unhealthy
from safe_ckpt.core.home.candidates import look_at
from safe_ckpt.core.home.holders import Held, hidden_folders, holders
from safe_ckpt.core.home.home import NAMES, Candidate, name_below
from safe_ckpt.core.home.objects.head import Head, folders_of, in_parallel, list_objects, object_candidate, read_head
from safe_ckpt.core.home.pins.observer import held_in
from safe_ckpt.core.home.pins.shelf import shelves_of
from safe_ckpt.core.home.places import is_one
from safe_ckpt.core.home.standing import Standing, standing_of
from safe_ckpt.core.storage import presence
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.core.storage.source import shared_bytes
from safe_ckpt.errors import CorruptCheckpointError, HostileCheckpointError, UnsupportedFormatError
from safe_ckpt.layouts import table as layouts
from safe_ckpt.layouts.survey import survey
from safe_ckpt.layouts.table import Layout
from safe_ckpt.text import listed
from safe_ckpt.tools.inspection.files import CheckpointFile, Window
from safe_ckpt.tools.inspection.torch_reader import root_of

NOT_COMMITTED = "not committed"
FOUND_DAMAGED = "found damaged by a resume"
_UNKNOWN = f"{NOT_COMMITTED}, and no job says that it is its own"
_P = TypeVar("_P", Path, ObjectPath, Place)
_DIRECTORIES: Sequence[tuple[str, Callable[[str], bool]]] = (
    ("DeepSpeed directory", lambda name: name.startswith(("zero_pp_rank_", "mp_rank_"))),
    ("DCP directory", lambda name: name == DCP_METADATA),
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
        places: in a file system where the lock, saves under way and the quarantine are, and others where these are: of
            checkpoints in it that are named one by one.
        is_ours: safe_ckpt worked there.
        may_be_one: it may itself be a checkpoint of another tool.
        standing: what a resume takes of them.
        unreadable: what could not be read, and why. A resume stops with that error.
        under_way: folders of saves that are not committed: of a job that saves now, or left by one that was killed.
        unknown: in an object store: folders without a manifest of which no job says that they are its own.
        quarantined: what was found damaged, and moved away in a file system.
        held: what readers keep from being deleted, and who.
    """

    folder: Place
    places: tuple[Path, ...] = ()
    is_ours: bool
    may_be_one: bool = False
    standing: Standing
    unreadable: Mapping[Place, str]
    under_way: tuple[Place, ...]
    unknown: tuple[Place, ...] = ()
    quarantined: tuple[Place, ...]
    held: Mapping[Place, str] = field(default_factory=dict)

    @property
    def places_of_all(self) -> list[Place]:
        """The places of all of them, whatever a resume thinks of them."""
        return [candidate.path for candidate in (*self.standing.usable, *self.standing.unusable)]


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
        held_by: the reader that keeps it from being deleted; "" for none.
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
    held_by: str = ""


@functools.singledispatch
def read_listing(place: Place, *, tags_below: bool = True) -> Listing:  # noqa: ARG001 - each storage has its own below
    """Read names and manifests, and no payload.

    Args:
        place: the one given to safe_ckpt or another tool, or the ``checkpoints`` folder of an Accelerate project; or a
            directory in an object store.
        tags_below: whether tags of DeepSpeed count that lie in a folder below it, to which its ``latest`` leads. That folder
            has a lock and an order of commits of its own.

    Raises:
        OSError: it could not be listed.
    """
    raise TypeError(place)


@read_listing.register
def _(place: ObjectPath, *, tags_below: bool = True) -> Listing:
    del tags_below
    unreadable: dict[Place, str] = {}
    # The head last: what a job announces meanwhile must not look like something that no job knows.
    if (one := object_candidate(place)) is not None:  # an address may be that of one checkpoint
        return Listing(
            folder=place, is_ours=True, standing=standing_of([one]), unreadable={}, under_way=(), quarantined=()
        )
    candidates = list_objects(place, lambda path, error: unreadable.update({path: str(error)}))
    seen = {candidate.path for candidate in candidates} | unreadable.keys()
    there = folders_of(place)
    head = read_head(place)
    facts = head or Head()
    aside = [place / name for name in sorted(facts.quarantined)]
    hidden = {*facts.trash, *facts.quarantined}
    left = [path for path in there if path not in seen and path.name not in hidden]
    # With a manifest it is what has a tombstone of a later job, was committed since it was listed, or deleted meanwhile.
    bare = [path for path, whole in zip(left, in_parallel(is_one, left), strict=True) if not whole]
    unknown = tuple(path for path in bare if path.name not in facts.pending)
    return Listing(
        folder=place,
        is_ours=bool(head or candidates or unknown),
        standing=standing_of(candidates),
        unreadable=unreadable,
        under_way=tuple(path for path in bare if path.name in facts.pending),
        unknown=unknown,
        quarantined=tuple(path for path in aside if path in there or is_one(path)),
        held=held_in(shelves_of(place, ()), candidates),
    )


@read_listing.register
def _(place: Path, *, tags_below: bool = True) -> Listing:
    if presence.is_there(place / MANIFEST_NAME):  # it is one checkpoint
        whole = Path(os.path.abspath(place))
        alone = standing_of([look_at(whole)], named=True)
        return Listing(folder=whole.parent, is_ours=True, standing=alone, unreadable={}, under_way=(), quarantined=())
    found = survey(place, bounded_layout, tags_below=tags_below)
    places = hidden_folders(place)
    if found.folder != place:  # a project of Accelerate's
        places = list({one.resolve(): one for one in (*hidden_folders(found.folder), *places)}.values())
    unreadable: dict[Place, str] = dict(found.unreadable)
    return Listing(
        folder=found.folder,
        places=tuple(places),
        is_ours=bool(places),
        may_be_one=not places and any(place.iterdir()),
        standing=found.standing,
        unreadable=unreadable,
        under_way=(*_listed(places, "pending", unreadable), *_listed(places, "staging", unreadable)),
        quarantined=_listed(places, "quarantine", unreadable),
        held=held_in(shelves_of(place, places), found.candidates),
    )


def holders_of(place: Place) -> list[Held]:
    """The jobs that hold the directory, or a name in it: those that may be alive come first.

    Raises:
        OSError: it could not be listed, or a lock is there and could not be read.
    """
    return holders(read_listing(place).folder, place)


def rows(listing: Listing) -> Iterator[Row]:
    """The lines of a listing: usable checkpoints in the order in which a resume tries them, then the others, and why."""
    for candidate in listing.standing.usable:
        with contextlib.suppress(FileNotFoundError):  # a live job has just deleted it
            row = row_of(_name(listing, candidate.path), candidate, "unverified" if candidate.foreign else "valid")
            reason = row.reason or listing.standing.by_name_only.get(candidate.path, "")
            yield replace(row, reason=reason, held_by=listing.held.get(candidate.path, ""))
    for candidate in listing.standing.unusable:
        yield row_of(_name(listing, candidate.path), candidate, "damaged")
    left: list[tuple[str, Mapping[Place, str]]] = [
        ("unreadable", listing.unreadable),
        ("partial", dict.fromkeys(listing.under_way, NOT_COMMITTED)),
        ("partial", dict.fromkeys(listing.unknown, _UNKNOWN)),
        ("quarantined", dict.fromkeys(listing.quarantined, FOUND_DAMAGED)),
    ]
    for state, reasons in left:
        for path, why in reasons.items():
            yield Row(name=_name(listing, path), state=state, reason=why)


def one_of(place: _P) -> _P:
    """The place, unless it is a directory in which several checkpoints are kept.

    Raises:
        UnsupportedFormatError: it is, or nothing is there.
        OSError: the store gave no answer, or refuses.
    """
    if is_one(place):
        return place
    listing = read_listing(place)
    names = [name_below(place, path) or str(path) for path in listing.places_of_all]
    if not names and listing.may_be_one:
        return place
    advice = f"name one of them: {listed(names)}" if names else "there is none in it"
    raise UnsupportedFormatError(
        path=str(place), message=f"is a directory for checkpoints, and no checkpoint; {advice}"
    )


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


def bounded_layout(path: Path) -> Layout:
    """The layout that a Lightning checkpoint says it has; for a pickle that is too long to be read, as its name says.

    Bounded like all that the command reads. A resume looks into any length: ``layouts.top_level.read_layout``.

    Raises:
        OSError: it could not be read.
    """
    layout = layouts.lightning_layout_of(path)
    try:
        with Window(layouts.facts_file(path)) as window:
            return layout.with_content(root_of(window))
    except HostileCheckpointError as error:
        return replace(layout, problem=f"is no checkpoint: {error.message}")
    except CorruptCheckpointError:
        return layout.with_content(None)
    except UnsupportedFormatError:  # too long to be read
        return layout


def row_of(name: str, candidate: Candidate, state: str) -> Row:
    """The line of one checkpoint.

    Raises:
        OSError: it was deleted meanwhile.
    """
    manifest, info = candidate.manifest, candidate.info
    row = Row(name=name, state=state, reason=candidate.problem)
    if manifest is not None and not candidate.problem and manifest.health.get("healthy") is False:
        row = replace(row, state="unhealthy", reason=describe_unhealthy(manifest.health))
    if manifest is None or info is None:
        return replace(row, step=candidate.step if candidate.step >= 0 else None)
    return replace(
        row,
        step=manifest.step,
        sequence=manifest.sequence,
        created_at=manifest.created_at,
        size_bytes=info.size_bytes,
        shared_bytes=shared_bytes(candidate.path, manifest.files),
        world_size=manifest.world_size,
        metrics=dict(manifest.metrics),
        written_by={**manifest.versions, **manifest.written_by},
    )


def _name(listing: Listing, place: Place) -> str:
    """The path relative to the directory, or to the hidden folder that it lies in."""
    for top in (listing.folder, *listing.places):
        if (name := name_below(top, place)) is not None:
            return name if top is listing.folder else f"{top.name}/{name}"
    return place.name


def _listed(hidden: Sequence[Path], name: str, unreadable: dict[Place, str]) -> tuple[Path, ...]:
    """The entries of the folders of this name: the directory's own, and that of each checkpoint with a lock of its own."""
    places = [place for folder in hidden for place in (folder, *_entries(folder / NAMES, unreadable))]
    return tuple(path for place in places for path in _entries(place / name, unreadable))


def _entries(folder: Path, unreadable: dict[Place, str]) -> Iterable[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        unreadable[folder] = str(error)
        return []
