"""Who owns a directory in an object store: one job at a time, by replacing its head on the condition that nobody else has.

The owner learns at its next sign of life that it was replaced. Until then nothing it does can commit: see ``home``.
No owner is replaced, and none gives up, because of one read.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Callable
from typing import Literal

from safe_ckpt.core.home.home import HIDDEN
from safe_ckpt.core.home.lease import NOBODY, Fate, Lease, LeaseLock, Seen, fate_of_process
from safe_ckpt.core.home.objects.head import HEAD, Head, look_at_head, read_head
from safe_ckpt.core.storage.objects.bucket import Bucket, Version
from safe_ckpt.core.storage.objects.clients import ChangedError, ExistsError
from safe_ckpt.core.storage.objects.place import ObjectPath
from safe_ckpt.errors import DirectoryError

logger = logging.getLogger(__name__)
_ATTEMPTS = 10
_AT_ALL_TIMES = (
    "its head changes all the time; or the store does not replace an object by the version with which it is read"
)
_AT_ALL_TIMES += " (If-Match, ETag): safe-ckpt doctor tells. Then use another one, or set storage.unfenced"
_TAKE_AWAYS = 20
_LAST_WORD_S = 5.0
_SHORTEST_S = 0.5
Change = Callable[[Head], Head]
Found = Literal["read", "damaged", "none"]


class ObjectOwner(LeaseLock):
    """The right to commit below an address.

    Args:
        path: the directory; its bucket's deadline holds for each change of the head.
        lease_s: how long the head may stand still before another job may take over.
        owner: what holds it within this process and how to free it, for messages.
        unfenced: replace the head whatever it is.

    Attributes:
        head: what it says, as far as this process knows.
        found: what there was of a head: one that was read says what may be left over.
    """

    def __init__(self, path: ObjectPath, *, lease_s: float, owner: str, unfenced: bool) -> None:
        super().__init__(path, lease_s=lease_s, owner=owner)
        self.head = Head()
        self.found: Found = "none"
        # One request that hangs must not cost the directory: there is time for others before the lease is over.
        self._quick = path.bucket.hurried(max(self._period_s, _SHORTEST_S))
        self._outage_s = path.options.give_up_after_s
        self._path = path
        self._place = path / HIDDEN / HEAD
        self._unfenced = unfenced
        self._version = Version(e_tag=None, version=None)
        self._later: list[Change] = []
        self._turn = threading.RLock()
        self._taken_by: Lease | None = None

    def confirm(self) -> None:
        """Raise ``DirectoryInUseError`` if another job is known to have taken the directory over."""
        if self._taken_by is not None:
            raise self.in_use("another job took the directory over", self._taken_by)

    def update(self, change: Change, *, within_s: float | None = None) -> None:
        """Replace the head by what ``change`` makes of it, and of what ``later`` was given.

        Raises:
            DirectoryInUseError: another job has taken the directory over.
            OSError: the store gave no answer.
        """
        bucket = self._bucket() if within_s is None else self._quick.within(within_s)
        with self._turn:
            for _ in range(_ATTEMPTS):
                self.confirm()
                later, head = list(self._later), self.head
                for one in (*later, change):
                    head = one(head)
                try:
                    self._put(bucket, head, self._version)
                except ChangedError:
                    self._find_out(bucket)  # an earlier request of ours, given up by then, may have come through
                    continue
                del self._later[: len(later)]
                return
            raise DirectoryError(path=str(self._path), message=_AT_ALL_TIMES, rank=0)

    def later(self, change: Change) -> None:
        """Make this change together with the next one. If there is none, the next owner finds out by itself."""
        with self._turn:
            self._later.append(change)

    def find_out(self, within_s: float) -> None:
        """Read the head after something was not as expected: another job's, or what an earlier request made of it.

        Raises:
            DirectoryInUseError: it is another job's.
            OSError: the store gave no answer.
        """
        self._find_out(self._quick.within(within_s))
        self.confirm()

    def _find_out(self, bucket: Bucket) -> None:
        with self._turn:
            # A head that is not ours may be an old one: another connection has to say so, too.
            for near in (bucket, None):
                found, own = self._look_at(near or bucket.afresh()), self.head.lease
                if found is None:  # deleted by hand; if another job creates it first, that is the owner
                    with contextlib.suppress(ExistsError):
                        self._version = bucket.create(self._place.key, self.head.to_bytes())
                    return
                head, version, _ = found
                if head.lease is not None and own is not None and head.lease.token == own.token:
                    self.head, self._version = head, version
                    return
                if head.lease is None and head.fence == self.head.fence:
                    return
                if head.fence > self.head.fence:
                    break
            self._taken_by = head.lease or NOBODY

    def go_on_with(self, path: ObjectPath) -> None:
        """From now on the deadline of this bucket holds, which is the same one."""
        self._path = path

    def _bucket(self) -> Bucket:
        return self._quick.within(self._path.options.give_up_after_s, self._path.bucket.stop)

    def _look(self, *, again: bool = False) -> Seen | None:
        if self._path.bucket.stop is not None:
            self._path.bucket.stop()
        bucket = self._bucket().afresh() if again else self._bucket()
        if (found := self._look_at(bucket)) is None:
            return None
        lease = found[0].lease
        lease_s = lease.lease_s if lease is not None else 0.0
        return Seen(state=found, lease=lease, lease_s=lease_s, was_out=bucket.unanswered > 0)

    def _look_at(self, bucket: Bucket) -> tuple[Head, Version, Found] | None:
        try:
            head, version = look_at_head(self._path, bucket)
        except FileNotFoundError:
            return None
        if head is None:
            logger.warning("%s is damaged, and is begun anew", self._place)
            return Head(), version, "damaged"
        return head, version, "read"

    def _take(self, lease: Lease, seen: Seen | None) -> Lease | None:
        if seen is not None and seen.lease is not None and seen.lease.token == lease.token:
            self.head, self._version, _ = seen.state
            return lease
        nothing: tuple[Head, Version | None, Found] = Head(), None, "none"
        head, version, self.found = nothing if seen is None else seen.state
        self._taken_by, bucket = None, self._bucket()
        try:  # what is there is replaced by one request
            self._put(bucket if version is None else bucket.within(0.0, bucket.stop), head.taken(lease), version)
        except (ChangedError, ExistsError):
            return None
        return lease

    def _put(self, bucket: Bucket, head: Head, version: Version | None) -> None:
        """Replace the head that has this version; None to create it."""
        key, data = self._place.key, head.to_bytes()
        if self._unfenced:
            self._version = bucket.overwrite(key, data)
        else:
            self._version = bucket.create(key, data) if version is None else bucket.replace(key, data, version)
        self.head = head

    def _renew(self, lease: Lease) -> None:
        del lease  # the head has it
        self.update(Head.heartbeat, within_s=self._period_s)

    def _give_back(self, lease: Lease) -> None:
        del lease
        # Without the turn a request of another thread hangs.
        if self._taken_by is None and self._turn.acquire(timeout=_LAST_WORD_S):
            try:
                self.update(Head.released, within_s=_LAST_WORD_S)
            finally:
                self._turn.release()

    def _fate(self, lease: Lease) -> Fate:
        return fate_of_process(lease)


def owner_of(directory: ObjectPath) -> Lease | None:
    """The lease of the job that owns the directory; None when nobody does. Only read.

    Raises:
        OSError: the store gave no answer, or refuses; or there is no such bucket.
    """
    head = read_head(directory)
    if head is None:  # a bucket that there is not looks the same; the listing tells
        directory.bucket.list_folders(f"{directory.key}/" if directory.key else "")
    return None if head is None else head.lease


def take_directory_away(directory: ObjectPath, *, unfenced: bool) -> None:
    """Take the directory away from its owner. One that is alive notices at its next sign of life, and saves nothing more.

    What it may have left stays named in the head, so that the next job decides on it and cleans up.

    Args:
        directory: where.
        unfenced: the store keeps no conditions.

    Raises:
        OSError: the store gave no answer, or refuses; or the owner was faster each time.
    """
    place = directory / HIDDEN / HEAD
    for _ in range(_TAKE_AWAYS):
        head, version = look_at_head(directory)
        if head is None or head.lease is None:
            return
        freed = head.taken(head.lease).released().to_bytes()  # a number of its own, by which the owner sees it
        if unfenced:
            place.bucket.overwrite(place.key, freed)
            return
        with contextlib.suppress(ChangedError):  # by a sign of life
            place.bucket.replace(place.key, freed, version)
            return
    raise OSError(errno.EBUSY, "its owner replaces it all the time", str(place))
