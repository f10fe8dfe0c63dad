"""The checkpoints of a directory in an object store: usable, damaged, uncommitted and quarantined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from safe_ckpt.core.home.home import Candidate
from safe_ckpt.core.home.object_head import Head, folders_of, in_parallel, list_objects, read_head
from safe_ckpt.core.home.standing import Standing, standing_of
from safe_ckpt.core.storage.objects.place import ObjectPath
from safe_ckpt.errors import UnsupportedFormatError
from safe_ckpt.text import listed
from safe_ckpt.tools.inspection.listing import FOUND_DAMAGED, NOT_COMMITTED, Row, row_of
from safe_ckpt.tools.inspection.objects.reach import is_checkpoint

_UNKNOWN = f"{NOT_COMMITTED}, and no job says that it is its own"


@dataclass(frozen=True, kw_only=True)
class ObjectListing:
    """The checkpoints of a directory in an object store.

    Attributes:
        folder: the directory.
        head: what its head says; None where there is none, or none that can be read.
        standing: what a resume takes of them.
        usable: those in which nothing is wrong so far: in the order in which a resume tries them, then those that it takes only
            where they are named.
        unusable: those that a resume would not take, and why (``problem``).
        unreadable: what could not be read, and why. A resume stops with that error.
        under_way: folders without a manifest that the head names: of a job that saves now, or left by one that was killed.
        unknown: folders without a manifest that the head does not name.
        quarantined: what was found damaged.
    """

    folder: ObjectPath
    head: Head | None
    standing: Standing
    usable: tuple[Candidate, ...]
    unusable: tuple[Candidate, ...]
    unreadable: Mapping[ObjectPath, str]
    under_way: tuple[ObjectPath, ...]
    unknown: tuple[ObjectPath, ...]
    quarantined: tuple[ObjectPath, ...]


def read_objects(folder: ObjectPath) -> ObjectListing:
    """Read names and manifests, and no payload.

    Raises:
        OSError: it could not be listed.
    """
    unreadable: dict[ObjectPath, str] = {}
    # The head last: what a job announces meanwhile must not look like something that no job knows.
    candidates = list_objects(folder, lambda path, error: unreadable.update({path: str(error)}))
    seen = {candidate.path for candidate in candidates} | unreadable.keys()
    there = folders_of(folder)
    head = read_head(folder)
    facts = head or Head()
    aside = [folder / name for name in sorted(facts.quarantined)]
    hidden = {*facts.trash, *facts.quarantined}
    left = [path for path in there if path not in seen and path.name not in hidden]
    bare = [path for path, is_bare in zip(left, in_parallel(_is_bare, left), strict=True) if is_bare]
    standing = standing_of(candidates)
    return ObjectListing(
        folder=folder,
        head=head,
        standing=standing,
        usable=standing.usable,
        unusable=standing.unusable,
        unreadable=unreadable,
        under_way=tuple(path for path in bare if path.name in facts.pending),
        unknown=tuple(path for path in bare if path.name not in facts.pending),
        quarantined=tuple(path for path in aside if path in there or is_checkpoint(path)),
    )


def object_rows(listing: ObjectListing) -> Iterator[Row]:
    """The lines of a listing: usable checkpoints in the order in which a resume tries them, then the others."""
    for candidate in listing.usable:
        row = row_of(candidate.path.name, candidate, "valid")
        yield replace(row, reason=row.reason or listing.standing.by_name_only.get(candidate.path, ""))
    for candidate in listing.unusable:
        yield row_of(candidate.path.name, candidate, "damaged")
    for path, why in listing.unreadable.items():
        yield Row(name=path.name, state="unreadable", reason=why)
    for path in listing.under_way:
        yield Row(name=path.name, state="partial", reason=NOT_COMMITTED)
    for path in listing.unknown:
        yield Row(name=path.name, state="partial", reason=_UNKNOWN)
    for path in listing.quarantined:
        yield Row(name=path.name, state="quarantined", reason=FOUND_DAMAGED)


def one_of(place: ObjectPath) -> ObjectPath:
    """The place, unless it is a directory in which several checkpoints are kept.

    Raises:
        UnsupportedFormatError: it is, or nothing is there.
        OSError: the store gave no answer, or refuses.
    """
    if is_checkpoint(place):
        return place
    listing = read_objects(place)
    names = [candidate.path.name for candidate in (*listing.usable, *listing.unusable)]
    advice = f"name one of them: {listed(names)}" if names else "there is none in it"
    raise UnsupportedFormatError(
        path=str(place), message=f"is a directory for checkpoints, and no checkpoint; {advice}"
    )


def _is_bare(folder: ObjectPath) -> bool:
    # With a manifest it is what a later job has buried, committed since it was listed, or deleted meanwhile.
    return not is_checkpoint(folder)
