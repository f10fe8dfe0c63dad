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
from safe_ckpt.core.formats.manifest import MANIFEST_NAME
from safe_ckpt.core.storage.objects.answers import ChangedError, ExistsError
from safe_ckpt.core.storage.objects.place import ObjectPath

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


def read_head(path: ObjectPath) -> Head | None:
    """What the head of a directory says; None where there is none, or none that can be read. Needs no ownership.

    Raises:
        OSError: the store gave no answer, or refuses.
    """
    place = path / HIDDEN / HEAD
    try:
        return Head.from_bytes(path.bucket.read(place.key)[0], place)
    except FileNotFoundError:
        return None


def hidden_in(path: ObjectPath) -> tuple[str, ...]:
    """The folders below ``path`` that are being deleted or are in quarantine. Needs no ownership.

    Raises:
        OSError: the store gave no answer.
    """
    head = read_head(path)
    return (*head.trash, *head.quarantined) if head is not None else ()


def has_manifest(folder: ObjectPath) -> bool:
    """Whether ``folder`` has a manifest, whatever that says.

    Raises:
        OSError: the store gave no answer, or refuses.
    """
    try:
        folder.bucket.size_of((folder / MANIFEST_NAME).key)
    except FileNotFoundError:
        return False
    return True


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
