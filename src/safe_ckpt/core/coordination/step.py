"""The keys of one entry of the operation log: the entry, every rank's answer, the verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from safe_ckpt.core.coordination.sealed_store import KeyValues
from safe_ckpt.core.coordination.store import Check, KeyTimeout, StoreClient
from safe_ckpt.errors import RendezvousTimeout


class LogEntry:
    """The keys of one entry of the log. With nobody else there, nothing is written."""

    def __init__(
        self, store_client: StoreClient, rank: int, size: int, name: str, kind: str, timeout_s: float, check: Check
    ) -> None:
        self._store_client = store_client
        self._rank = rank
        self._others = range(1, size)
        self._prefix = name
        self._check = check
        self.kind = kind
        self.timeout_s = timeout_s

    def put(self, suffix: str, value: object) -> None:
        """Rank 0: write one key of the entry."""
        if not self._others:
            return
        self._store_client.call(lambda store: store.set(self._prefix + suffix, json.dumps(value)), phase=self.kind)

    def get(self, suffix: str, *, patience: int = 1) -> Any:
        """Wait for one key of the entry.

        Raises:
            KeyTimeout: it did not appear in ``patience`` times the step's time.
        """
        key, wait_s = self._prefix + suffix, patience * self.timeout_s
        return json.loads(self._store_client.get(key, phase=self.kind, wait_s=wait_s, check=self._check))

    def answer(self, value: object) -> None:
        """Another rank: say what this rank has to say."""

        def arrive(store: KeyValues) -> None:
            store.set(f"{self._prefix}/{self._rank}", json.dumps(value))
            if store.add(f"{self._prefix}/count", 1) == len(self._others):
                store.set(f"{self._prefix}/all", "")

        self._store_client.call(arrive, phase=self.kind)

    def answers(self, mine: Mapping[str, str]) -> dict[int, Any]:
        """Append the entry and collect what every other rank answers to it.

        Raises:
            RendezvousTimeout: some did not answer in time; names them.
        """
        if not self._others:
            return {}
        self.put("", mine)
        try:
            self._store_client.get(f"{self._prefix}/all", phase=self.kind, wait_s=self.timeout_s, check=self._check)
        except KeyTimeout:
            found = self._answered()
            missing = tuple(rank for rank in self._others if rank not in found)
            raise RendezvousTimeout(phase=self.kind, seconds=self.timeout_s, missing=missing) from None
        return self._answered()

    def _answered(self) -> dict[int, Any]:
        keys = {rank: f"{self._prefix}/{rank}" for rank in self._others}

        def read(store: KeyValues) -> dict[int, bytes]:
            if store.check(list(keys.values())):
                return dict(zip(keys, store.multi_get(list(keys.values())), strict=True))
            return {rank: store.get(key) for rank, key in keys.items() if store.check([key])}

        return {rank: json.loads(value) for rank, value in self._store_client.call(read, phase=self.kind).items()}

    def hand_out(self, shares: Mapping[int, Any]) -> None:
        """Rank 0: leave a verdict of its own for every rank; each takes its share and drops it."""
        keys = [self._share(rank) for rank in self._others]
        if keys:
            values = [json.dumps(shares.get(rank)) for rank in self._others]
            self._store_client.call(lambda store: store.multi_set(keys, values), phase=self.kind)

    def take_share(self) -> Any:
        """Another rank: its share; there is one when the verdict says so."""

        def take(store: KeyValues) -> bytes:
            found = bytes(store.get(self._share(self._rank)))
            store.delete_key(self._share(self._rank))
            return found

        return json.loads(self._store_client.call(take, phase=self.kind))

    def _share(self, rank: int) -> str:
        return f"{self._prefix}/share/{rank}"

    def present(self) -> int:
        """How many ranks have answered."""
        return len(self._answered()) if self._others else 0

    def release(self) -> None:
        """Rank 0: it has failed. What still waits for answers, on a connection that was left, ends."""
        if self._others:
            self._store_client.call(lambda store: store.set(f"{self._prefix}/all", ""), phase=self.kind)

    def forget(self, before: Sequence[str]) -> None:
        """Drop what nobody needs any more: these answers, and the entries ``before``, whose verdicts all have passed."""
        if not self._others:
            return
        keys = self._answer_keys(self._prefix)
        for name in before:
            keys += [name, f"{name}/verdict", f"{name}/read", *self._answer_keys(name)]
        self._store_client.call(lambda store: [store.delete_key(key) for key in keys], phase=self.kind)

    def _answer_keys(self, name: str) -> list[str]:
        return [f"{name}/count", f"{name}/all", *(f"{name}/{rank}" for rank in self._others)]
