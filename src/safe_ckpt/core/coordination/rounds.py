"""Messages of several ranks to a rank that waits for all of them, and the two-phase commit of a save: keys in a store.

A rank sets its own key and adds one to a counter. The last one sets the key that is waited for. So no rank polls, and a
wait costs one request however many ranks there are. No collectives.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from safe_ckpt.core.coordination.store import Check, KeyTimeout, KeyValues, StoreClient, read_present
from safe_ckpt.errors import PeerLostError, RendezvousTimeout, SafeCheckpointError

if TYPE_CHECKING:
    from safe_ckpt.core.coordination.coordinator import Coordinator
import math
from dataclasses import dataclass

from safe_ckpt.errors import DesyncError, facts_of, named

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
            wake: end the wait early.
            drop: turns that are over on all ranks; their keys are deleted.
        """

        def arrive(store: KeyValues) -> None:
            store.set(self._by_rank[rank], json.dumps(message))
            if store.add(self._count(turn), 1) >= len(self._by_rank) or wake:
                store.set(self._all(turn), "{}")
            for key in self._turn_keys(drop):
                store.delete_key(key)

        self._store_client.call(arrive, phase=phase)

    def wake(self, value: Mapping[str, Any], *, phase: str, turns: Sequence[int] = (0,)) -> None:
        """End the wait for these turns early; ``value`` says why."""

        def wake(store: KeyValues) -> None:
            for turn in turns:
                store.set(self._all(turn), json.dumps(value))

        self._store_client.call(wake, phase=phase)

    def wait(self, *, phase: str, wait_s: float, check: Check, turn: int = 0) -> dict[str, Any]:
        """Wait until all have posted, or some rank has called ``wake``. Returns the ``value`` of that call, else nothing.

        Raises:
            KeyTimeout: neither came in time.
            PeerLostError: the store's host is lost, or ``check`` raised.
        """
        return dict(self._store_client.get(self._all(turn), phase=phase, wait_s=wait_s, check=check))

    def peek(self, *, phase: str, turn: int = 0) -> dict[str, Any] | None:
        """What ``wait`` would return now; None if it would wait."""
        key = self._all(turn)
        value = self._store_client.call(lambda store: store.get(key) if store.check([key]) else b"null", phase=phase)
        reason: dict[str, Any] | None = json.loads(value)
        return reason

    def posted(self, *, phase: str, turn: int = 0) -> int:
        """How many senders have posted."""
        return self._store_client.call(lambda store: store.add(self._count(turn), 0), phase=phase)

    def messages(self, *, phase: str) -> dict[int, Any]:
        """What has been posted so far, by rank."""
        keys = list(self._by_rank.values())
        values = self._store_client.call(lambda store: read_present(store, keys), phase=phase)
        return {rank: json.loads(values[key]) for rank, key in self._by_rank.items() if key in values}

    def keys(self, turns: Sequence[int] = (0,)) -> list[str]:
        """All keys that this writes, so that they can be deleted when it is over."""
        return [*self._turn_keys(turns), *self._by_rank.values()]

    def _turn_keys(self, turns: Sequence[int]) -> list[str]:
        return [key for turn in turns for key in (self._count(turn), self._all(turn))]

    def _count(self, turn: int) -> str:
        return f"{self._prefix}/count/{turn}"

    def _all(self, turn: int) -> str:
        return f"{self._prefix}/all/{turn}"


class Receipts:
    """On rank 0: which of its verdicts the others have not read yet. The verdicts are lost when the process ends."""

    def __init__(self) -> None:
        self._expected: dict[str, tuple[int, int]] = {}
        self._lock = threading.RLock()  # a save's thread expects some while the one that trains leaves

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
        """Stop waiting for these keys."""
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
            over: whether no other rank is left.
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
            # A lost rank may have read its verdict or not. So the missing receipt may be of a live rank, which gets a moment
            # more.
            if missing > lost():
                grace_from = None
            elif grace_from is None:
                grace_from = time.monotonic()
            elif time.monotonic() - grace_from > _GRACE_S:
                return
            time.sleep(0.005)
        logger.debug("left while some ranks had not read the last verdict")


class TwoPhaseCommit:
    """The keys of one save's background phases: prepared, wrote, verdict.

    Only rank 0 concludes. A rank that fails reports its error at once, so no rank waits for a timeout to learn of it. Used
    on the background thread alone.

    Args:
        coordinator: where the ranks meet.
        store_client: the connection of the thread that this is used on.
        op_id: unique to this save.
        writers: the other ranks that have something to write; rank 0 keeps its own report.
        check: called while waiting; raises when the save is to be given up.
        call: the number of the call that it began with.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        store_client: StoreClient,
        op_id: str,
        writers: Sequence[int],
        check: Check,
        call: int,
    ) -> None:
        self._call = call
        self._coordinator = coordinator
        self._store_client = store_client
        self._check = check
        self._writers = tuple(writers)
        self._prefix = f"op/{op_id}"
        self._reports = Mailbox(store_client, f"{self._prefix}/wrote", writers)

    def prepared(self) -> None:
        """Rank 0: the pending directory exists."""
        self._set("prepared", {})

    def await_prepared(self, timeout_s: float) -> None:
        """Another writing rank: wait until the pending directory exists, or the save has failed.

        Raises:
            RendezvousTimeout: rank 0 did neither in time.
            PeerLostError: rank 0 died or stopped.
        """
        try:
            self._get("prepared", "prepare", timeout_s)
        except KeyTimeout:
            raise RendezvousTimeout(phase="prepare", seconds=timeout_s, missing=(0,)) from None

    def report(self, value: Mapping[str, Any]) -> None:
        """A writing rank: what it wrote, or ``{"error": ...}``."""
        self._reports.post(self._coordinator.rank, value, phase="write", wake="error" in value)

    def reports(self, timeout_s: float) -> dict[int, Any]:
        """Rank 0: what the writing ranks reported; fewer than all only when one of them reported an error.

        Raises:
            RendezvousTimeout: some did not report in time; names them.
            PeerLostError: one of them died or stopped before it reported.
        """
        deadline = time.monotonic() + timeout_s
        needed = list(self._writers)
        while True:
            left_s = max(0.001, deadline - time.monotonic())
            try:
                self._reports.wait(phase="write", wait_s=left_s, check=self._checked(needed))
                return self._reported()
            except KeyTimeout:
                missing = tuple(rank for rank in self._writers if rank not in self._reported())
                raise RendezvousTimeout(phase="write", seconds=timeout_s, missing=missing) from None
            except PeerLostError:
                # One that reported and died afterwards is not missed.
                reported = self._reported()
                needed = [rank for rank in self._writers if rank not in reported]
                self._check_peers(needed)

    def conclude(self, verdict: Mapping[str, Any]) -> None:
        """Rank 0: publish the outcome. ``prepared`` is set too, so that the ranks that wait there wake up."""
        if self._coordinator.size == 1:
            return
        self._coordinator.receipts.expect(self._read, self._coordinator.size - 1, self._call)
        self._set("verdict", verdict)
        self._set("prepared", {})
        if "error" in verdict and self._writers:
            self._reports.wake({}, phase="write")  # what still waits for reports, on a connection that was left, ends

    def verdict(self, timeout_s: float) -> Any:
        """The other ranks: wait for the outcome, and acknowledge that it was read.

        Raises:
            KeyTimeout: rank 0 did not conclude in time.
            PeerLostError: rank 0 died or stopped.
        """
        verdict = self._get("verdict", "commit", timeout_s)
        self._store_client.acknowledge(self._read, phase="commit")
        return verdict

    def leave(self) -> None:
        """Another rank: give up without being able to report it now."""
        self._coordinator.leave(self._call)

    def refuse_left(self) -> None:
        """Rank 0, before it commits: refuse if some rank has already raised an error for this save.

        Raises:
            PeerLostError: some ranks gave it up; names them.
        """
        self._refuse(self._coordinator.have_left(self._call))

    def _check_peers(self, needed: Sequence[int]) -> None:
        self._coordinator.check(needed)
        self._refuse(tuple(rank for rank in self._coordinator.have_left(self._call) if rank in needed))

    def _refuse(self, gone: tuple[int, ...]) -> None:
        if gone:
            raise PeerLostError(
                phase="write", ranks=gone, reason="it gave this save up while it could not reach rank 0"
            )

    def failed_elsewhere(self) -> SafeCheckpointError | None:
        """The error of another rank, so that this one can stop working for a save that has failed."""
        if self._coordinator.rank == 0 and not self._writers:
            return None
        if self._coordinator.rank == 0:
            reports = self._reported().values() if self._reports.peek(phase="write") is not None else ()
            return next((from_wire(report["error"]) for report in reports if "error" in report), None)
        if not self._store_client.call(lambda store: store.check([f"{self._prefix}/verdict"]), phase="write"):
            return None
        verdict = self._get("verdict", "write", 1.0)
        return from_wire(verdict["error"]) if "error" in verdict else None

    def forget(self) -> bool:
        """Rank 0: drop the keys if every rank has read the verdict. Returns whether they are gone."""
        if self._coordinator.size == 1:
            return True
        read = self._store_client.call(lambda store: store.add(self._read, 0), phase="commit")
        if read + len(self._coordinator.have_left(self._call)) < self._coordinator.size - 1:
            return False
        keys = [f"{self._prefix}/prepared", f"{self._prefix}/verdict", self._read, *self._reports.keys()]
        self._store_client.delete(keys, phase="commit")
        self._coordinator.receipts.drop(self._read)
        return True

    @property
    def _read(self) -> str:
        return f"{self._prefix}/read"

    def _reported(self) -> dict[int, Any]:
        return self._reports.messages(phase="write")

    def _set(self, name: str, value: Mapping[str, Any]) -> None:
        if self._coordinator.size > 1:
            self._store_client.put(f"{self._prefix}/{name}", value, phase=name)

    def _get(self, name: str, phase: str, timeout_s: float) -> Any:
        check = self._checked([0])
        return self._store_client.get(f"{self._prefix}/{name}", phase=phase, wait_s=timeout_s, check=check)

    def _checked(self, needed: Sequence[int]) -> Check:
        def check() -> None:
            self._check()
            self._check_peers(needed)

        return check


# One entry of the operation log: what rank 0 appends, what every rank answers, and what rank 0 makes of the answers.

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


# Errors on their way from one rank or process to another, as JSON-able data.


def to_wire(error: BaseException, *, rank: int, phase: str) -> dict[str, Any]:
    """Turn an error into JSON-able data for other ranks and processes, with all its fields.

    A foreign one travels as ``named`` has it: its class may not be importable where the data arrives.
    """
    ours = named(error, rank=rank, phase=phase)
    return {"type": type(ours).__name__, "fields": facts_of(ours)}


def from_wire(data: Mapping[str, Any]) -> SafeCheckpointError:
    """Rebuild the error that ``to_wire`` described."""
    kind = _tree(SafeCheckpointError)[str(data["type"])]
    facts = {key: tuple(value) if isinstance(value, list) else value for key, value in data["fields"].items()}
    return kind(**facts)


def _tree(root: type[SafeCheckpointError]) -> dict[str, type[SafeCheckpointError]]:
    kinds = {root.__name__: root}
    for child in root.__subclasses__():
        kinds.update(_tree(child))
    return kinds
