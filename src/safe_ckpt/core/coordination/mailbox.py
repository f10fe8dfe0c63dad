"""Messages of several ranks to whoever waits for all of them, and receipts for what rank 0 publishes: keys in a store.

A rank sets its own key and adds one to a counter; the last one sets the key that everybody waits for. So nobody polls, and
a wait costs one request however many ranks there are.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from safe_ckpt.core.coordination.store import Check, KeyValues, StoreClient, read_present

logger = logging.getLogger(__name__)
_GRACE_S = 3.0


class Mailbox:
    """One message of every sender, and a key that is set when all have come. A sender may post again in each further turn.

    Args:
        store_client: the connection of the thread that this is used on.
        prefix: of all keys.
        senders: the ranks that post.
    """

    def __init__(self, store_client: StoreClient, prefix: str, senders: Iterable[int]) -> None:
        self._store_client = store_client
        self._prefix = prefix
        self._by_rank = {rank: f"{prefix}/from/{rank}" for rank in senders}

    def post(
        self, rank: int, message: object, *, phase: str, turn: int = 0, wake: bool = False, drop: Sequence[int] = ()
    ) -> None:
        """Leave this rank's message, in place of that of an earlier turn.

        Args:
            rank: this rank.
            message: JSON-able data.
            phase: what this is for; named in errors.
            turn: which one.
            wake: whoever waits need not wait for the others.
            drop: turns that are over on all ranks: their keys go.
        """

        def arrive(store: KeyValues) -> None:
            store.set(self._by_rank[rank], json.dumps(message))
            if store.add(self._count(turn), 1) >= len(self._by_rank) or wake:
                store.set(self._all(turn), "{}")
            for key in self._turn_keys(drop):
                store.delete_key(key)

        self._store_client.call(arrive, phase=phase)

    def wake(self, value: Mapping[str, Any], *, phase: str, turns: Sequence[int] = (0,)) -> None:
        """Whoever waits for these turns need not wait for the others; ``value`` says why."""

        def wake(store: KeyValues) -> None:
            for turn in turns:
                store.set(self._all(turn), json.dumps(value))

        self._store_client.call(wake, phase=phase)

    def wait(self, *, phase: str, wait_s: float, check: Check, turn: int = 0) -> dict[str, Any]:
        """Wait until all have posted, or some rank has called ``wake``. Returns what that one said, else nothing.

        Raises:
            KeyTimeout: neither came in time.
            PeerLostError: the store's host is lost, or ``check`` raised.
        """
        return dict(self._store_client.get(self._all(turn), phase=phase, wait_s=wait_s, check=check))

    def peek(self, *, phase: str, turn: int = 0) -> dict[str, Any] | None:
        """What ``wait`` would return at once; None while it would wait."""
        key = self._all(turn)
        value = self._store_client.call(lambda store: store.get(key) if store.check([key]) else b"null", phase=phase)
        reason: dict[str, Any] | None = json.loads(value)
        return reason

    def messages(self, *, phase: str) -> dict[int, Any]:
        """What has been posted so far, by rank."""
        keys = list(self._by_rank.values())
        values = self._store_client.call(lambda store: read_present(store, keys), phase=phase)
        return {rank: json.loads(values[key]) for rank, key in self._by_rank.items() if key in values}

    def keys(self, turns: Sequence[int] = (0,)) -> list[str]:
        """All that this writes, for whoever drops it when it is over."""
        return [*self._turn_keys(turns), *self._by_rank.values()]

    def _turn_keys(self, turns: Sequence[int]) -> list[str]:
        return [key for turn in turns for key in (self._count(turn), self._all(turn))]

    def _count(self, turn: int) -> str:
        return f"{self._prefix}/count/{turn}"

    def _all(self, turn: int) -> str:
        return f"{self._prefix}/all/{turn}"


class Receipts:
    """On rank 0: which of its verdicts are still to be read. Its store ends with the process, and a verdict with the store."""

    def __init__(self) -> None:
        self._expected: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()  # a save's thread expects some while the one that trains leaves

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, key: str, count: int, call: int = -1, *, instead_of: str = "") -> None:
        """Expect that ``key`` is counted up.

        Args:
            key: which one.
            count: how many ranks do so.
            call: of which call; a rank that gives it up is not waited for.
            instead_of: who has read this one has read those that begin so.
        """
        with self._lock:
            if instead_of:
                self._expected = {k: v for k, v in self._expected.items() if not k.startswith(instead_of)}
            self._expected[key] = count, call

    def drop(self, *keys: str) -> None:
        """These have come, or nobody needs them any more."""
        with self._lock:
            for key in keys:
                self._expected.pop(key, None)

    def await_all(
        self,
        store_client: StoreClient,
        *,
        within_s: float,
        have_left: Callable[[int], Sequence[int]],
        lost: Callable[[], int],
        over: Callable[[], bool],
    ) -> None:
        """Wait until the verdicts have been read by all that will.

        Args:
            store_client: a connection to this process's own store.
            within_s: how long at most.
            have_left: the ranks that have given up a call.
            lost: how many ranks are lost now.
            over: whether nobody is there any more.
        """
        deadline = time.monotonic() + within_s
        grace_from: float | None = None

        def unread(store: KeyValues) -> int:
            with self._lock:
                expected = list(self._expected.items())
            return max((n - len(have_left(call)) - store.add(key, 0) for key, (n, call) in expected), default=0)

        while time.monotonic() < deadline and not over():
            missing = store_client.call(unread, phase="close")
            if missing <= 0:
                return
            # A lost rank may have read or not, so what is missing may be its reading or that of one that lives: those that
            # live get a moment more.
            if missing > lost():
                grace_from = None
            elif grace_from is None:
                grace_from = time.monotonic()
            elif time.monotonic() - grace_from > _GRACE_S:
                return
            time.sleep(0.005)
        logger.debug("left while some ranks had not read the last verdict")
