"""Who owns a directory in an object store, and taking it away, without being a job."""

from __future__ import annotations

import contextlib
import errno

from safe_ckpt.core.home.holders import Holder
from safe_ckpt.core.home.home import HIDDEN
from safe_ckpt.core.home.lease import fate_of_process
from safe_ckpt.core.home.object_head import HEAD, look_at_head, read_head
from safe_ckpt.core.storage.objects.clients import ChangedError
from safe_ckpt.core.storage.objects.place import ObjectPath

_ATTEMPTS = 20


def holder_of_objects(directory: ObjectPath) -> Holder | None:
    """Who owns the directory; None when nobody does. Only read.

    Raises:
        OSError: the store gave no answer, or refuses; or there is no such bucket.
    """
    head = read_head(directory)
    if head is None:  # a bucket that there is not looks the same; the listing tells
        directory.bucket.list_folders(f"{directory.key}/" if directory.key else "")
    if head is None or head.lease is None:
        return None
    lease = head.lease
    alive = {"alive": True, "dead": False, "unknown": None}[fate_of_process(lease)]
    return Holder(host=lease.host, pid=lease.pid, started_at=lease.started_at, alive=alive, lease_s=lease.lease_s)


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
    for _ in range(_ATTEMPTS):
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
