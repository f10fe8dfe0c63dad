"""The home, the candidate and the kind of a place: the one module that asks whether it is a folder or lies in a store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from safe_ckpt.core.formats.manifest import MANIFEST_NAME
from safe_ckpt.core.home.home import Candidate, Home
from safe_ckpt.core.storage import presence
from safe_ckpt.core.storage.objects.place import Place


def home_at(
    place: Place,
    *,
    lease_s: float,
    owner: str = "",
    hidden: Path | None = None,
    unfenced: bool = False,
    answer_s: float | None = None,
) -> Home:
    """The home at a place. Nothing is done there yet.

    Args:
        place: the directory.
        lease_s: see ``CheckpointConfig``.
        owner: what holds it within this process and how to free it, for messages.
        hidden: in a file system the hidden folder, if it is not to lie in ``place``.
        unfenced: see ``StorageConfig``.
        answer_s: how long a request to a store is tried again, see ``Home.persist``; None for as the place says.
    """
    from safe_ckpt.core.home.file_home import FileHome
    from safe_ckpt.core.home.objects.home import ObjectHome

    if isinstance(place, Path):
        return FileHome(place, lease_s=lease_s, hidden=hidden, owner=owner)
    if answer_s is not None:
        place = place.within(answer_s)
    return ObjectHome(place, lease_s=lease_s, owner=owner, unfenced=unfenced)


def with_deadline(place: Place, seconds: float, stop: Callable[[], None] | None = None) -> Place:
    """The same place, with another deadline for each request to a store, see ``ObjectPath.within``. A file system has none."""
    return place if isinstance(place, Path) else place.within(seconds, stop)


def is_one(place: Place) -> bool:
    """Whether a place is one checkpoint, and not a directory of them: it has a manifest, whatever that says, or is a file.

    Raises:
        OSError: it cannot be looked at, or the store gave no answer.
    """
    if isinstance(place, Path):
        return not presence.is_directory(place) or presence.is_there(place / MANIFEST_NAME)
    from safe_ckpt.core.home.objects.head import has_manifest

    return has_manifest(place)


def candidate_at(place: Place) -> Candidate | None:
    """One checkpoint, see ``is_one``; None where it is not there any more, or another tool's folder in a store.

    Raises:
        OSError: it cannot be looked at, or the store gave no answer.
        UnsupportedFormatError: it is of a newer format version.
    """
    if isinstance(place, Path):
        from safe_ckpt.core.home.candidates import look_at

        return look_at(place)
    from safe_ckpt.core.home.objects.head import object_candidate

    return object_candidate(place)


def everything_in(place: Place) -> list[Candidate]:
    """Every checkpoint of ours in a directory, in no order: weights alone, too, which ``Home.look`` leaves out of a folder's.

    Raises:
        OSError: it could not be listed. A directory that is not there has none.
        UnsupportedFormatError: one is of a newer format version.
    """
    if isinstance(place, Path):
        from safe_ckpt.core.home.candidates import look_at

        folders = [one for one in presence.entries_in(place) if one.is_dir() and not one.is_symlink()]
        return [look_at(one) for one in folders if presence.is_there(one / MANIFEST_NAME)]
    from safe_ckpt.core.home.objects.head import list_objects

    return list_objects(place)


def checkpoint_is_gone(place: Place) -> bool:
    """Whether a checkpoint that was there is not any more.

    Raises:
        OSError: it cannot be looked at, or the store gave no answer.
    """
    return not (os.path.lexists(place) if isinstance(place, Path) else is_one(place))
