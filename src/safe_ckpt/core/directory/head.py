"""The head object of a directory in an object store, as a value: who owns it, and what may be left over if the owner dies.

It is only ever replaced on the condition that it is the one that was read, so each change is a step from one owner's state to
the next. A save is announced in it before its first object is written, and a deletion before the first object is deleted.
So the next owner knows every place where something may be left, without a search. And it names the newest checkpoints: a list
that lacks one of them is an old one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safe_ckpt.core.directory.lease import Lease
from safe_ckpt.core.storage.inside import checked_name
from safe_ckpt.errors import UnsupportedFormatError

HEAD = "head"
"""Its name in the hidden folder."""
FORMAT = "safe_ckpt-head"
_FORMAT_VERSION = 1
_MOST_COMMITTED = 16
_MOST_TRASH = 100  # a delayed request may bring an object back: what was deleted lately is looked at once more


@dataclass(frozen=True, kw_only=True)
class Head:
    """What the head object says.

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
        """Another owner."""
        return self._next(fence=self.fence + 1, lease=lease)

    def released(self) -> Head:
        """No owner."""
        return self._next(lease=None)

    def beaten(self) -> Head:
        """A sign of life."""
        return self._next(lease=self.lease.next() if self.lease is not None else None)

    def announced(self, folder: str, sequence: int) -> Head:
        """A save begins in ``folder``."""
        return self._next(pending=(*self.pending, folder), sequence=max(self.sequence, sequence))

    def settled(self, folders: Collection[str], committed: Sequence[str] = ()) -> Head:
        """These saves are over: ``committed``, in their order, or nothing of them is left."""
        pending = tuple(folder for folder in self.pending if folder not in folders)
        if not committed:
            return self._next(pending=pending)
        earlier = [folder for folder in self.committed or () if folder not in committed]
        return self._next(pending=pending, committed=(*earlier, *committed)[-_MOST_COMMITTED:])

    def doomed(self, folders: Sequence[str]) -> Head:
        """These are deleted from now on."""
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

    def quarantining(self, folder: str) -> Head:
        """This is damaged."""
        besides = (one for one in self.quarantined if one != folder)
        return self._next(quarantined=(*besides, folder), committed=self._committed_without([folder]))

    def seen_to_be_conditional(self) -> Head:
        """The store keeps its promises."""
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
