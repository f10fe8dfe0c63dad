"""Knowledge of the places that were used last. A run may save to ever new ones, and must not take ever more memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")
MOST = 64


class Recent(Generic[_K, _V]):
    """The entries that were used last, ``MOST`` of them. Any thread.

    Args:
        is_needed: tells of an entry whether it stays however long ago it was used.
    """

    def __init__(self, is_needed: Callable[[_V], bool] = lambda _: False) -> None:
        self._is_needed = is_needed
        self._entries: dict[_K, _V] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: _K) -> _V | None:
        """The entry; None where there is none, or no longer. That is no use of it."""
        with self._lock:
            return self._entries.get(key)

    def use(self, key: _K, make: Callable[[], _V]) -> _V:
        """The entry, made where there is none. It counts as the one that was used last."""
        with self._lock:
            value = self._entries[key] if key in self._entries else make()
            self._entries.pop(key, None)
            self._entries[key] = value
            for oldest, one in list(self._entries.items())[:-MOST]:
                if not self._is_needed(one):
                    self._entries.pop(oldest, None)
            return value
