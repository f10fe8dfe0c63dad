"""The folders of saves in an object store, for anyone who looks: no ownership needed."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from safe_ckpt.core.directory.head import HEAD, Head
from safe_ckpt.core.directory.workspace import HIDDEN
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, Manifest, parse_manifest
from safe_ckpt.core.storage.objects.answers import ChangedError, ExistsError
from safe_ckpt.core.storage.objects.bucket import Bucket, Version
from safe_ckpt.core.storage.objects.place import ObjectPath
from safe_ckpt.core.storage.objects.second_look import is_there, parse_twice, read_twice

GRAVESTONE = "safe_ckpt-gravestone"
ID_LETTERS = 12
_FOLDER = re.compile(rf"^.+\.[0-9a-f]{{{ID_LETTERS}}}$")
_AT_A_TIME = 8
_LAST_WORD_S = 10.0
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def folders_of(path: ObjectPath) -> list[ObjectPath]:
    """The folders of saves below ``path``. Needs no ownership.

    Raises:
        OSError: the store gave no answer.
    """
    return [path / name for name in sorted(path.bucket.list_folders(path.key)) if is_folder(name)]


def is_folder(name: str) -> bool:
    """Whether this is the name of a save's folder."""
    return _FOLDER.match(name) is not None


def look_at_head(path: ObjectPath, bucket: Bucket | None = None) -> tuple[Head | None, Version]:
    """What the head of a directory says, and which state of it that is; None where it is damaged, as two reads say.

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
    """What the head of a directory says; None where there is none, or none that can be read. Needs no ownership.

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
    return is_there(folder / MANIFEST_NAME)


def manifest_in(folder: ObjectPath) -> tuple[Manifest, bytes] | None:
    """The manifest of ``folder``, and its bytes; None where a gravestone stands in its place.

    Raises:
        FileNotFoundError: neither is there, as two reads say.
        CorruptCheckpointError: it is damaged, as two reads say.
        UnsupportedFormatError: not ours, or of a newer version.
        OSError: two reads disagree; or the store gave no answer, or refuses.
    """

    def parse(data: bytes) -> tuple[Manifest | None, bytes]:
        return (None if is_gravestone(data) else parse_manifest(data, folder)), data

    manifest, data = parse_twice(folder / MANIFEST_NAME, parse)
    return None if manifest is None else (manifest, data)


def is_gravestone(data: bytes) -> bool:
    """Whether this stands in place of a manifest."""
    try:
        facts = json.loads(data)
    except ValueError:
        return False
    return isinstance(facts, dict) and facts.get("format") == GRAVESTONE


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
        bucket.replace(path.key, b"3", first)
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
