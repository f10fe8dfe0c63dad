"""The checkpoints of one directory, as a resume sees them: which it takes, in which order, and which are never deleted.

The engine's resume and its retention ask this, and so do the commands: one answer. What a framework knows besides, such as
the tag that DeepSpeed's ``latest`` names, is said by judges, see ``safe_ckpt.layouts.judges``.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Literal

from safe_ckpt.core.formats.manifest import CheckpointInfo, Manifest, describe_unhealthy, read_manifest
from safe_ckpt.core.home.candidates import by_commit, stamp_of
from safe_ckpt.core.home.home import HIDDEN, Candidate
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.core.storage.presence import Stamp, inside, opened
from safe_ckpt.errors import HostileCheckpointError, SafeCheckpointError

logger = logging.getLogger(__name__)
TAKEN = "a resume takes it"
_LONGEST_NAME = 4096


@dataclass(frozen=True, kw_only=True)
class Note:
    """A judge's word on one candidate.

    Attributes:
        path: which one.
        says: ``"first"``: a resume takes it before all others. ``"by name"``: only where it is named. ``"keep"``: it is not
            deleted.
        why: in words.
    """

    path: Place
    says: Literal["first", "by name", "keep"]
    why: str


Judge = Callable[[Sequence[Candidate]], Iterable[Note]]
"""Looks at the candidates in which nothing is wrong, in the order of their commits. It may read small files."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The checkpoints that a resume takes from one directory.

    Attributes:
        order: what it tries, in this order, without being told a name.
        usable: these, and those that are taken only where they are named: marked ones in their places, others behind.
        by_name_only: of these, why they are.
        unusable: what it does not take at all, see ``Candidate.problem``.
        protected: what is not deleted, whatever the rules of retention say; and why.
    """

    order: tuple[Candidate, ...]
    usable: tuple[Candidate, ...]
    by_name_only: Mapping[Place, str]
    unusable: tuple[Candidate, ...]
    protected: Mapping[Place, str]

    def without(self, paths: Collection[Place]) -> Standing:
        """Return the standing as if these were not there: what a resume takes instead is protected then."""
        order = tuple(candidate for candidate in self.order if candidate.path not in paths)
        usable = tuple(candidate for candidate in self.usable if candidate.path not in paths)
        return replace(self, order=order, usable=usable, protected={**_heads_of(order), **self.protected})


def standing_of(candidates: Iterable[Candidate], judges: Sequence[Judge] = (), *, named: bool = False) -> Standing:
    """Ours by the order of their commits, then those of other tools by step; then what the judges say.

    Args:
        candidates: what there is, in no order.
        judges: say what a framework knows besides.
        named: the caller named these: none is passed over because it is marked.

    Raises:
        OSError: a judge could not read what it needs.
    """
    candidates = list(candidates)
    usable = by_commit(candidates)
    notes = [note for judge in judges for note in judge(usable)]
    first = {note.path for note in notes if note.says == "first"}
    behind = {note.path: note.why for note in notes if note.says == "by name"}
    marked = {
        c.path: f"it is unhealthy: {describe_unhealthy(c.manifest.health)}"
        for c in usable
        if not named and c.manifest is not None and c.manifest.marked and c.path not in first
    }
    by_name = {**behind, **marked}
    usable.sort(key=lambda candidate: (candidate.path not in first, candidate.path in behind))
    order = tuple(candidate for candidate in usable if candidate.path not in by_name)
    protected = {note.path: note.why for note in reversed(notes) if note.says == "keep"}
    return Standing(
        order=order,
        usable=tuple(usable),
        by_name_only=by_name,
        unusable=tuple(candidate for candidate in candidates if candidate.problem),
        protected={**_heads_of(order), **protected},
    )


def _heads_of(order: Iterable[Candidate]) -> dict[Place, str]:
    """Return what a resume takes. Jobs of several frameworks may save into one directory: each resumes from its own."""
    heads: dict[object, Place] = {}
    for candidate in order:
        adapter = None if candidate.manifest is None else candidate.manifest.notes.get("adapter", "")
        heads.setdefault((adapter, candidate.path.name.endswith(".ckpt")), candidate.path)
    return dict.fromkeys(heads.values(), TAKEN)


def passed_over(order: Sequence[Candidate], taken: Candidate) -> tuple[Place, str] | None:
    """The newest of another tool, as far as one is newer than ``taken``, which is ours and comes first all the same; and why.

    Args:
        order: see ``Standing``.
        taken: one of these.
    """
    behind = order[order.index(taken) + 1 :] if taken.manifest is not None else ()
    # Of the same run and tool. By the step, or the number in the name: clocks of hosts differ, so times say nothing.
    alike = (one for one in behind if one.path.parent == taken.path.parent and _style_of(one) == _style_of(taken))
    newer = next((one.path for one in alike if one.manifest is None and one.number > taken.number), None)
    if newer is None:
        return None
    why = f"is of a later step than {taken.path}, which is taken, and has no manifest: another tool saved it"
    return newer, f"{why}, or its copy is not whole. To go on from {newer} name it"


def _style_of(candidate: Candidate) -> str:
    """Return what a name is without its number: tools with other names may count something else."""
    name = PurePath(candidate.path.name)
    return name.suffix or name.name.rstrip("0123456789")


def newest_of(infos: Iterable[CheckpointInfo]) -> set[Place]:
    """Return what a resume takes of one job's commits: the newest that is not marked. Empty where there is none."""
    healthy = [info for info in infos if not info.marked]
    return {max(healthy, key=lambda info: info.sequence).path} if healthy else set()


def linked_in(folder: Path) -> dict[Path, str]:
    """Return the targets of links in a directory, within it, with the link's name: such as Lightning's ``last.ckpt``."""
    found, real = {}, Path(os.path.realpath(folder))
    with os.scandir(folder) as entries:
        for name in sorted(entry.name for entry in entries if entry.is_symlink()):
            target = Path(os.path.realpath(folder / name))
            if real in target.parents:
                found[folder / target.relative_to(real)] = name
    return found


class Catalog:
    """The committed checkpoints of one directory as rank 0 knows them: those that were listed, and every commit since.

    Args:
        candidates: what was listed; those without a manifest of ours do not count.
        pointers: files that name a checkpoint beside them, such as ``latest``; what they name is never deleted.

    Attributes:
        pointers: as given; more may be added.
    """

    def __init__(self, candidates: Iterable[Candidate] = (), pointers: Iterable[Path] = ()) -> None:
        self._committed: list[CheckpointInfo] = []
        self._leaving: list[CheckpointInfo] = []
        self._stamps: dict[str, Stamp] = {}
        self.pointers = list(pointers)
        for candidate in candidates:
            if (info := candidate.info) is not None:
                self._committed.append(info)
                self._stamps |= {info.op_id: candidate.stamp} if candidate.stamp is not None else {}

    @property
    def committed(self) -> list[CheckpointInfo]:
        """The committed checkpoints that are there."""
        return list(self._committed)

    def add(self, new: CheckpointInfo) -> Sequence[Place]:
        """``new`` was committed; those that are not there any more are forgotten. Returns the folders that it replaces."""
        others = (info for info in self._committed if info.path != new.path)
        self._committed = [*(info for info in others if not isinstance(info.path, Path) or info.path.exists()), new]
        replaced = [info.path for info in replaced_among(self._committed)]
        self.forget(replaced)
        return replaced

    def still_ours(self, new: CheckpointInfo) -> list[CheckpointInfo]:
        """List those that still have their names. Where names are held one by one, another job may have taken one since.

        A manifest is read again only when it is another file by now. In an object store a folder has one save in its life.
        """
        return [
            info
            for info in self._committed
            if info is new or not isinstance(info.path, Path) or self._has_its_name(info)
        ]

    def _has_its_name(self, info: CheckpointInfo) -> bool:
        stamp = stamp_of(info.file_path)
        if stamp is not None and self._stamps.get(info.op_id) == stamp:
            return True
        is_still = still_has_its_name(info)
        if is_still and stamp is not None:
            self._stamps[info.op_id] = stamp
        return is_still

    def named(self) -> set[Path]:
        """Return the paths that the pointers name now.

        Raises:
            OSError: one is there and cannot be read.
        """
        return {path for pointer in self.pointers if (path := named_by(pointer)) is not None}

    def forget(self, paths: Collection[Place]) -> None:
        """Note that these are about to be deleted."""
        self._leaving += [info for info in self._committed if info.path in paths]
        self._committed = [info for info in self._committed if info.path not in paths]

    def drop_deleted(self, gone: Collection[Place]) -> None:
        """Keep in mind what was about to be deleted and is not gone: retention chooses it again."""
        new = {info.path for info in self._committed}
        self._committed += [info for info in self._leaving if info.path not in gone and info.path not in new]
        self._leaving.clear()
        there = {info.op_id for info in self._committed}
        self._stamps = {op_id: stamp for op_id, stamp in self._stamps.items() if op_id in there}


def replaced_among(infos: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """List those in an object store that a later save of the same step has replaced: each save has a folder of its own there.

    Also by a job that died before it could delete them. A folder under another name is the user's copy, and a marked one does
    not replace a healthy one.
    """
    ours = [info for info in infos if isinstance(info.path, ObjectPath) and is_under_its_name(info)]
    newest = {(info.name, info.marked): info for info in sorted(ours, key=lambda info: info.sequence)}
    return [info for info in ours if info is not newest[info.name, info.marked]]


def is_under_its_name(info: CheckpointInfo) -> bool:
    """Whether it has the name that it was saved under; in an object store an id follows."""
    if isinstance(info.path, ObjectPath):
        return info.path.name.rpartition(".")[0] == info.name
    return info.path.name == info.name


def is_of(info: CheckpointInfo, manifest: Manifest) -> bool:
    """Whether ``manifest`` is that of the checkpoint ``info``, and not of another one under the same name."""
    return (manifest.op_id, manifest.sequence) == (info.op_id, info.sequence)


def still_has_its_name(info: CheckpointInfo) -> bool:
    """Whether the checkpoint of that name is still this one. False where its manifest cannot be read."""
    try:
        return is_of(info, read_manifest(info.path))
    except (SafeCheckpointError, OSError) as error:
        logger.warning("%s is not deleted, because its manifest cannot be checked: %s", info.path, error)
        return False


def named_by(pointer: Path) -> Path | None:
    """Return the path that a file such as DeepSpeed's ``latest`` names in its directory, or below it; None for nothing there.

    Any file may have this name: a pipe, a long one, a link to itself. They name nothing.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        with opened(pointer, os.O_RDONLY | os.O_NONBLOCK) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _LONGEST_NAME:
                return None
            name = os.read(fd, _LONGEST_NAME).decode("utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            return None
        raise
    try:
        named = inside(pointer.parent, name)
    except HostileCheckpointError:  # what leads out is none of the checkpoints here
        return None
    return None if {HIDDEN, pointer.name} & set(named.relative_to(pointer.parent).parts) else named
