"""A directory that a job holds: its hidden folder, its lock, what to clean up at the start, and how things leave it.

``.safe_ckpt/`` lies in it, or beside it where a framework lists the directory; always on the same file system. It holds
``pending`` (saves in flight), ``trash`` (checkpoints that are being deleted, so that a half-deleted one is never resumed from),
``quarantine`` (corrupt checkpoints, kept for inspection), the lock and ``events.jsonl``. Used on rank 0 only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from safe_ckpt.config import Timeouts
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, CheckpointInfo, FileEntry, Manifest, read_manifest
from safe_ckpt.core.formats.verify import is_marked, refuse_unreadable, verify_files
from safe_ckpt.core.home import extra_files
from safe_ckpt.core.home.candidates import list_directories
from safe_ckpt.core.home.file_lock import JobLock
from safe_ckpt.core.home.home import HIDDEN, PINS, Candidate, HeldHome, NewCheckpoint, OnError
from safe_ckpt.core.home.visibility import Patience, await_visible
from safe_ckpt.core.storage import durable
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.presence import entries_in
from safe_ckpt.core.storage.source import in_files
from safe_ckpt.errors import (
    CommitOutcomeUnknown,
    CorruptCheckpointError,
    DirectoryError,
    DirectoryInUseError,
    DirectoryNotSharedError,
    SafeCheckpointError,
    SaveError,
    UnsupportedFormatError,
    naming,
)

if TYPE_CHECKING:
    from safe_ckpt.core.home.pins.observer import PinWatch

logger = logging.getLogger(__name__)

_VISIBLE_S = 60.0
_UNHEALTHY = "unhealthy-"  # in front: Lightning takes what begins with "last" for the last one
_MOVING = ".moving-"
_ATTEMPTS = 10


class FileHome(HeldHome[Path]):
    """See ``Home``. One directory of checkpoints, held by this job from ``open`` to ``close``.

    Args:
        path: the directory; created when missing.
        lease_s: see ``CheckpointConfig``.
        hidden: the hidden folder, if it is not to lie in ``path``.
        owner: what holds it within this process and how to free it, for messages.
        swept: where what is deleted goes instead; None to delete it.

    Attributes:
        path: see ``Home``.
        hidden: see ``Home``.
    """

    is_mounted: ClassVar[bool] = True
    unsupported: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self, path: Path, *, lease_s: float, hidden: Path | None = None, owner: str = "", swept: Path | None = None
    ) -> None:
        super().__init__()
        self.path = path
        self.hidden = hidden or path / HIDDEN
        self.pending = self.hidden / "pending"
        self._formerly = self.hidden / "staging"
        self._kept_formerly = self.hidden / "kept"
        self.trash = self.hidden / "trash"
        self._quarantine = self.hidden / "quarantine"
        self._lock = JobLock(self.hidden, subject=path, lease_s=lease_s, owner=owner)
        self._swept = swept
        self._made: list[Path] = []
        self._pins: PinWatch | None = None

    @property
    def is_single_name(self) -> bool:
        """See ``Home``."""
        return self.hidden.parent.parent.name == HIDDEN

    def begin(self, new: NewCheckpoint, timeouts: Timeouts) -> FilePublication:
        """See ``Home``."""
        return FilePublication(new, self, in_files(new.path), timeouts)

    def open(self, patience_s: float | None = None) -> None:
        """Create the directory, take the lock, repair and sweep what an earlier job left.

        Args:
            patience_s: how long to wait for a holder that cannot be asked; None for as long as its lease says.

        Raises:
            DirectoryError: it cannot be created or written to, or a folder in it is a link that leads elsewhere.
            DirectoryInUseError: a live job holds it.
        """
        creating = "creating the checkpoint directory"
        with naming(rank=0, phase=creating, path=self.path):
            self._refuse_links()
            self._made = []
        for attempts in range(_ATTEMPTS, 0, -1):
            try:
                with naming(rank=0, phase=creating, path=self.path):
                    beside = self.path not in self.hidden.parents
                    for folder in (self.path, self.hidden) if beside else (self.hidden,):
                        self._made = [*durable.make_directory(folder), *self._made]
                    self._lock.acquire(patience_s)
                break
            except DirectoryError as error:
                # A job that ends at this moment removes its empty folders; ``mkdir`` raises EEXIST for one that is just gone.
                if error.errno not in (errno.ENOENT, errno.EEXIST) or attempts == 1:
                    raise
        try:
            with naming(rank=0, phase="cleaning up after an earlier job", path=self.path):
                self.pending.mkdir(exist_ok=True)  # here, because no job that ends now takes it away any more
                self._take_former()
                self._repair()
                self._sweep()
        except BaseException:
            self._lock.release()
            raise

    def persist(self, seconds: float) -> None:
        """See ``Home``. A file system tries by itself."""

    def close(self) -> None:
        """Give the directory back, and take away what was made here and is empty."""
        if not self._lock.is_held:
            return
        if self._lock.is_seen:  # else the folders are another job's by now
            _remove_empty([self.pending, self.trash, self._quarantine])
        self._lock.release()
        # A job that starts at this moment creates them again. Folders that somebody else made stay, also empty ones.
        _remove_empty([self.hidden, *self._made])

    def confirm(self) -> None:
        """Raise ``DirectoryInUseError`` if another job has taken the directory over.

        A job can be stopped right behind this. What it does then fails: the job that took over has renamed its pending
        saves and its trash away before it does anything else.
        """
        self._lock.confirm()

    def make_pending(self, op_id: str) -> Path:
        """Create and return the directory in which one save is built."""
        folder = self.pending / op_id
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def make_prefilled(self, key: str) -> None:
        """Create the folder for files of a save that others write before it begins; see ``open_folder``."""
        extra_files.prefilled(self.make_pending(key)).mkdir()

    def aside(self, op_id: str, path: Path) -> Path:
        """Where what stands at ``path`` goes when the save ``op_id`` replaces it by another directory.

        Called before ``confirm``: made later, it would let a job that was taken over move the other one's files. For a path
        outside, to which ``open`` would not bring it back, that is beside it.
        """
        if self.path not in path.parents:
            return path.with_name(f".{path.name}.{op_id}.old")
        folder = self.trash / op_id
        folder.mkdir(parents=True, exist_ok=True)
        # The path as one name, from which it can be told again. Nothing else in it changes: a name has at most 255 bytes.
        return folder / path.relative_to(self.path).as_posix().replace("%", "%25").replace("/", "%2F")

    def _home_of(self, name: str) -> Path:
        """Where something of this name in the trash has its place: see ``aside``."""
        home = self.path / name.replace("%2F", "/").replace("%25", "%")
        return home if self.path in Path(os.path.normpath(home)).parents else self.path / name

    def drop_pending(self, op_id: str) -> None:
        """Remove the directory of a save that is over, and what it replaced. Never raises.

        What was moved aside stays when nothing stands in its place: the next start brings it back.
        """
        aside = self.trash / op_id
        try:
            replaced = entries_in(aside)
            unreplaced = [left for left in replaced if not os.path.lexists(self._home_of(left.name))]
            if unreplaced:
                logger.error("%s was moved aside and not replaced: the next start brings it back", aside)
                return
            self._delete(self.pending / op_id)
            if replaced:
                # What was set aside is told from what is being deleted by the folder of its save, see ``_repair``: that must be
                # gone for good before the first file of the old one is. The disk keeps no order by itself.
                durable.sync_directory(str(self.pending))
        except OSError as error:
            logger.warning("%s stays in the hidden folder: %s", aside, error)
            return
        self._delete(aside)

    def abandon(self, prefilled: Path | None) -> None:
        """Remove a folder that was made for hooks, see ``open_folder``. Never raises."""
        if prefilled is not None:
            self.drop_pending(prefilled.parent.name)

    def _sweep_away(self, path: Path) -> None:
        """Delete what a job left. It may still live: one rename takes it out of its reach, so it can never commit a half."""
        target = self.trash / f"{uuid.uuid4().hex}-{path.name}"
        self.trash.mkdir(exist_ok=True)
        self.confirm()  # this job itself may have been stopped since it took the lock
        try:
            os.rename(path, target)
        except FileNotFoundError:
            return  # that job has committed it, or deleted it itself
        self._delete(target)

    def pinned(self, places: Sequence[Place]) -> Mapping[Place, str]:
        """See ``Home``. A reader whose pin is silent for its time holds nothing any more."""
        pins = self._observed() if places else None
        return {} if pins is None else pins.kept(places)

    def _observed(self) -> PinWatch | None:
        """The pins of readers; None where there are none, as one look at the hidden folder says."""
        top = self.hidden.parents[1] if self.is_single_name else self.hidden
        if self._pins is None and not entries_in(top / PINS):
            return None
        if self._pins is None:  # imported here: most runs have no readers
            from safe_ckpt.core.home.pins.observer import PinWatch
            from safe_ckpt.core.home.pins.shelf import FileShelf

            self._pins = PinWatch(FileShelf(self.hidden))
        return self._pins

    def _refuse_held(self, path: Path) -> None:
        if (pins := self._observed()) is not None and (why := pins.held([path])):
            raise OSError(errno.EBUSY, why[path], str(path))

    def discard(self, places: Iterable[Place]) -> list[Path]:
        """See ``Home``. Directories go by way of the trash."""
        return self._discard_each(map(in_files, places), self._discard)

    def _discard(self, path: Path) -> None:
        whole = path.is_symlink() or not path.is_dir()
        bin_ = self.trash / uuid.uuid4().hex
        try:
            bin_.mkdir(parents=True)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not whole:
                raise
            self._refuse_held(path)
            self.confirm()
            path.unlink()  # on a full disk no folder can be made, and space must be freed
            return
        try:
            # Behind the making, as in ``aside``; and a reader that finds an empty folder there waits for what comes of it.
            self._refuse_held(path)
            self.confirm()
            os.rename(path, bin_ / path.name)
            self._bring_back_if_held(bin_ / path.name, path)
        except OSError as error:
            if error.errno != errno.EXDEV or not whole:
                raise
            path.unlink()  # in one step, wherever it lies
        finally:
            self._delete(bin_)

    def _bring_back_if_held(self, aside: Path, path: Path) -> None:
        """Look at the pins again: on a network file system the first look may have been at an old state."""
        try:
            self._refuse_held(path)
        except OSError:
            if not os.path.lexists(path):
                self.confirm()
                os.rename(aside, path)
            raise

    def look(self, on_error: OnError | None = None) -> list[Candidate]:
        """See ``Home``."""
        return list_directories(self.path, on_error=on_error)

    def name_of(self, place: Place) -> str:
        """See ``Home``."""
        return in_files(place).relative_to(self.path).as_posix()

    def quarantine(self, place: Place) -> Path:
        """See ``Home``."""
        path = in_files(place)
        # By way of a folder that a job that takes over moves away, as in ``aside``.
        moving = self._quarantine / f"{_MOVING}{uuid.uuid4().hex}"
        durable.make_directory(moving)
        try:
            self.confirm()
            os.rename(path, moving / path.name)
        except BaseException:
            moving.rmdir()
            raise
        return self._into_quarantine(moving)

    def _into_quarantine(self, moving: Path) -> Path:
        target = moving
        for path in list(moving.iterdir()):
            target = self._quarantine / path.name
            if os.path.lexists(target):
                target = self._quarantine / f"{path.name}.{uuid.uuid4().hex[:8]}"
            os.rename(path, target)
        moving.rmdir()
        return target

    def quarantined(self) -> list[Path]:
        """See ``Home``."""
        return sorted(path for path in entries_in(self._quarantine) if not path.name.startswith(_MOVING))

    def _refuse_links(self) -> None:
        above = [folder for folder in self.hidden.parents if self.path in folder.parents]
        swept = (self.pending, self._formerly, self._kept_formerly, self.trash, self._quarantine)
        for folder in (*above, self.hidden, *swept):
            if folder.is_symlink():
                message = "is a link, and what is behind it would be deleted: put the folder itself there"
                raise DirectoryError(path=str(folder), message=message)

    def _take_former(self) -> None:
        """Take what an earlier version left under the former name of ``pending``: it is repaired and swept like the rest."""
        for left in entries_in(self._formerly):
            self.confirm()
            if os.path.lexists(self.pending / left.name):  # the user has merged two trees
                self._sweep_away(left)
                continue
            with contextlib.suppress(FileNotFoundError):  # NFS answers so where a rename was sent twice
                os.rename(left, self.pending / left.name)
        _remove_empty([self._formerly])

    def _repair(self) -> None:
        # A crash while a directory was being replaced without an exchange: the old one is in the trash and the final
        # name is free. A complete new one goes forward, else the old one comes back; only then is anything swept.
        for folder in entries_in(self.trash):
            interrupted = all(path.is_dir() and not path.is_symlink() for path in (folder, self.pending / folder.name))
            for old in list(folder.iterdir()) if interrupted else []:
                home = self._home_of(old.name)
                if os.path.lexists(home):
                    continue
                new = self.pending / folder.name / home.name
                if not entries_in(new.parent) and not _is_complete(old):
                    continue  # not set aside, half deleted: an earlier version left it to the disk what was gone first
                chosen = new if _is_complete(new) else old
                durable.make_directory(home.parent)
                self.confirm()
                logger.warning("%s: finished an interrupted replacement with %s", home, chosen)
                durable.publish_directory(chosen, home, self.trash / folder.name / "unused")

    def _sweep(self) -> None:
        for moving in self._quarantine.glob(f"{_MOVING}*"):
            self.confirm()
            if moving.is_symlink() or not moving.is_dir():  # not ours: what is behind a link is not to be moved
                self._sweep_away(moving)
                continue
            away = self._quarantine / f"{_MOVING}{uuid.uuid4().hex}"  # out of reach of the job that made it
            os.rename(moving, away)
            self._into_quarantine(away)
        self._delete(self.hidden / HIDDEN)  # what a job that was killed on its way in left for the others to look for
        for folder in (self.pending, self.trash, self._kept_formerly):
            lefts = entries_in(folder)
            if lefts and folder == self.trash:
                durable.sync_directory(str(self.pending))  # as in ``drop_pending``
            for left in lefts:
                if folder == self.pending and left.is_dir() and not left.is_symlink():
                    # It may have had its name, and that it was taken back may not be durable: as in ``durable._undone_by``.
                    durable.sync_directory(str(left))
                logger.info("removing what an earlier job left: %s", left)
                self._sweep_away(left)
        _remove_empty([self._kept_formerly])

    def _delete(self, path: Path) -> None:
        try:
            if self._swept is None:
                durable.remove_tree(path)
            elif os.path.lexists(path):
                os.rename(path, self._swept / uuid.uuid4().hex)
        except OSError as error:
            logger.warning("%s could not be deleted and stays in the hidden folder: %s", path, error)


class FilePublication:
    """See ``Publication``: built in ``pending``, durable, then renamed.

    Args:
        new: what is to become a checkpoint.
        home: the directory that is held.
        path: the final name.
        timeouts: how long to wait.
    """

    def __init__(self, new: NewCheckpoint, home: FileHome, path: Path, timeouts: Timeouts) -> None:
        self._new = new
        self._home = home
        self._final = path
        self._timeouts = timeouts
        self._op_id = new.attempt
        self._own = home.pending / self._op_id
        self._pending = self._own / path.name

    @property
    def folder(self) -> Path:
        """See ``Publication``."""
        return self._pending if self._new.kind == "directory" else self._own

    @property
    def folders(self) -> list[str]:
        """See ``Publication``. The innermost first."""
        return [*(str(self.folder / name) for name in self._new.folders), str(self.folder)]

    def prepare(self) -> None:
        """See ``Publication``."""
        new = self._new
        why = "Earlier checkpoints are deleted only after the new one is committed, so both must fit."
        durable.require_space(self._home.path, new.needed_bytes, why)
        if new.kind == "directory":
            self._refuse_another_door()
        self._home.make_pending(self._op_id)
        if new.kind == "directory":
            if new.additions.prefilled is not None:
                os.rename(new.additions.prefilled, self._pending)
                new.additions.prefilled.parent.rmdir()
            else:
                self._pending.mkdir()
            for name in new.folders:
                (self._pending / name).mkdir(exist_ok=True)  # a hook may have made it
            durable.sync_directory(str(self._own))

    def await_folder(self, rank: int, left_s: Callable[[], float]) -> None:
        """See ``Publication``."""
        if not all(await_visible(Path(folder), min(_VISIBLE_S, left_s())) for folder in self.folders):
            raise DirectoryNotSharedError(path=str(self._home.path), rank=rank, ranks=(rank,))

    def commit(
        self, entries: Sequence[FileEntry], sections: Mapping[str, Any], check_still_wanted: Callable[[], None]
    ) -> CheckpointInfo:
        """See ``Publication``. A single file without entries: names are only given to, or taken from, what is there already."""
        self._check_written(entries, check_still_wanted)
        return self._publish(*self._seal(entries, sections))

    def _seal(self, entries: Sequence[FileEntry], sections: Mapping[str, Any]) -> tuple[Manifest, Sequence[FileEntry]]:
        """Complete what is to get its name: the manifest is durable behind this."""
        new = self._new
        manifest = dataclasses.replace(new.manifest, **sections)
        if manifest.marked and os.path.lexists(self._final) and not is_marked(self._final):
            self._final = self._final.with_name(f"{_UNHEALTHY}{self._final.name}")
            manifest = dataclasses.replace(manifest, name=self._final.name)
        if new.kind == "directory":
            if new.additions.stamps is not None:
                extra_files.refuse_changed(self._pending, new.additions.stamps, name=self._final.name)
            elif new.additions.prefilled is not None:
                entries = (*entries, *extra_files.adopt(self._pending, {entry.path for entry in entries}))
            if new.additions.keep_foreign is not None:
                extra_files.keep_foreign(self._final, self._pending, new.additions.keep_foreign)
            manifest = dataclasses.replace(manifest, files=tuple(entries))
            durable.write_durably(self._pending / MANIFEST_NAME, manifest.to_bytes())
        elif entries:
            refuse_unreadable(self._pending)
        return manifest, entries

    def seal_as(self, manifest: Manifest, keep_foreign: Callable[[str], bool] | None) -> None:
        """Complete a part of what another host commits: all of it is durable behind this, but for its name."""
        self._final = self._final.with_name(manifest.name)
        if keep_foreign is not None:
            extra_files.keep_foreign(self._final, self._pending, keep_foreign)
        durable.write_durably(self._pending / MANIFEST_NAME, manifest.to_bytes())
        for folder in (*self.folders, str(self._own)):
            durable.sync_directory(folder)

    def give_name(self) -> None:
        """Behind ``seal_as``: it is committed there."""
        self._give_final_name()

    def check_written(self, entries: Sequence[FileEntry]) -> None:
        """Raise ``SaveError`` where a file that was reported is not there, or has another size."""
        self._check_written(entries, lambda: None)

    def _publish(self, manifest: Manifest, entries: Sequence[FileEntry]) -> CheckpointInfo:
        """Give it its name, and what it gets besides."""
        if self._new.kind == "directory" or entries:
            self._give_final_name()
        self._link(marked=manifest.marked)
        self._point(marked=manifest.marked)
        return CheckpointInfo.of(manifest, self._final, sum(entry.size_bytes for entry in entries))

    def abort(self) -> None:
        """See ``Publication``."""
        self._home.drop_pending(self._op_id)
        self._home.abandon(self._new.additions.prefilled)

    def clean_up(self) -> None:
        """See ``Publication``."""
        self._home.drop_pending(self._op_id)

    def explain(self, error: BaseException, *, rank: int, phase: str) -> SafeCheckpointError | None:
        """See ``Publication``."""
        if rank == 0 and (taken := self._taken_over(error)) is not None:
            return taken
        if not isinstance(error, OSError) or isinstance(error, SafeCheckpointError):
            return None
        name = self._final.name
        if isinstance(error, durable.HalfCommittedError):
            cause = f"the disk did not confirm whether it has its name: {error}"
            return CommitOutcomeUnknown(name=name, cause=cause, rank=rank, phase="commit", code=error.errno or 0)
        folder = self._home.path
        path = str(error.filename or folder)
        facts = {"path": path, "message": f"Saving {name}: {error.strerror}.", "rank": rank, "phase": phase}
        full = durable.out_of_space(error, folder, needed_bytes=self._new.needed_bytes, **facts)
        return full or DirectoryError.of(error, path=path, rank=rank, phase=f"saving {name}: {phase}")

    def _taken_over(self, error: BaseException) -> DirectoryInUseError | None:
        """The error that names the job that took the directory over, and swept the files away, in whatever phase."""
        unknown = DirectoryInUseError | durable.HalfCommittedError | CommitOutcomeUnknown
        if isinstance(error, Exception) and not isinstance(error, unknown):
            try:
                self._home.confirm()
            except OSError as found:  # one that cannot be looked at says nothing
                return found if isinstance(found, DirectoryInUseError) else None
        return None

    def _refuse_another_door(self) -> None:
        """Refuse to replace what another door, such as ``publishing``, has saved under this name.

        A directory of another tool, or a file, goes to the quarantine. Where a framework names the directories it is replaced,
        as without safe_ckpt.
        """
        if not os.path.lexists(self._final):
            return
        ours = self._new.manifest.notes.get("adapter")
        try:
            there = read_manifest(self._final)
        except (OSError, SafeCheckpointError):  # damaged, or without a manifest: training has come here again
            if ours is None and not os.path.lexists(self._final / MANIFEST_NAME):  # or another tool has saved it
                logger.warning("%s has no manifest: it is kept as %s", self._final, self._home.quarantine(self._final))
            return
        door = there.notes.get("adapter")
        if door != ours:
            message = (
                f"{door or 'Checkpointer'} saved it, another door of safe_ckpt, so it is not replaced: move it away"
            )
            raise DirectoryError(path=str(self._final), message=message, rank=0)

    def _give_final_name(self) -> None:
        """Give it its name, if the directory is still this job's."""
        if self._final.parent != self._home.path:  # that one was made durable at the start
            durable.make_directory(self._final.parent)
        aside = self._aside(self._final)
        self._home.confirm()
        durable.publish(self._pending, self._final, aside)

    def _link(self, *, marked: bool) -> None:
        """A name such as ``last`` stays with what it names, rather than to go to a marked checkpoint."""
        for number, link in enumerate(() if marked else self._new.additions.links):
            staged = self._pending.parent / f"link{number}-{link.path.name}"
            aside = self._aside(link.path)
            self._home.confirm()
            durable.publish_link(self._final, staged, link, aside)

    def _point(self, *, marked: bool) -> None:
        for pointer in self._new.additions.pointers:
            if marked and pointer.is_for_resume:
                continue
            staged = self._pending.parent / f"pointer-{pointer.path.name}"
            self._home.confirm()
            try:
                durable.write_durably(staged, pointer.data)
                if pointer.mode is not None:
                    staged.chmod(pointer.mode)
                durable.sync_directory(str(staged.parent))  # as in ``publish_link``
                durable.publish_file(staged, pointer.path)
            except OSError as error:
                raise durable.HalfCommittedError(error.errno, f"{pointer.path}: {error.strerror}") from error

    def _aside(self, path: Path) -> Callable[[], Path]:
        home, op_id = self._home, self._op_id
        if self._new.kind != "directory" and not os.path.lexists(path):
            return lambda: home.aside(op_id, path)  # a file is replaced in one step
        made = home.aside(op_id, path)

        def in_place() -> Path:
            if made.parent.parent == home.trash and os.path.lexists(path):
                # What the next start repairs by: the old one's place, and the folder of this save, by whose name it tells
                # an interrupted replacement from something deleted.
                for folder in (home.pending, home.trash, home.hidden):
                    durable.sync_directory(str(folder))
            return made

        return in_place

    def _check_written(self, entries: Sequence[FileEntry], check_still_wanted: Callable[[], None]) -> None:
        # The files on disk must be those that were reported: another rank's file may have vanished, or lie on another disk.
        # Caches of network file systems lag behind, so rank 0 waits for a file that it does not see yet, or with an old size.
        patience = Patience(self._timeouts)
        for entry in entries:
            size = patience.until_sized(self.folder / entry.path, entry.size_bytes, check_still_wanted)
            if size != entry.size_bytes:
                cause = f"{entry.path}, written by rank {entry.rank} with {entry.size_bytes} bytes, "
                cause += "is not there" if size < 0 else f"has {size} bytes here"
                self._home.confirm()  # a job that took over has swept it away
                raise SaveError(name=self._new.path.name, cause=cause, rank=entry.rank, phase="commit")


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # something lies in it, or it was never made
            folder.rmdir()


def _is_complete(path: Path) -> bool:
    try:
        verify_files(path, read_manifest(path))
    except (FileNotFoundError, CorruptCheckpointError, UnsupportedFormatError):
        return False
    return True
