"""One entry of the operation log: what rank 0 appends, what every rank answers, and what rank 0 makes of the answers."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safe_ckpt.core.coordination.mailbox import Mailbox
from safe_ckpt.core.coordination.store import Check, KeyTimeout, KeyValues, StoreClient
from safe_ckpt.core.coordination.wire import from_wire
from safe_ckpt.errors import DesyncError, RendezvousTimeout

logger = logging.getLogger(__name__)
Decide = Callable[[Mapping[int, Any]], Any]
"""Runs on rank 0 with every rank's answer; what it returns (JSON-able, or ``Scatter``) or raises is what every rank gets."""


@dataclass(frozen=True)
class Scatter:
    """A verdict of which every rank gets its own part, because the whole may be too much for each rank to read.

    Attributes:
        by_rank: JSON-able data for each rank.
    """

    by_rank: Mapping[int, Any]


def decided(entry: Mapping[str, str], answers: Mapping[int, Any], decide: Decide | None) -> Any:
    """The verdict on an entry, on rank 0. A rank's error is raised first: it may be why values differ.

    Args:
        entry: rank 0's own view.
        answers: every rank's ``answer`` or ``error``, and its ``view`` where that differs.
        decide: makes a verdict of the answers.

    Raises:
        DesyncError: the ranks are at different steps, or differ in a value.
        SafeCheckpointError: what the lowest rank that has failed reports.
    """
    views = {rank: answers[rank].get("view", entry) for rank in sorted(answers)}
    refuse_differences({rank: {"kind": view["kind"]} for rank, view in views.items()})
    for rank in views:
        if "error" in answers[rank]:
            raise from_wire(answers[rank]["error"])
    refuse_differences(views)
    return decide({rank: given["answer"] for rank, given in answers.items()}) if decide is not None else None


def reraise(problem: Exception | None) -> Callable[[], None]:
    """A ``local`` that raises what went wrong before the ranks meet, if anything did."""

    def local() -> None:
        if problem is not None:
            raise problem

    return local


def refuse_differences(views: Mapping[int, Mapping[str, object]]) -> None:
    """Raise where the ranks' values are not equal, as text.

    Raises:
        DesyncError: names the first such value, and every rank's.
    """
    for name in dict.fromkeys(key for view in views.values() for key in view):
        values = {str(rank): str(view.get(name)) for rank, view in sorted(views.items())}
        if len(set(values.values())) > 1:
            raise DesyncError(what=name, values=values)


class LogEntry:
    """The keys of one entry of the log.

    Args:
        store_client: the connection of the thread that this is used on.
        rank: this rank.
        size: number of ranks.
        name: what the keys begin with.
        kind: the name of the step.
        timeout_s: how long to wait for the others.
        check: called while waiting; raises when waiting has become pointless.
        call: the call of the user's that the step is a part of.
        elsewhere: the ranks that are alive and have not come to that call.
        say_s: when to say so.
    """

    def __init__(
        self,
        store_client: StoreClient,
        rank: int,
        size: int,
        name: str,
        kind: str,
        timeout_s: float,
        check: Check,
        *,
        call: str = "",
        elsewhere: Callable[[], Sequence[int]] = tuple,
        say_s: float = math.inf,
    ) -> None:
        self._store_client = store_client
        self._rank = rank
        self._others = range(1, size)
        self._check_others = check
        self._call = call or kind
        self._elsewhere = elsewhere
        self._begun, self._say_s = time.monotonic(), say_s
        self._answers = Mailbox(store_client, name, self._others)
        self.name = name
        self.kind = kind
        self.timeout_s = timeout_s

    def put(self, suffix: str, value: object) -> None:
        """Rank 0: write one key of the entry."""
        self._store_client.put(self.name + suffix, value, phase=self.kind)

    def get(self, suffix: str, *, patience: int = 1) -> Any:
        """Wait for one key of the entry.

        Raises:
            KeyTimeout: it did not appear in ``patience`` times the step's time.
        """
        key, wait_s = self.name + suffix, patience * self.timeout_s
        return self._store_client.get(key, phase=self.kind, wait_s=wait_s, check=self._check)

    def answer(self, value: object) -> None:
        """Another rank: answer the entry."""
        self._answers.post(self._rank, value, phase=self.kind)

    def answers(self, mine: Mapping[str, str]) -> dict[int, Any]:
        """Append the entry and collect what every other rank answers to it.

        Raises:
            RendezvousTimeout: some did not answer in time; names them.
        """
        self.put("", mine)
        try:
            self._answers.wait(phase=self.kind, wait_s=self.timeout_s, check=self._check)
        except KeyTimeout:
            answered = self._answers.messages(phase=self.kind)
            raise self.too_late([rank for rank in self._others if rank not in answered]) from None
        return self._answers.messages(phase=self.kind)

    def too_late(self, missing: Sequence[int]) -> RendezvousTimeout:
        """The error for ranks that did not come. It names the user's call if they are alive and elsewhere."""
        phase = self.kind if self.kind == self._call else f"{self._call} ({self.kind})"
        call = self._call if set(missing) <= set(self._elsewhere()) else ""
        return RendezvousTimeout(phase=phase, seconds=self.timeout_s, missing=tuple(missing), call=call)

    def _check(self) -> None:
        """Called while waiting. Long before the time is over it says who is elsewhere: that may be a mistake in the script."""
        self._check_others()
        waited_s = time.monotonic() - self._begun
        missing = self._elsewhere() if waited_s >= self._say_s else ()
        if missing:
            self._say_s = math.inf
            logger.warning(
                "%s: waiting for ranks %s, which are alive and somewhere else. All processes must call %s, not one of them "
                "alone. Waiting for %.0f s more",
                self._call,
                sorted(missing),
                self._call,
                self.timeout_s - waited_s,
            )

    def conclude(self, result: Any) -> Any:
        """Rank 0: publish what was decided; of ``Scatter`` to every rank its own. Returns what is rank 0's."""
        if not isinstance(result, Scatter):
            self.put("/verdict", {"ok": result})
            return result
        shares = {self._share(rank): json.dumps(result.by_rank.get(rank)) for rank in self._others}

        def hand_out(store: KeyValues) -> None:
            # One by one: it is not answered, so nothing waits. A single request of many MiB takes the store's host seconds.
            for key, share in shares.items():
                store.set(key, share)

        self._store_client.call(hand_out, phase=self.kind)
        self.put("/verdict", {"shared": True})
        return result.by_rank.get(0)

    def fail(self, wire: Mapping[str, Any]) -> None:
        """Rank 0: publish the error. What still waits for answers, on a connection that was left, ends."""
        self.put("/verdict", {"error": wire})
        self._answers.wake({}, phase=self.kind)

    def present(self) -> int:
        """Rank 0: how many other ranks have answered."""
        return self._answers.posted(phase=self.kind)

    def take_share(self) -> Any:
        """Another rank: its share, if the verdict has shares."""
        key = self._share(self._rank)

        def take(store: KeyValues) -> bytes:
            value = bytes(store.get(key))
            store.delete_key(key)
            return value

        return json.loads(self._store_client.call(take, phase=self.kind))

    def _share(self, rank: int) -> str:
        return f"{self.name}/share/{rank}"

    def forget(self, before: Sequence[str]) -> None:
        """Have the answers to this entry deleted, and the keys of entries ``before`` it. Does not wait for that."""
        self._store_client.begin_delete([*self._answers.keys(), *before], phase=self.kind)

    def keys(self, *, answers: bool = False) -> list[str]:
        """What is to be dropped when all have passed this entry, with the ``answers`` to it where ``forget`` did not."""
        return [self.name, f"{self.name}/verdict", self.read, *(self._answers.keys() if answers else ())]

    @property
    def read(self) -> str:
        """What every rank counts up that has read the verdict."""
        return f"{self.name}/read"
