"""Rank 0 has one rank of each other host do something there, and learns how it went: the calls of a directory on each host.

Each call has a number. A host's thread does them in that order, so what comes behind one that was given up finds it done or
not done, and never under way. No collectives.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from safe_ckpt.core.coordination.coordinator import Coordinator
from safe_ckpt.core.coordination.rounds import from_wire, to_wire
from safe_ckpt.core.coordination.store import KeyTimeout
from safe_ckpt.errors import CoordinationError, RendezvousTimeout, SafeCheckpointError

logger = logging.getLogger(__name__)
_SLICE_S = 5.0
_END = "end"
Action = Callable[[Mapping[str, Any]], Any]


class HostCalls:
    """The calls of rank 0. One thread at a time makes one.

    Args:
        coordinator: where the ranks meet.
        name: unique to this directory in this session.
        leaders: the ranks that answer, one a host.
    """

    def __init__(self, coordinator: Coordinator, name: str, leaders: Sequence[int]) -> None:
        self._coordinator = coordinator
        self._name = name
        self._leaders = tuple(leaders)
        self._store_client = coordinator.store_client("hosts")
        self._lock = threading.RLock()
        self._number = 0

    def call(
        self,
        action: str,
        args: Mapping[str, Any] | None = None,
        *,
        limit_s: float,
        only: Sequence[int] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> dict[int, Any]:
        """Have ``action`` done on each other host, and wait for it.

        Args:
            action: one that ``HostAgent`` knows.
            args: JSON-able.
            limit_s: how long it may take.
            only: the leaders of the hosts that do it; the others answer None.
            check: called while waiting; raises to give up.

        Returns:
            The answers, by leader.

        Raises:
            RendezvousTimeout: some did not answer in time; names them.
            PeerLostError: one died or stopped.
            SafeCheckpointError: what it raised on the lowest of them.
        """
        phase = f"{action} on each host"
        with self._lock:
            number, self._number = self._number, self._number + 1
            asked = {"action": action, "args": dict(args or {}), "only": None if only is None else list(only)}
            self._store_client.put(_ask(self._name, number), asked, phase=phase)
            deadline = time.monotonic() + limit_s
            answers = {rank: self._answer(rank, number, phase, deadline, limit_s, check) for rank in self._leaders}
            keys = [_ask(self._name, number), *(_answer(self._name, number, rank) for rank in self._leaders)]
            self._store_client.begin_delete(keys, phase=phase)
        for rank in self._leaders:
            if "error" in answers[rank]:
                raise from_wire(answers[rank]["error"])
        return {rank: answers[rank]["ok"] for rank in self._leaders}

    def close(self, *, limit_s: float) -> None:
        """Let the others end. Never raises."""
        try:
            self.call(_END, limit_s=limit_s)
        except SafeCheckpointError as error:
            logger.debug("the other hosts were not told of the end: %s", error)
        self._store_client.close()

    def _answer(
        self, rank: int, number: int, phase: str, deadline: float, limit_s: float, check: Callable[[], None]
    ) -> dict[str, Any]:
        def look() -> None:
            check()
            self._coordinator.check([rank])

        try:
            left_s = max(0.001, deadline - time.monotonic())
            answer: dict[str, Any] = self._store_client.get(
                _answer(self._name, number, rank),
                phase=phase,
                wait_s=left_s,
                check=look,
            )
        except KeyTimeout:
            raise RendezvousTimeout(phase=phase, seconds=limit_s, missing=(rank,)) from None
        return answer


class HostAgent:
    """Answers on one rank of another host, on a thread of its own, until rank 0 lets it end or is lost.

    Args:
        coordinator: where the ranks meet.
        name: as rank 0 has it.
        actions: by their names; what one raises, rank 0 raises.
        ended: called at the end, on that thread, once or twice.
    """

    def __init__(
        self, coordinator: Coordinator, name: str, actions: Mapping[str, Action], ended: Callable[[], None]
    ) -> None:
        self._coordinator = coordinator
        self._name = name
        self._actions = actions
        self._ended = ended
        self._store_client = coordinator.store_client("hosts")
        self._stop = threading.Event()
        self.calls = 0
        self._thread = threading.Thread(target=self._serve, name="safe_ckpt-host", daemon=True)
        self._thread.start()

    def wait(self, limit_s: float) -> None:
        """Wait until rank 0 has let it end: as long as something moves, and ``limit_s`` for what does not."""
        progress = self._coordinator.progress
        seen, until = (self.calls, progress()), time.monotonic() + limit_s
        while self._thread.is_alive() and time.monotonic() < until:
            self._thread.join(timeout=0.1)
            if (now := (self.calls, progress())) != seen:
                seen, until = now, time.monotonic() + limit_s
        self._stop.set()
        self._store_client.close()

    def _serve(self) -> None:
        number = 0
        try:
            while not self._stop.is_set():
                with contextlib.suppress(KeyTimeout):
                    asked = self._store_client.get(
                        _ask(self._name, number), phase="waiting for rank 0", wait_s=_SLICE_S, check=self._check
                    )
                    if asked["action"] == _END:
                        self._ended()  # before rank 0 goes on: another job may follow at once
                    answer = self._answer(asked)
                    key = _answer(self._name, number, self._coordinator.rank)
                    self._store_client.put(key, answer, phase=asked["action"])
                    number += 1
                    self.calls = number
                    if asked["action"] == _END:
                        return
        except (CoordinationError, json.JSONDecodeError) as error:
            logger.debug("rank 0 asks nothing of this host any more: %s", error)
        finally:
            self._ended()

    def _check(self) -> None:
        if self._stop.is_set():
            raise KeyTimeout("over")
        self._coordinator.check([0])

    def _answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        only, rank = asked["only"], self._coordinator.rank
        if asked["action"] == _END or (only is not None and rank not in only):
            return {"ok": None}
        try:
            answer = {"ok": self._actions[asked["action"]](asked["args"])}
            json.dumps(answer)  # else this thread would end by it, and rank 0 would wait
            return answer
        except Exception as error:  # raised on rank 0, which asked
            return {"error": to_wire(error, rank=rank, phase=asked["action"])}


def _ask(name: str, number: int) -> str:
    return f"hosts/{name}/ask/{number}"


def _answer(name: str, number: int, rank: int) -> str:
    return f"hosts/{name}/answer/{number}/{rank}"
