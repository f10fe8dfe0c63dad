"""A directory in an object store that a job holds: how a save is announced, committed, dropped, and what is swept.

Below the address lie one folder for each save, named ``<name>.<the save's id>``, and ``.safe_ckpt/head``. A folder is a
checkpoint once it has a manifest, which is created last, by one request that fails if there is an object already. No key is
written twice, so a replaced step is another folder, and the old one is deleted after the commit.

A job that takes over creates a tombstone in place of each manifest that the earlier owner announced and has not created.
Whichever of the two requests comes first decides: the earlier owner has committed, or it never will.

Only what the head names is ever deleted: another program's folders may have such names, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from safe_ckpt.config import Timeouts
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, CheckpointInfo, FileEntry
from safe_ckpt.core.home.home import HIDDEN, Candidate, HeldHome, NewCheckpoint, OnError
from safe_ckpt.core.home.objects.head import (
    ID_LETTERS,
    TOMBSTONE,
    Head,
    folders_of,
    has_manifest,
    in_parallel,
    is_tombstone,
    list_objects,
    manifest_in,
    missing_condition,
)
from safe_ckpt.core.home.objects.lock import ObjectOwner
from safe_ckpt.core.storage.objects.bucket import Bucket
from safe_ckpt.core.storage.objects.clients import ExistsError
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.core.storage.objects.second_look import is_object_there
from safe_ckpt.core.storage.source import in_store
from safe_ckpt.errors import (
    CommitOutcomeUnknown,
    DirectoryError,
    DirectoryInUseError,
    SafeCheckpointError,
    SaveError,
    naming,
)
from safe_ckpt.text import listed

if TYPE_CHECKING:
    from safe_ckpt.core.home.pins.observer import PinWatch

logger = logging.getLogger(__name__)
_PROBE = "probe"
_LAST_WORD_S = 5.0
_AT_ONCE = 50  # half of what a head remembers as deleted
_SET_AT = "buried_at"  # as it stands in stores: the value stays
_TOMBSTONE_S = 7 * 24 * 3600.0


class UndecidedError(OSError):
    """It is not known whether a checkpoint is committed: the store gives no answer. The next owner finds out."""


class ObjectHome(HeldHome[ObjectPath]):
    """See ``Home``. One directory of checkpoints in an object store, held by this job from ``open`` to ``close``.

    Used on rank 0 only, but for ``path`` and ``place``.

    Args:
        path: the directory.
        lease_s: how long its head may stand still before another job may take it over.
        owner: what holds it within this process and how to free it, for messages.
        unfenced: whether a store will do that does not keep conditions.

    Attributes:
        last_sequence: the last place in the order of commits that was given out.
    """

    is_mounted: ClassVar[bool] = False
    is_single_name = False
    unsupported: ClassVar[frozenset[str]] = frozenset({"file", "prefilled", "keep_foreign", "pointers", "links"})

    def __init__(self, path: ObjectPath, *, lease_s: float, owner: str = "", unfenced: bool = False) -> None:
        super().__init__()
        self.path = path
        self._lease_s = lease_s
        self._unfenced = unfenced
        self._owner = ObjectOwner(path, lease_s=lease_s, owner=owner, unfenced=unfenced)
        self._closed = threading.Event()
        self._pins: PinWatch | None = None
        self._tried: set[str] = set()  # folders whose manifest was sent
        self._dropped: set[str] = set()  # of saves that failed: another rank may still have sent something

    def abandon(self, prefilled: Path | None) -> None:
        """See ``Home``. There is none here."""

    @property
    def hidden(self) -> ObjectPath:
        """See ``Home``."""
        return self.path / HIDDEN

    def begin(self, new: NewCheckpoint, timeouts: Timeouts) -> ObjectPublication:
        """See ``Home``."""
        del timeouts
        return ObjectPublication(new, self)

    def open(self, patience_s: float | None = None) -> None:
        """Become the owner, and clean up what an earlier one left.

        Args:
            patience_s: how long to wait for an owner that cannot be asked; None for as long as its lease says.

        Raises:
            DirectoryError: the store refuses, gives no answer, or does not keep conditions.
            DirectoryInUseError: a live job owns it.
        """
        with naming(rank=0, phase="taking the directory", path=str(self.path)):
            self._owner.acquire(patience_s)
        try:
            with naming(rank=0, phase="cleaning up after an earlier job", path=str(self.path)):
                if not self._owner.head.checked and not self._unfenced:
                    self._check_conditions()
                    self._owner.update(Head.seen_to_be_conditional)
                self._sweep()
        except BaseException:
            self.close()
            raise

    def persist(self, seconds: float) -> None:
        """After ``open``: from now on try a request again for so long, but not after ``close``."""
        self.path = self.path.within(seconds, self._refuse_closed)
        self._owner.go_on_with(self.path)

    def close(self) -> None:
        """Give the directory back."""
        self._closed.set()
        self._owner.release()

    def _refuse_closed(self) -> None:
        if self._closed.is_set():
            raise OSError(errno.ECANCELED, "the store gave no answer, and the job has ended", str(self.path))

    def next_sequence(self) -> int:
        """See ``Home``."""
        self.start_after(self._owner.head.sequence)
        return super().next_sequence()

    def place(self, name: str, op_id: str) -> ObjectPath:
        """The folder of one save. On any rank."""
        return self.path / f"{name}.{op_id[:ID_LETTERS]}"

    def confirm(self) -> None:
        """Raise ``DirectoryInUseError`` if another job is known to have taken the directory over."""
        self._owner.confirm()

    def taken_over(self) -> DirectoryInUseError | None:
        """Return the error that names the job that took the directory over, if one did: for when something was not as expected.

        Such a job sweeps away what this one has uploaded. None, too, where the store gives no answer within seconds.
        """
        try:
            self._owner.find_out(_LAST_WORD_S)
        except DirectoryInUseError as error:
            return error
        except (OSError, SafeCheckpointError) as error:
            logger.debug("%s: who owns it is not known: %s", self.path, error)
        return None

    def announce(self, folder: ObjectPath, sequence: int) -> None:
        """A save begins: from now on the next owner will look into ``folder``.

        Raises:
            DirectoryInUseError: another job has taken the directory over.
            OSError: the store gave no answer.
        """
        again = sorted(self._dropped)
        kept = [name for name in again if self._delete_unless_committed(self.path / name, self.path.bucket)]
        # A copy that the store makes late may still come: the next start looks there once more.
        gone = [name for name in again if name not in self._tried]
        self._owner.update(lambda head: head.settled(again, kept).deleting(gone).announced(folder.name, sequence))
        self._dropped.difference_update(again)

    def commit(self, folder: ObjectPath, manifest: bytes) -> None:
        """Create the manifest, which makes ``folder`` a checkpoint. One request decides.

        Raises:
            DirectoryInUseError: another job has taken the directory over; this is not committed, and never will be.
            OSError: the store gave no answer; this is not committed, and never will be.
            UndecidedError: the store gave no answer, not even to that question.
        """
        self.confirm()
        self._tried.add(folder.name)
        try:
            self._create(folder / MANIFEST_NAME, manifest, self.path.bucket)
        except ExistsError as error:
            if (taken := self.taken_over()) is not None:
                raise taken from error
            raise
        except OSError as error:
            try:
                committed = self._set_tombstone(folder, self.path.bucket.within(self._lease_s))
            except OSError:
                raise UndecidedError(error.errno, error.strerror, error.filename) from error
            if not committed:
                raise
        self._owner.later(lambda head: head.settled([folder.name], [folder.name]))

    def drop(self, folder: ObjectPath) -> None:
        """Delete what a save left that failed, now and once more before the next one. Never raises."""
        self._dropped.add(folder.name)
        try:
            self._delete_unless_committed(folder, self.path.bucket.within(self._lease_s))
        except (OSError, DirectoryError) as error:
            logger.warning("%s could not be deleted; the next start does it: %s", folder, error)

    def discard(self, places: Iterable[Place]) -> list[ObjectPath]:
        """Delete checkpoints, their manifests first. Returns those that are gone; a failure is logged, once.

        Raises:
            DirectoryInUseError: another job has taken the directory over; nothing was deleted.
        """

        def discard_one(folder: ObjectPath) -> None:
            self.path.bucket.delete([(folder / MANIFEST_NAME).key])
            self._delete_folder(folder)

        chosen = [in_store(place) for place in places]
        gone: list[ObjectPath] = []
        for at in range(0, len(chosen), _AT_ONCE):
            some = chosen[at : at + _AT_ONCE]
            self._owner.update(lambda head: head.deleting([folder.name for folder in some]))  # noqa: B023 - called at once
            spared = self._spared(some)
            gone += self._discard_each([one for one in some if one not in spared], discard_one)
        return gone

    def pinned(self, places: Sequence[Place]) -> Mapping[Place, str]:
        """See ``Home``. Where the last deletion met no reader it costs nothing: it will look again, behind its word."""
        return self._pins.kept(places) if places and self._pins is not None and self._pins.any_seen else {}

    def _spared(self, folders: Sequence[ObjectPath]) -> Collection[Place]:
        """Return those that readers hold, of folders which the head says are deleted; and take that back."""
        if self._pins is None:
            from safe_ckpt.core.home.pins.observer import PinWatch
            from safe_ckpt.core.home.pins.shelf import ObjectShelf

            self._pins = PinWatch(ObjectShelf(self.path))
        held: Mapping[Place, str] = dict.fromkeys(folders, "it is not known whether a reader holds it")
        try:
            held = self._pins.held(folders)
        finally:
            for folder in folders:
                if folder in held and folder not in self._told:
                    logger.info("%s is not deleted: %s", folder, held[folder])
                    self._told.add(folder)
            if held:
                names = [folder.name for folder in folders if folder in held]
                self._owner.update(lambda head: head.sparing(names))
        return held

    def delete(self, infos: Sequence[CheckpointInfo]) -> list[Place]:
        """See ``Whole``. A folder has one save in its life."""
        return list(self.discard([info.path for info in infos]))

    def look(self, on_error: OnError | None = None) -> list[Candidate]:
        """See ``Home``."""
        return list_objects(self.path, on_error)

    def name_of(self, place: Place) -> str:
        """See ``Home``."""
        return place.name

    def quarantine(self, place: Place) -> ObjectPath:
        """Note that a checkpoint is damaged: from now on it is none. Its objects stay. Returns where it is.

        Raises:
            DirectoryInUseError: another job has taken the directory over.
        """
        folder = in_store(place)
        self._owner.update(lambda head: head.quarantining(folder.name))
        return folder

    def quarantined(self) -> list[ObjectPath]:
        """See ``Home``."""
        return [self.path / name for name in self._owner.head.quarantined]

    def _sweep(self) -> None:
        """Take away what earlier owners left, as their head says."""
        head = self._owner.head
        if self._owner.found != "read":
            self._spare_unknown(stop=self._owner.found == "damaged")
        kept = [name for name in head.pending if self._set_tombstone(self.path / name, self.path.bucket)]
        over = [name for name in head.pending if name not in kept]
        there = {folder.name for folder in folders_of(self.path)} if over or head.trash else set()
        left = [self.path / name for name in head.trash if name in there]
        whole = [folder for folder in left if has_manifest(folder)]  # it was not begun: a reader may hold it
        spared = self._spared(whole) if whole else ()
        for folder in left:
            if folder not in spared:
                self._delete_folder(folder)
        for name in over:
            logger.info("removing what an earlier job left: %s", self.path / name)
            self._delete_folder(self.path / name, spare=MANIFEST_NAME)
        if there:
            in_parallel(self._remove_if_old, [self.path / name for name in sorted(there)])
        if head.pending:
            self._owner.update(lambda now: now.settled(head.pending, kept))

    def _spare_unknown(self, *, stop: bool) -> None:
        """Without a head nobody says whose these are: they stay, and are named. ``stop``: no late request commits one."""
        bare = [folder for folder in folders_of(self.path) if not has_manifest(folder)]
        for folder in bare if stop else ():
            self._set_tombstone(folder, self.path.bucket, spares=True)
        if bare:
            what = listed([folder.name for folder in bare])
            message = "%s: no job says that these are its own, so they stay: %s. safe-ckpt gc --quarantine deletes them"
            logger.warning(message, self.path, what)

    def _delete_unless_committed(self, folder: ObjectPath, bucket: Bucket) -> bool:
        """Delete what a save left that failed, unless its manifest came to be there all the same. Returns whether it did."""
        if folder.name in self._tried and self._set_tombstone(folder, bucket):
            self._dropped.discard(folder.name)
            return True
        # If something stands in place of a manifest of ours, it is a tombstone, and it stays: another job has put it there.
        self._delete_folder(folder, spare=MANIFEST_NAME)
        return False

    def _remove_if_old(self, folder: ObjectPath) -> None:
        """Remove a tombstone that has stood for so long that no request can still be on its way."""
        place = folder / MANIFEST_NAME
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            data, _ = place.bucket.read(place.key)
            is_old = is_tombstone(data) and time.time() - float(json.loads(data)[_SET_AT]) > _TOMBSTONE_S
            if not is_old or place.bucket.afresh().read(place.key)[0] != data:
                return  # it carries no digest: two reads have to agree
            if json.loads(data).get("spares"):
                self.path.bucket.delete([place.key])
            else:
                self._delete_folder(folder)

    def _set_tombstone(self, folder: ObjectPath, bucket: Bucket, *, spares: bool = False) -> bool:
        """Decide the fate of a save that may or may not be committed. Returns whether it is.

        Args:
            folder: the save's.
            bucket: with the deadline.
            spares: what lies there stays, because nobody knows whose it is.
        """
        stone = {"format": TOMBSTONE, "fence": self._owner.head.fence, _SET_AT: time.time(), "spares": spares}
        try:
            self._create(folder / MANIFEST_NAME, json.dumps(stone).encode(), bucket)
        except ExistsError:
            try:
                return manifest_in(ObjectPath(bucket, folder.key)) is not None
            except SafeCheckpointError:
                return True  # whatever it is, it is no tombstone
        return False

    def _delete_folder(self, folder: ObjectPath, *, spare: str = "") -> None:
        entries = self.path.bucket.entries(folder.key)
        self.path.bucket.delete([entry.key for entry in entries if entry.key != f"{folder.key}/{spare}"])

    def _check_conditions(self) -> None:
        folder = self.place(_PROBE, uuid.uuid4().hex)
        # If this job dies, or a request comes late, a later start deletes it.
        self._owner.update(lambda head: head.deleting([folder.name]))
        if problem := missing_condition(folder):
            message = f"this store {problem}: two jobs could both commit. Use another one, or set storage.unfenced"
            raise DirectoryError(path=str(self.path), message=message, rank=0)

    def _create(self, path: ObjectPath, data: bytes, bucket: Bucket) -> None:
        if not self._unfenced:
            bucket.create(path.key, data)
            return
        if is_object_there(ObjectPath(bucket, path.key)):
            raise ExistsError(f"{path} is there already")
        bucket.overwrite(path.key, data)


class ObjectPublication:
    """See ``Publication``: announced, uploaded, then its manifest is created.

    Args:
        new: what is to become a checkpoint.
        home: the directory that is held.
    """

    folders: Sequence[str] = ()  # an object is durable when its upload is over

    def __init__(self, new: NewCheckpoint, home: ObjectHome) -> None:
        self._new = new
        self._home = home
        self.folder = home.place(new.path.name, new.attempt)

    def prepare(self) -> None:
        """See ``Publication``."""
        self._home.announce(self.folder, self._new.manifest.sequence)

    def await_folder(self, rank: int, left_s: Callable[[], float]) -> None:
        """See ``Publication``. There is nothing to wait for."""

    def commit(
        self, entries: Sequence[FileEntry], sections: Mapping[str, Any], check_still_wanted: Callable[[], None]
    ) -> CheckpointInfo:
        """See ``Publication``."""
        self._check_uploaded(entries)
        check_still_wanted()
        manifest = dataclasses.replace(self._new.manifest, files=tuple(entries), **sections)
        self._home.commit(self.folder, manifest.to_bytes())
        return CheckpointInfo.of(manifest, self.folder, sum(entry.size_bytes for entry in entries))

    def abort(self) -> None:
        """See ``Publication``."""
        self._home.drop(self.folder)

    def clean_up(self) -> None:
        """See ``Publication``. What it replaced has a folder of its own, which retention deletes."""

    def explain(self, error: BaseException, *, rank: int, phase: str) -> SafeCheckpointError | None:
        """See ``Publication``."""
        known = isinstance(error, DirectoryInUseError | UndecidedError) or not isinstance(error, Exception)
        if rank == 0 and not known and (taken := self._home.taken_over()) is not None:
            return taken
        name = self._new.path.name
        if isinstance(error, UndecidedError):
            cause = f"the store did not say whether the manifest was created: {error.strerror}"
            return CommitOutcomeUnknown(name=name, cause=cause, rank=rank, phase="commit", code=error.errno or 0)
        if not isinstance(error, OSError) or isinstance(error, SafeCheckpointError):
            return None
        path = str(error.filename or self.folder)
        return DirectoryError.of(error, path=path, rank=rank, phase=f"saving {name}: {phase}")

    def _check_uploaded(self, entries: Sequence[FileEntry]) -> None:
        """Compare the objects that are there with the reports: another rank's store may be another one."""
        for folder in (self.folder, self.folder.afresh()):
            there = {entry.key: entry.size_bytes for entry in folder.bucket.entries(folder.key)}
            sizes = {entry: there.get((folder / entry.path).key, -1) for entry in entries}
            wrong = [entry for entry, size in sizes.items() if size != entry.size_bytes]
            if not wrong:
                return
        entry, size = wrong[0], sizes[wrong[0]]
        cause = f"{entry.path}, uploaded by rank {entry.rank} with {entry.size_bytes} bytes, "
        cause += "is not there" if size < 0 else f"has {size} bytes in {self.folder}"
        raise SaveError(name=self._new.path.name, cause=cause, rank=entry.rank, phase="commit")
