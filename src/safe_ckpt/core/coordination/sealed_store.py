"""A store whose values were written by ranks of this job, or are refused.

A ``TCPStore`` asks nobody who he is: whoever reaches its port can read, write and delete. So every value is sealed with a
secret that the ranks got through their process group's own store. What others write is found out when it is read, and no
value is ever run: all are JSON. Others who reach the port can still read, delete and count up: they can disturb a job, not
make it do anything.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from safe_ckpt.errors import TamperedError

if TYPE_CHECKING:
    from safe_ckpt.core.coordination.process_groups import Store

_SEAL_BYTES = 16


class KeyValues(Protocol):
    """What this package uses of a store: ``SealedStore``, and a process group's own store as far as ranks first meet there."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Read a value; waits for it."""

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        """Write several values."""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read several values, all of which are there."""

    def add(self, key: str, amount: int) -> int:
        """Count up, and return the sum."""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of ``keys`` are there."""

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all of ``keys`` are there."""

    def delete_key(self, key: str) -> bool:
        """Drop a key. Returns whether it was there."""


class SealedStore:
    """The part of a store's methods that this package uses, with sealed values. Counters are not sealed.

    Args:
        store: where everything is kept.
        secret: the same for all ranks of the session, and known to nobody else.
    """

    def __init__(self, store: Store, secret: str) -> None:
        self._store = store
        self._secret = hashlib.sha256(secret.encode()).digest()

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._store.set(key, self._sealed(key, value))  # type: ignore[arg-type] # the stubs know text only

    def get(self, key: str) -> bytes:
        """Read a value; waits for it as the store does.

        Raises:
            TamperedError: no rank of this job wrote it.
        """
        return self._opened(key, bytes(self._store.get(key)))

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        """Write several values."""
        sealed = [self._sealed(key, value) for key, value in zip(keys, values, strict=True)]
        self._store.multi_set(list(keys), sealed)  # type: ignore[attr-defined] # torch's stubs do not know it

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read several values, all of which are there.

        Raises:
            TamperedError: no rank of this job wrote one of them.
        """
        values = self._store.multi_get(list(keys))
        return [self._opened(key, bytes(value)) for key, value in zip(keys, values, strict=True)]

    def add(self, key: str, amount: int) -> int:
        """Count up, and return the sum."""
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of ``keys`` are there."""
        return self._store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all of ``keys`` are there."""
        self._store.wait(list(keys), timeout)

    def delete_key(self, key: str) -> bool:
        """Drop a key. Returns whether it was there."""
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._store.num_keys()

    def _sealed(self, key: str, value: str) -> bytes:
        data = value.encode()
        return self._seal(key, data) + data

    def _opened(self, key: str, found: bytes) -> bytes:
        seal, data = found[:_SEAL_BYTES], found[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(key, data)):
            raise TamperedError(key=key)
        return data

    def _seal(self, key: str, data: bytes) -> bytes:
        # With the length of the key before it: no other key and value give the same bytes.
        name = key.encode()
        seal = hashlib.blake2b(len(name).to_bytes(4, "big") + name, key=self._secret, digest_size=_SEAL_BYTES)
        seal.update(data)
        return seal.digest()
