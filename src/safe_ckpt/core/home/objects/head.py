"""The head of a directory in an object store, and the folders of saves, as anyone sees them. No ownership is needed.

The head says who owns the directory, and what may be left over if the owner dies. It is only ever replaced on the condition
that it is the one that was read, so each change is a step from one owner's state to the next. A save is announced in it before
its first object is written, and a deletion before the first object is deleted. So the next owner knows every place where
something may be left, without a search. And it names the newest checkpoints: a list that lacks one of them is an old one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from safe_ckpt.core.formats.manifest import MANIFEST_NAME, Manifest, parse_manifest
from safe_ckpt.core.home.home import HIDDEN, Candidate, OnError
from safe_ckpt.core.home.lease import Lease
from safe_ckpt.core.storage.objects.bucket import Bucket, Version
from safe_ckpt.core.storage.objects.clients import ChangedError, ExistsError
from safe_ckpt.core.storage.objects.place import ObjectPath
from safe_ckpt.core.storage.objects.second_look import DISAGREED, is_object_there, parse_twice, read_twice
from safe_ckpt.core.storage.presence import checked_name
from safe_ckpt.errors import CorruptCheckpointError, DirectoryError, UnsupportedFormatError
from safe_ckpt.text import listed

logger = logging.getLogger(__name__)

_PAUSES_S = (0.1, 0.4, 1.6, None)
_SOMETHING = "checkpoints"
TOMBSTONE = "safe_ckpt-gravestone"  # as it stands in stores: the value stays
ID_LETTERS = 12
_FOLDER = re.compile(rf"^.+\.[0-9a-f]{{{ID_LETTERS}}}\Z")
_AT_A_TIME = 8
_LAST_WORD_S = 10.0
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

HEAD = "head"
"""Its name in the hidden folder."""
FORMAT = "safe_ckpt-head"
_FORMAT_VERSION = 1
_MOST_COMMITTED = 16
_MOST_TRASH = 100  # a delayed request may bring an object back: what was deleted lately is looked at once more


@dataclass(frozen=True, kw_only=True)
class Head:
    """The data of the head object.

    Attributes:
        fence: counts the owners; each has a number of its own.
        version: counts the changes, so that no two heads have the same bytes.
        lease: the owner; None when it gave the directory back.
        sequence: the last place in the order of commits that was given out.
        pending: folders of saves that were announced. Each is committed if it has a manifest.
        trash: folders that were deleted, or are being deleted, the newest last.
        quarantined: folders of damaged checkpoints, which are not resumed from.
        committed: folders of the newest checkpoints, the last one last; None where that is not known: an earlier version of
            safe_ckpt wrote the head, and nothing was committed since.
        checked: the store was seen to create and replace objects on a condition.
    """

    fence: int = 0
    version: int = 0
    lease: Lease | None = None
    sequence: int = 0
    pending: tuple[str, ...] = ()
    trash: tuple[str, ...] = ()
    quarantined: tuple[str, ...] = ()
    committed: tuple[str, ...] | None = ()
    checked: bool = False

    def to_bytes(self) -> bytes:
        """The object's content."""
        lease = vars(self.lease) if self.lease is not None else None
        facts = {"format": FORMAT, "format_version": _FORMAT_VERSION, **vars(self), "lease": lease}
        return json.dumps({**facts, "digest": _digest(facts)}).encode() + b"\n"

    @classmethod
    def is_sound(cls, data: bytes) -> bool:
        """Whether these are the bytes that a job has written. Those of an earlier version of safe_ckpt do not tell."""
        try:
            facts = json.loads(data)
            return bool(facts.pop("digest") == _digest(facts))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return False

    @classmethod
    def from_bytes(cls, data: bytes, path: object = HEAD) -> Head | None:
        """From the object; None if it is not one of ours, or damaged.

        Raises:
            UnsupportedFormatError: a newer version of safe_ckpt wrote it.
        """
        try:
            facts = json.loads(data)
            if facts["format"] != FORMAT:
                return None
            version = int(facts["format_version"])
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            return None
        if version > _FORMAT_VERSION:
            message = f"a newer version of safe_ckpt wrote it (format {version}): update safe_ckpt"
            raise UnsupportedFormatError(path=str(path), message=message)
        try:
            lease = Lease.from_bytes(json.dumps(facts["lease"]).encode()) if facts["lease"] is not None else None
            head = cls(
                fence=int(facts["fence"]),
                version=int(facts["version"]),
                lease=lease,
                sequence=int(facts["sequence"]),
                pending=_folders(facts["pending"]),
                trash=_folders(facts["trash"]),
                quarantined=_folders(facts["quarantined"]),
                committed=_folders(facts["committed"]) if facts.get("committed") is not None else None,
                checked=bool(facts["checked"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            return None
        return head if facts["lease"] is None or lease is not None else None

    def taken(self, lease: Lease) -> Head:
        """Give it another owner."""
        return self._next(fence=self.fence + 1, lease=lease)

    def released(self) -> Head:
        """Give it no owner."""
        return self._next(lease=None)

    def heartbeat(self) -> Head:
        """A sign of life."""
        return self._next(lease=self.lease.next() if self.lease is not None else None)

    def announced(self, folder: str, sequence: int) -> Head:
        """Note that a save begins in ``folder``."""
        return self._next(pending=(*self.pending, folder), sequence=max(self.sequence, sequence))

    def settled(self, folders: Collection[str], committed: Sequence[str] = ()) -> Head:
        """Note that these saves are over: ``committed``, in their order, or nothing of them is left."""
        pending = tuple(folder for folder in self.pending if folder not in folders)
        if not committed:
            return self._next(pending=pending)
        earlier = [folder for folder in self.committed or () if folder not in committed]
        return self._next(pending=pending, committed=(*earlier, *committed)[-_MOST_COMMITTED:])

    def deleting(self, folders: Sequence[str]) -> Head:
        """Note that these are deleted from now on."""
        besides = [folder for folder in self.trash if folder not in folders]
        pending = tuple(folder for folder in self.pending if folder not in folders)
        quarantined = tuple(folder for folder in self.quarantined if folder not in folders)
        most = max(_MOST_TRASH, len(folders))
        return self._next(
            trash=(*besides, *folders)[-most:],
            pending=pending,
            quarantined=quarantined,
            committed=self._committed_without(folders),
        )

    def sparing(self, folders: Collection[str]) -> Head:
        """Note that these stay: ``deleting`` was said before it was known that readers hold them."""
        return self._next(trash=tuple(folder for folder in self.trash if folder not in folders))

    def quarantining(self, folder: str) -> Head:
        """Note that this checkpoint is damaged."""
        besides = (one for one in self.quarantined if one != folder)
        return self._next(quarantined=(*besides, folder), committed=self._committed_without([folder]))

    def seen_to_be_conditional(self) -> Head:
        """Note that the store keeps its promises."""
        return self._next(checked=True)

    def _committed_without(self, folders: Collection[str]) -> tuple[str, ...] | None:
        return None if self.committed is None else tuple(one for one in self.committed if one not in folders)

    def _next(self, **changes: object) -> Head:
        return dataclasses.replace(self, version=self.version + 1, **changes)  # type: ignore[arg-type]


def _folders(names: Sequence[object]) -> tuple[str, ...]:
    """Names of folders in the directory itself. Objects below them are deleted: none may lie elsewhere."""
    if any("/" in checked_name(name) for name in names):
        raise ValueError("it names a folder within another one")
    return tuple(map(str, names))


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def folders_of(path: ObjectPath) -> list[ObjectPath]:
    """The folders of saves below ``path``. Needs no ownership.

    Raises:
        OSError: the store gave no answer.
    """
    return [path / name for name in sorted(path.bucket.list_folders(path.key)) if _FOLDER.match(name)]


def look_at_head(path: ObjectPath, bucket: Bucket | None = None) -> tuple[Head | None, Version]:
    """Return the head of a directory, and which state of it that is; None where it is damaged, as two reads say.

    Args:
        path: the directory.
        bucket: with the deadline; None for that of the path.

    Raises:
        FileNotFoundError: there is none, as two reads say.
        UnsupportedFormatError: a newer version of safe_ckpt wrote it.
        OSError: two reads disagree; or the store gave no answer, or refuses.
    """
    place = path / HIDDEN / HEAD

    def sound(data: bytes) -> Head | None:
        return Head.from_bytes(data, place) if Head.is_sound(data) else None

    data, head, version = read_twice(place, sound, bucket)
    return head or Head.from_bytes(data, place), version


def read_head(path: ObjectPath) -> Head | None:
    """Return the head of a directory; None where there is none, or none that can be read. Needs no ownership.

    Raises:
        OSError: the store gave no answer, or refuses; or two reads disagree.
    """
    try:
        return look_at_head(path)[0]
    except FileNotFoundError:
        return None


def has_manifest(folder: ObjectPath) -> bool:
    """Whether ``folder`` has a manifest, whatever that says.

    Raises:
        OSError: the store gave no answer, or refuses.
    """
    return is_object_there(folder / MANIFEST_NAME)


def manifest_in(folder: ObjectPath) -> tuple[Manifest, bytes] | None:
    """The manifest of ``folder``, and its bytes; None where a tombstone stands in its place.

    Raises:
        FileNotFoundError: neither is there, as two reads say.
        CorruptCheckpointError: it is damaged, as two reads say.
        UnsupportedFormatError: not ours, or of a newer version.
        OSError: two reads disagree; or the store gave no answer, or refuses.
    """

    def parse(data: bytes) -> tuple[Manifest | None, bytes]:
        return (None if is_tombstone(data) else parse_manifest(data, folder)), data

    manifest, data = parse_twice(folder / MANIFEST_NAME, parse)
    return None if manifest is None else (manifest, data)


def is_tombstone(data: bytes) -> bool:
    """Whether this stands in place of a manifest."""
    try:
        facts = json.loads(data)
    except ValueError:
        return False
    return isinstance(facts, dict) and facts.get("format") == TOMBSTONE


def missing_condition(folder: ObjectPath) -> str:
    """Try in ``folder`` whether the store creates and replaces objects on a condition. Returns what it does not, or "".

    Raises:
        OSError: the store gave no answer, or refuses.
    """
    path = folder / "object"
    bucket = path.bucket
    try:
        first = bucket.create(path.key, b"1")
        with contextlib.suppress(ExistsError):
            bucket.create(path.key, b"2")
            return "creates an object where there is one already (If-None-Match)"
        try:  # as the next owner does: an answer to a read may name another ETag than one to a write
            bucket.replace(path.key, b"3", bucket.read(path.key)[1])
        except ChangedError:
            return "does not replace an object by the version with which it is read (If-Match, ETag)"
        with contextlib.suppress(ChangedError):
            bucket.replace(path.key, b"4", first)
            return "replaces an object that has changed meanwhile (If-Match)"
    except OSError as error:
        if isinstance(error, PermissionError | TimeoutError | FileNotFoundError):
            raise
        return f"takes no conditional requests ({error.strerror})"
    finally:
        with contextlib.suppress(OSError):
            bucket.within(_LAST_WORD_S).delete([path.key])
    return ""


def in_parallel(action: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Do it for each, several at a time; the first error is raised when all are over."""
    if len(items) < 2:
        return [action(item) for item in items]
    with ThreadPoolExecutor(min(_AT_A_TIME, len(items)), thread_name_prefix="safe_ckpt-objects") as pool:
        return list(pool.map(action, items))


def list_objects(path: ObjectPath, on_error: OnError | None = None) -> list[Candidate]:
    """The checkpoints below ``path``, in no order. Needs no ownership.

    A list that lacks what the head names is an old one. It is looked at again for some seconds.

    Args:
        path: where to look.
        on_error: called with a checkpoint that cannot be looked at, which is then left out; None to raise instead.

    Raises:
        DirectoryError: the lists lack what the head names.
        OSError: the store gave no answer.
        UnsupportedFormatError: one is of a newer format version.
    """
    where, errors = path, dict[ObjectPath, Exception]()
    for pause_s in _PAUSES_S:
        errors.clear()
        found, lacking = _listed(where, errors if on_error is not None else None)
        if lacking and pause_s is None:  # what a live job has deleted since the head was read is not named any more
            named, head = set[str](), read_head(where)
            if head is not None:
                named = {*head.pending, *((_SOMETHING,) if head.committed is None else head.committed)}
            lacking = [name for name in lacking if name in named]
        if not lacking:
            for folder, error in errors.items():
                if on_error is not None:
                    on_error(folder, error)
            return found
        if pause_s is not None:
            logger.warning("%s: the list lacks %s, unlike the head: listing it once more", path, listed(lacking))
            time.sleep(pause_s)
            where = path.afresh()
    message = f"{DISAGREED}: its head names {listed(lacking)}, and no list does"
    message += f". If somebody has deleted that, delete {path / HIDDEN / HEAD} as well"
    raise DirectoryError(path=str(path), message=message)


def _listed(path: ObjectPath, errors: dict[ObjectPath, Exception] | None) -> tuple[list[Candidate], list[str]]:
    """Return what the store lists, and names that it should list besides. Where ``errors`` is None, errors are raised."""
    head = read_head(path) or Head()
    hidden = {*head.trash, *head.quarantined}
    folders = [folder for folder in folders_of(path) if folder.name not in hidden]

    def look(folder: ObjectPath) -> Candidate | None:
        try:
            return object_candidate(folder)
        except (OSError, UnsupportedFormatError) as error:
            if errors is None:
                raise
            errors[folder] = error
            return None

    found = [candidate for candidate in in_parallel(look, folders) if candidate is not None]
    seen = {candidate.path.name for candidate in found} | {folder.name for folder in errors or ()}
    lacking = [name for name in head.committed or () if name not in seen | hidden]
    unlisted = set(head.pending) - {folder.name for folder in folders}
    lacking += [name for name in sorted(unlisted) if object_candidate(path / name) is not None]
    if not seen and head.committed is None and head.sequence > 0:
        lacking.append(_SOMETHING)
    return found, lacking


def object_candidate(folder: ObjectPath) -> Candidate | None:
    """Return the candidate in a save's folder; None without a manifest: the save is under way, failed or was never committed.

    Raises:
        OSError: the store gave no answer.
        UnsupportedFormatError: it is of a newer format version.
    """
    try:
        found = manifest_in(folder)
    except FileNotFoundError:
        return None  # of a save that is under way, or failed
    except CorruptCheckpointError as error:
        return Candidate(path=folder, problem=f"{MANIFEST_NAME} {error.message}", damaged=True)
    except UnsupportedFormatError as error:
        if "newer" in error.message:
            raise
        return Candidate(path=folder, foreign=True, problem="its manifest was not written by safe_ckpt")
    return None if found is None else Candidate(path=folder, manifest=found[0])
