"""A place in a bucket: what a path is in a file system."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safe_ckpt.core.storage.objects.bucket import Bucket
from safe_ckpt.core.storage.objects.options import StorageOptions, is_url, require_obstore, variables
from safe_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from safe_ckpt.config import StorageConfig


class ObjectPath:
    """A key, or what keys below it begin with. Compared, hashed and shown as its address.

    A pickle holds the address alone: where it is loaded, the environment says how the store is reached.

    Args:
        bucket: where.
        key: without a slash at either end; "" for the bucket as a whole.
    """

    __slots__ = ("bucket", "key")

    def __init__(self, bucket: Bucket, key: str) -> None:
        self.bucket = bucket
        self.key = key

    def __str__(self) -> str:
        return f"{self.bucket.url}/{self.key}" if self.key else self.bucket.url

    def __repr__(self) -> str:
        return f"ObjectPath({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (str(self),)

    def __copy__(self) -> ObjectPath:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ObjectPath:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __lt__(self, other: ObjectPath) -> bool:
        return str(self) < str(other)

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.bucket, f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """The last part."""
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The end of the name from its last dot on; "" where there is none."""
        _, dot, end = self.name.rpartition(".")
        return dot + end if dot else ""

    @property
    def parent(self) -> ObjectPath:
        """The place that it lies in."""
        return ObjectPath(self.bucket, self.key.rpartition("/")[0])

    def at(self, address: str) -> ObjectPath:
        """Return the place that ``address`` names, in the same bucket.

        Raises:
            ValueError: it is elsewhere.
        """
        start = f"{self.bucket.url}/"
        if not address.startswith(start):
            raise ValueError(f"{address} does not lie in {self.bucket.url}")
        return ObjectPath(self.bucket, address[len(start) :])

    @property
    def options(self) -> StorageOptions:
        """How its store is reached."""
        return self.bucket.options

    def within(self, seconds: float, stop: Callable[[], None] | None = None) -> ObjectPath:
        """The same place, with another deadline for each request, and another ``Bucket.stop``."""
        return ObjectPath(self.bucket.within(seconds, stop), self.key)

    def read_range(self, start: int, length: int) -> memoryview:
        """Read a part of the object: see ``Bucket.read_range``."""
        return self.bucket.read_range(self.key, start, length)

    def upload(self, size_bytes: int, pieces: Callable[[], Iterator[Any]]) -> None:
        """Write the object: see ``Bucket.upload``."""
        self.bucket.upload(self.key, size_bytes, pieces)

    def afresh(self) -> ObjectPath:
        """The same place, over other connections."""
        return ObjectPath(self.bucket.afresh(), self.key)

    def below(self, other: ObjectPath) -> str:
        """Return the name of this below ``other``."""
        return self.key[len(other.key) :].lstrip("/")


Place = Path | ObjectPath
"""Where a checkpoint is."""


def open_place(url: str, options: StorageOptions, key: str = "directory") -> ObjectPath:
    """The place that ``url`` names, such as ``s3://bucket/run``.

    Args:
        url: the address.
        options: how to reach it.
        key: what the user gave the address as, for messages.

    Raises:
        ConfigError: it is none, obstore is not installed, or does not take the options.
    """
    if not is_url(url, key):
        raise ConfigError(key=key, message=f"{url!r} is no address of an object store")
    require_obstore(key)
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    parts: Sequence[str] = [part for part in path.split("/") if part]
    return ObjectPath(_bucket(scheme, bucket, options, tuple(variables().items())), "/".join(parts))


def _reopened(address: str) -> ObjectPath:
    """Rebuild what a pickle was made of. Pickles name this function: do not rename it."""
    return open_place(address, StorageOptions())


@functools.lru_cache(maxsize=16)  # each has its own connections
def _bucket(scheme: str, name: str, options: StorageOptions, seen: tuple[tuple[str, str], ...]) -> Bucket:
    del seen  # what it found in the environment: where that has changed, it is another one
    return Bucket(scheme, name, options)


def place_of(path: str | os.PathLike[str], storage: StorageConfig, give_up_after_s: float) -> Place:
    """Return the place that a user has named: an address, or a path. That is made absolute: programs change their directory.

    Raises:
        ConfigError: see ``open_place``.
    """
    if is_url(path):
        return open_place(os.fspath(path), StorageOptions.of(storage, give_up_after_s))
    return absolute(path)


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return what a user's path means now: ``~`` as in a shell, and a program may change its working directory."""
    return Path(os.path.abspath(os.path.expanduser(path)))
