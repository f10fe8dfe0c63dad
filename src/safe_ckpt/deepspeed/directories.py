"""DeepSpeed's directories of tags: how they are held and listed, and which tag to load."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safe_ckpt.adapters.extras import (
    HIDDEN,
    MANIFEST_NAME,
    NAMES,
    Candidate,
    named_by,
    policy_of,
    presence,
    refuse,
    standing_of,
)
from safe_ckpt.adapters.saver import OpenHome, Saver, candidates_in
from safe_ckpt.config import CheckpointConfig
from safe_ckpt.errors import DirectoryError, DirectoryInUseError
from safe_ckpt.events import Hook
from safe_ckpt.layouts.judges import tags
from safe_ckpt.layouts.table import LATEST, has_states

if TYPE_CHECKING:
    from safe_ckpt.deepspeed.data_place import EngineDataPlace

logger = logging.getLogger(__name__)

ADAPTER = "deepspeed"
OFFLOADED = "offloaded_tensors"
_HELD = 8
_OWNER = "a DeepSpeed engine that install() took; its destroy(), or handle.remove(), frees it"


class TagSaver(Saver):
    """Saves for one engine. Each directory of tags is taken at its first save, and the last ones are kept.

    Args:
        owner: DeepSpeed's engine.
        config: settings.
        hooks: called with what happens.

    Attributes:
        owner: as given.
        data_place: of the engine's own loader; None where it is not saved.
        retention: decides which tags are deleted after a commit, never one that a ``latest`` names; None deletes none.
    """

    def __init__(self, owner: Any, config: CheckpointConfig, hooks: Iterable[Hook]) -> None:
        super().__init__(config, ADAPTER, find=candidates, owner=_OWNER, hooks=hooks)
        self.owner = owner
        self.data_place: EngineDataPlace | None = None
        self.retention = policy_of(config.retention)

    def hold(self, top: Path, tag: str) -> OpenHome:
        """Take the directory in which ``tag`` lies: ``top``, or one below it. Another engine of this process gives it back.

        Raises:
            DirectoryError: it cannot be used.
            DirectoryInUseError: a live job holds it.
        """
        folder = (top / tag).parent
        if folder not in self.homes:
            while len(self.homes) >= max(_HELD, self.config.max_in_flight + 1):
                self.release(next(iter(self.homes)))  # what is in flight goes to those used last
            for other in self.living():
                other.release(folder)
        home = self.home(folder)
        pointers = home.catalog.pointers
        pointers += [above / LATEST for above in (folder, top) if above / LATEST not in pointers]
        return home

    def repair(self, folder: Path) -> None:
        """Finish a replacement in ``folder`` that a dead job began, unless a live job holds it."""
        # Rank 0 decides for all: the interpreter collects an engine that nobody closed at different times on the ranks.
        if self.engine.agree(
            "repair",
            must_match={"directory": folder},
            decide=lambda _: any(folder in one.homes for one in self.living()),
        ):
            return
        try:
            home = self.engine.hold(folder)
        except DirectoryInUseError as error:
            logger.warning("%s", error)
            return
        self.engine.release(home)

    def fetch_tag(self, top: Path, tag: str | None) -> None:
        """Bring the newest tag of the mirror into ``top``, or ``tag`` if it is not there, unless a live job holds it."""
        path = top / (tag or "latest")
        if tag is not None and self.is_directory(path, "fetch"):
            return
        try:
            home = self.hold(top, path.relative_to(top).as_posix())
        except DirectoryInUseError as error:
            logger.warning("%s", error)
            return
        self.fetch(home, None if tag is None else path.name)

    @classmethod
    def wait_until_over(cls) -> None:
        """Wait until no save is in flight in this process: saves of other engines here must be visible."""
        for one in cls.living():
            one.engine.wait_until_over()

    @classmethod
    def wait_above(cls, path: Path) -> None:
        """Wait for saves in this process that may become a folder above ``path``: they must be visible there."""
        for one in cls.living():
            if any(folder != path.parent and folder in path.parents for folder in one.homes):
                one.engine.wait_until_over()


def candidates(folder: Path) -> list[Candidate]:
    """The tags in ``folder`` that this package wrote, in no order; those whose manifest is damaged are left out."""
    listed = candidates_in(folder, ADAPTER) if presence.is_directory(folder) else []
    return [c for c in listed if c.manifest is not None]


def latest_tag(folder: Path) -> str | None:
    """The tag that the file ``latest`` names; None without such a file, or if it names no tag.

    Raises:
        OSError: it is there and cannot be read.
    """
    named = named_by(folder / LATEST)
    if named is not None:
        return named.relative_to(folder).as_posix()
    if presence.is_there(folder / LATEST):
        logger.warning("%s names no directory beside it", folder / LATEST)
    return None


def refuse_what_stands_there(top: Path, tag: str) -> None:
    """Refuse to replace anything but a tag. A tag is replaced with all of its content, so no other tag may lie in it.

    Raises:
        DirectoryError: something else is there, or the tag would lie in another one.
    """
    path = top / tag
    for above in path.parents:
        if above == top:
            break
        if presence.is_there(above / MANIFEST_NAME) or has_states(above):
            raise DirectoryError(
                path=str(above), message=f"is a tag itself, so {tag!r} cannot lie in it: give another tag", rank=0
            )
    _refuse_tags_within(path)
    if not has_states(path):
        refuse(path, ADAPTER, empty=True)


def _refuse_tags_within(path: Path) -> None:
    def fail(error: OSError) -> None:
        raise DirectoryError.of(error, path=error.filename or path, rank=0, phase="save_checkpoint") from error

    for folder, below, names in os.walk(path, onerror=fail) if presence.is_directory(path) else ():
        # Weights alone that were saved into a tag leave a folder of names, which may be deleted.
        kept = HIDDEN in below and any(name != NAMES for name in os.listdir(os.path.join(folder, HIDDEN)))
        tag = folder != str(path) and any(name == MANIFEST_NAME or name.endswith("_states.pt") for name in names)
        if kept or tag:
            message = f"checkpoints are kept in it, at {folder}: give another name, or move them away"
            raise DirectoryError(path=str(path), message=message, rank=0)
        own = {HIDDEN, OFFLOADED} if folder == str(path) else {HIDDEN}
        below[:] = [name for name in below if name not in own]


def is_state(name: str) -> bool:
    """Whether DeepSpeed wrote this file of a tag: it is deleted when the tag is replaced."""
    return name.endswith("_states.pt") or name.split("/", 1)[0] == OFFLOADED


def order(folder: Path, tag: str | None) -> list[Path]:
    """The tags to try, in this order: the one that is asked for, or that ``latest`` names and then those before it.

    Without ``latest`` the newest tag that was saved with ``save_latest`` comes first, also one like ``"warmup/step10"``. Tags
    saved with ``save_latest=False`` are loaded only by name.
    """
    if tag is not None:
        return [folder / tag]
    named = latest_tag(folder)
    places = {folder, *((folder / named).parents[:1] if named is not None else _folders_below(folder))}
    found = [candidate for place in sorted(places) for candidate in candidates(place)]
    paths = [candidate.file_path for candidate in standing_of(found, [functools.partial(tags, folder)]).order]
    if named is None or not presence.is_directory(folder / named):
        if named is not None:
            logger.warning("%s names %s, which is not there: the newest tag is taken", folder / LATEST, named)
        return paths
    return list(dict.fromkeys([folder / named, *paths]))  # also one that is damaged, or another tool's


def _folders_below(top: Path) -> list[Path]:
    """List the folders in which tags lie for themselves."""
    found = []
    for folder in sorted(top.iterdir()) if presence.is_directory(top) else ():
        try:
            if folder.name != HIDDEN and not folder.is_symlink() and presence.is_there(folder / HIDDEN):
                found.append(folder)
        except PermissionError as error:
            logger.warning("%s is passed over, with all that may be in it: %s", folder, error)
    return found
