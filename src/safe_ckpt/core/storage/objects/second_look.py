"""Looking twice: an answer that is not as expected decides nothing until another connection gives the same.

A store, a proxy or a network card answers wrongly once: with flipped or too few bytes, with "not there", with an old state.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import TypeVar

from safe_ckpt.core.storage.objects.bucket import Bucket, Version
from safe_ckpt.core.storage.objects.place import ObjectPath
from safe_ckpt.errors import CorruptCheckpointError, SafeCheckpointError

logger = logging.getLogger(__name__)
DISAGREED = "reads disagreed, try again"
_Result = TypeVar("_Result")


def read_twice(
    place: ObjectPath, sound: Callable[[bytes], _Result | None], bucket: Bucket | None = None
) -> tuple[bytes, _Result | None, Version]:
    """A small object as a whole: as it is read first if that is sound, else what a second read on a new connection decides.

    Args:
        place: where it is.
        sound: what the bytes mean, None if they may be wrong.
        bucket: with the deadline; None for that of the place.

    Returns:
        Its bytes, what ``sound`` made of them, and its version. None for that in between says: two reads agree on them.

    Raises:
        FileNotFoundError: there is none, as two reads say.
        OSError: two reads disagree, and neither is sound; or the store gave no answer, or refuses.
    """
    near = place.bucket if bucket is None else bucket
    first = _read(near, place.key)
    if first is not None and (meant := sound(first[0])) is not None:
        return first[0], meant, first[1]
    second = _read(near.afresh(), place.key)
    if second is not None and (meant := sound(second[0])) is not None:
        logger.warning("%s: reads disagreed, and the second one is sound", place)
        return second[0], meant, second[1]
    if (first and first[0]) != (second and second[0]):
        raise OSError(errno.EIO, DISAGREED, str(place))
    if second is None:
        raise FileNotFoundError(errno.ENOENT, "is not there", str(place))
    return second[0], None, second[1]


def parse_twice(place: ObjectPath, parse: Callable[[bytes], _Result]) -> _Result:
    """Return what ``parse`` makes of a small object. If it refuses, a second read decides, on a new connection.

    Raises:
        FileNotFoundError: there is none, as two reads say.
        OSError: two reads disagree, and both are refused; or the store gave no answer, or refuses.
        SafeCheckpointError: what ``parse`` raises of bytes on which two reads agree.
    """

    def sound(data: bytes) -> _Result | None:
        try:
            return parse(data)
        except SafeCheckpointError:
            return None

    data, meant, _ = read_twice(place, sound)
    return parse(data) if meant is None else meant


def is_object_there(place: ObjectPath) -> bool:
    """Whether there is an object; that there is none, two connections have to say.

    Raises:
        OSError: the store gave no answer, or refuses.
    """
    return _is_there(place.bucket, place.key) or _is_there(place.bucket.afresh(), place.key)


def look_thrice(path: ObjectPath, action: Callable[[ObjectPath], _Result]) -> _Result:
    """Do something with a checkpoint. That it is damaged or incomplete, three looks have to say.

    A look goes wrong by the store or by the disk to which it was fetched, so one wrong answer of each must not be enough. Each
    goes over another connection than the one before.

    Raises:
        CorruptCheckpointError: it is.
    """
    for _ in range(2):
        try:
            return action(path)
        except CorruptCheckpointError as error:
            logger.warning("%s: reading it once more", error)
        path = path.afresh()
    return action(path)


def _read(bucket: Bucket, key: str) -> tuple[bytes, Version] | None:
    try:
        return bucket.read(key)
    except FileNotFoundError:
        return None


def _is_there(bucket: Bucket, key: str) -> bool:
    try:
        bucket.size_of(key)
    except FileNotFoundError:
        return False
    return True
