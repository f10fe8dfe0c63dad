"""Who owns a directory in an object store: one job at a time, by replacing its head on the condition that nobody else has.

The owner replaces the head six times per ``lease_s``. Another job takes over at once from a process that it can see to be
gone, and from any other after the head has not changed for the owner's own ``lease_s``. The owner learns of it at the next
replacement. Until then nothing it does can commit: see ``object_home``.

While the store gives no answer, the owner cannot show a sign of life either. So that time does not count, and afterwards the
owner gets the time of some beats more. No owner is replaced, and none gives up, because of one read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Literal

from safe_ckpt.core.home.home import HIDDEN
from safe_ckpt.core.home.lease import Lease, fate_of_process, own_lease
from safe_ckpt.core.home.object_head import HEAD, Head, look_at_head, read_head
from safe_ckpt.core.storage.objects.bucket import Bucket, Version
from safe_ckpt.core.storage.objects.clients import ChangedError, ExistsError
from safe_ckpt.core.storage.objects.place import ObjectPath
from safe_ckpt.errors import DirectoryError, DirectoryInUseError

logger = logging.getLogger(__name__)
_BEATS_PER_LEASE = 6
_LOOKS_PER_LEASE = 12
_ATTEMPTS = 10
_TAKE_AWAYS = 20
_LAST_WORD_S = 5.0
_SHORTEST_S = 0.5
_PAUSE_S = 0.2
_owned: set[str] = set()  # tokens of the leases that this process holds
Change = Callable[[Head], Head]
Found = Literal["read", "damaged", "none"]


class ObjectOwner:
    """The right to commit below an address. Used on rank 0 only; by several threads.

    Args:
        path: the directory; its bucket's deadline holds for each change of the head.
        lease_s: how long the head may stand still before another job may take over.
        owner: what holds it within this process and how to free it, for messages.
        unfenced: replace the head whatever it is.

    Attributes:
        head: what it says, as far as this process knows.
    """

    def __init__(self, path: ObjectPath, *, lease_s: float, owner: str, unfenced: bool) -> None:
        self.head = Head()
        # One request that hangs must not cost the directory: there is time for others before the lease is over.
        self._quick = path.bucket.hurried(max(lease_s / _BEATS_PER_LEASE, _SHORTEST_S))
        self._path = path
        self._place = path / HIDDEN / HEAD
        self._lease_s = lease_s
        self._owner = owner
        self._unfenced = unfenced
        self._version = Version(e_tag=None, version=None)
        self._later: list[Change] = []
        self._turn = threading.RLock()
        self._taken_by: Lease | None = None
        self._token = ""
        self._held_by = 0
        self._keeper: threading.Thread | None = None
        self._stop = threading.Event()

    def take(self, patience_s: float | None) -> Found:
        """Become the owner. Returns what there was of a head: one that was read says what may be left over.

        Args:
            patience_s: how long to wait for an owner that cannot be asked; None for as long as its lease says.

        Raises:
            DirectoryInUseError: a live job owns it.
            OSError: the store gave no answer, or refuses.
        """
        lease = self._own_lease()
        self._token = lease.token
        _owned.add(lease.token)  # before the store has it: another thread would take it for one that was not given back
        try:
            found = self._take(lease, None if patience_s is None else time.monotonic() + patience_s)
        except BaseException:
            _owned.discard(lease.token)
            raise
        self._held_by, self._taken_by = os.getpid(), None
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep, args=(self._stop,), name="safe_ckpt-lease", daemon=True)
        self._keeper.start()
        return found

    def release(self) -> None:
        """Give it back. Where the store gives no answer, the lease runs out."""
        if self._held_by != os.getpid():
            return
        self._stop.set()
        # Without the turn a request of another thread hangs.
        if self._taken_by is None and self._turn.acquire(timeout=_LAST_WORD_S):
            try:
                self.update(Head.released, within_s=_LAST_WORD_S)
            except (OSError, DirectoryError) as error:
                logger.warning("%s could not be given back, its lease runs out: %s", self._path, error)
            finally:
                self._turn.release()
        self._held_by = 0
        _owned.discard(self._token)
        if self._keeper is not None and self._keeper is not threading.current_thread():
            self._keeper.join(1.0)

    def confirm(self) -> None:
        """Raise ``DirectoryInUseError`` if another job is known to have taken the directory over."""
        if self._taken_by is not None:
            raise self._in_use(self._taken_by, "another job took the directory over")

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
            raise DirectoryError(path=str(self._path), message="its head changes all the time", rank=0)

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
            for near in (
                bucket,
                None,
            ):  # a head that is not ours may be an old one: another connection has to say so, too
                found, own = self._look(near or bucket.afresh()), self.head.lease
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
            self._taken_by = head.lease or dataclasses.replace(self._own_lease(), host="?", pid=0)

    def go_on_with(self, path: ObjectPath) -> None:
        """From now on the deadline of this bucket holds, which is the same one."""
        self._path = path

    def _bucket(self) -> Bucket:
        return self._quick.within(self._path.bucket.options.give_up_after_s, self._path.bucket.stop)

    def _take(self, lease: Lease, deadline: float | None) -> Found:
        began, silence = time.monotonic(), _Silence()
        state: Found = "none"
        while True:
            if self._path.bucket.stop is not None:
                self._path.bucket.stop()
            bucket = self._bucket()
            found = self._look(bucket)
            if found is None:
                if self._create(Head().taken(lease)):
                    return "none"
                continue
            head, version, now = found
            if head.lease is not None and head.lease.token == lease.token:  # by a request whose answer was lost
                self.head, self._version = head, version
                return state
            state = now
            self._refuse_if_alive(head, silence, bucket)
            silence.saw(head, outage=bucket.unanswered > 0)
            lease_s = head.lease.lease_s if head.lease is not None else self._lease_s
            last = began + lease_s + bucket.options.give_up_after_s
            if not self._is_free(head, silence.seconds, last if deadline is None else deadline):
                time.sleep(lease_s / _LOOKS_PER_LEASE)
            elif self._replace(head, version, lease, silence, last):
                return state

    def _refuse_if_alive(self, head: Head, silence: _Silence, bucket: Bucket) -> None:
        """Raise ``DirectoryInUseError`` if the head was replaced while this waits, as two reads say."""
        if head.lease is None or not silence.is_broken_by(head):
            return
        again = self._look(bucket.afresh())
        if again is not None and again[0].lease is not None and silence.is_broken_by(again[0]):
            raise self._in_use(again[0].lease, "its owner is alive")

    def _replace(self, head: Head, version: Version, lease: Lease, silence: _Silence, last: float) -> bool:
        """Take the directory over by one request. If that fails, so may the owner's: it has all its time again."""
        bucket = self._bucket()
        try:
            self._put(bucket.within(0.0, bucket.stop), head.taken(lease), version)
        except ChangedError:  # by another job, which is the owner now
            return False
        except TimeoutError:
            if time.monotonic() > last:
                raise
            silence.seconds = 0.0
            time.sleep(_PAUSE_S)
            return False
        return True

    def _put(self, bucket: Bucket, head: Head, version: Version) -> None:
        """Replace the head that has this version."""
        if self._unfenced:
            self._version = bucket.overwrite(self._place.key, head.to_bytes())
        else:
            self._version = bucket.replace(self._place.key, head.to_bytes(), version)
        self.head = head

    def _create(self, head: Head) -> bool:
        try:
            if self._unfenced:
                self._version = self._bucket().overwrite(self._place.key, head.to_bytes())
            else:
                self._version = self._bucket().create(self._place.key, head.to_bytes())
        except ExistsError:
            return False
        self.head = head
        return True

    def _is_free(self, head: Head, silent_s: float, deadline: float) -> bool:
        if head.lease is None:
            return True
        fate = fate_of_process(head.lease)
        if head.lease.token not in _owned and _is_own(head.lease, fate):
            fate = "dead"  # this process could not give it back
        if fate == "alive":
            raise self._in_use(head.lease, self._owner or "its process lives")
        if fate == "dead" or silent_s > head.lease.lease_s:
            logger.info("%s: taking over from process %d on %s", self._path, head.lease.pid, head.lease.host)
            return True
        if time.monotonic() > deadline:
            raise self._in_use(head.lease, f"its owner has {head.lease.lease_s:.0f} s to show a sign of life")
        return False

    def _look(self, bucket: Bucket) -> tuple[Head, Version, Found] | None:
        try:
            head, version = look_at_head(self._path, bucket)
        except FileNotFoundError:
            return None
        if head is None:
            logger.warning("%s is damaged, and is begun anew", self._place)
            return Head(), version, "damaged"
        return head, version, "read"

    def _keep(self, stop: threading.Event) -> None:
        """Show signs of life. On a thread of its own."""
        period_s = self._lease_s / _BEATS_PER_LEASE
        while not stop.wait(period_s):
            if self._held_by != os.getpid():
                return
            try:
                self.update(Head.beaten, within_s=period_s)
            except DirectoryInUseError as error:
                logger.error("%s", error)  # noqa: TRY400 - the next save raises it
                return
            except (OSError, DirectoryError) as error:
                logger.debug("%s: no sign of life could be left: %s", self._path, error)

    def _own_lease(self) -> Lease:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return own_lease(token=uuid.uuid4().hex, started_at=now, lease_s=self._lease_s)

    def _in_use(self, lease: Lease, message: str) -> DirectoryInUseError:
        return DirectoryInUseError(
            path=str(self._path), message=message, host=lease.host, pid=lease.pid, started_at=lease.started_at
        )


class _Silence:
    """For how long an owner has shown no sign of life although it could have.

    Attributes:
        seconds: so long.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._head: Head | None = None
        self._seen_at = 0.0

    def is_broken_by(self, head: Head) -> bool:
        """Whether it is another head than the one that was seen before."""
        return self._head is not None and (head.version, head.lease) != (self._head.version, self._head.lease)

    def saw(self, head: Head, *, outage: bool) -> None:
        """The head was read; ``outage``: that got no answer at first."""
        now, before = time.monotonic(), self._seen_at
        self._seen_at = now
        if self._head is None or self.is_broken_by(head):
            self._head, self.seconds = head, 0.0
        elif head.lease is not None:
            # A read that took long tells of no more than one beat that did not come.
            self.seconds += min(now - before, head.lease.lease_s / _BEATS_PER_LEASE)
            if outage:  # the owner gets the time of three beats: one that hangs, a pause, and one that comes through
                self.seconds = min(self.seconds, head.lease.lease_s / 2)


def _is_own(lease: Lease, fate: str) -> bool:
    return fate == "alive" and lease.pid == os.getpid()


def owner_of(directory: ObjectPath) -> Lease | None:
    """The lease of the job that owns the directory; None when nobody does. Only read.

    Raises:
        OSError: the store gave no answer, or refuses; or there is no such bucket.
    """
    head = read_head(directory)
    if head is None:  # a bucket that there is not looks the same; the listing tells
        directory.bucket.list_folders(f"{directory.key}/" if directory.key else "")
    return None if head is None else head.lease


def take_away(directory: ObjectPath, *, unfenced: bool) -> None:
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
