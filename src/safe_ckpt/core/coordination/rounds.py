"""Exchanges between rank 0 and the other ranks, through keys in a store: entries of the log, the two-phase commit of a save.

A rank sets its own key and adds one to a counter. The last one sets the key that is waited for. So no rank polls, and a
wait costs one request however many ranks there are. No collectives.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from safe_ckpt.core.coordination.reminder import Reminder
from safe_ckpt.core.coordination.store import Check, KeyTimeout, KeyValues, StoreClient, read_present
from safe_ckpt.errors import (
    CoordinationError,
    DesyncError,
    PeerLostError,
    RendezvousTimeout,
    SafeCheckpointError,
    fields_of,
    named,
)

logger = logging.getLogger(__name__)
_GRACE_S = 3.0


class Peers(Protocol):
    """The ranks of a session, as an exchange needs them.

    Attributes:
        rank: this rank.
        size: the number of ranks.
        receipts: of exchanges that are over.
    """

    rank: int
    size: int
    receipts: Receipts

    def check(self, needed: Sequence[int]) -> None:
        """Raise ``PeerLostError`` if one of the ``needed`` ranks is known to be dead or stopped."""

    def have_left(self, call: int) -> tuple[int, ...]:
        """On rank 0: the ranks that have given up that call."""

    def leave(self, call: int) -> None:
        """Give up a call that this rank cannot answer now."""


class Round:
    """The keys of one exchange: a message of every sender, what rank 0 says to all, and how many have read that.

    A further key is set when all messages have come. A sender may post again in each further turn.

    Args:
        store_client: the connection of the thread that this is used on.
        name: what the keys begin with.
        senders: the ranks that post.
        phase: what this is for; named in errors.
    """

    def __init__(self, store_client: StoreClient, name: str, senders: Iterable[int], phase: str) -> None:
        self._store_client = store_client
        self.name = name
        self.phase = phase
        self._by_rank = {rank: f"{name}/from/{rank}" for rank in senders}

    @property
    def read(self) -> str:
        """The key that each rank counts up once it has read what rank 0 said last."""
        return f"{self.name}/read"

    def put(self, suffix: str, value: object) -> None:
        """Rank 0: say something to all."""
        self._store_client.put(self.name + suffix, value, phase=self.phase)

    def get(self, suffix: str, *, wait_s: float, check: Check, phase: str = "") -> Any:
        """Wait for what rank 0 says.

        Raises:
            KeyTimeout: it did not come in time.
            PeerLostError: the store's host is lost, or ``check`` raised.
        """
        return self._store_client.get(self.name + suffix, phase=phase or self.phase, wait_s=wait_s, check=check)

    def acknowledge(self) -> None:
        """Count that this rank has read it."""
        self._store_client.acknowledge(self.read, phase=self.phase)

    def post(self, rank: int, message: object, *, turn: int = 0, wake: bool = False, drop: Sequence[int] = ()) -> None:
        """Leave this rank's message, in place of that of an earlier turn.

        Args:
            rank: this rank.
            message: JSON-able data.
            turn: which one.
            wake: end the wait early.
            drop: turns that are over on all ranks; their keys are deleted.
        """

        def arrive(store: KeyValues) -> None:
            store.set(self._by_rank[rank], json.dumps(message))
            if store.add(self._count(turn), 1) >= len(self._by_rank) or wake:
                store.set(self.name + self._all(turn), "{}")
            for key in self._turn_keys(drop):
                store.delete_key(key)

        self._store_client.call(arrive, phase=self.phase)

    def wake(self, value: Mapping[str, Any], *, turns: Sequence[int] = (0,)) -> None:
        """End the wait for these turns early; ``value`` says why."""
        for turn in turns:
            self.put(self._all(turn), value)

    def wait(self, *, wait_s: float, check: Check, turn: int = 0) -> dict[str, Any]:
        """Wait until all have posted, or some rank has called ``wake``. Returns the ``value`` of that call, else nothing.

        Raises:
            KeyTimeout: neither came in time.
            PeerLostError: the store's host is lost, or ``check`` raised.
        """
        return dict(self.get(self._all(turn), wait_s=wait_s, check=check))

    def peek(self, suffix: str = "", *, turn: int = 0) -> Any:
        """Return the value that is there now; None if one would have to wait for it.

        Args:
            suffix: of a value that rank 0 puts; "" for the value that ``wait`` would return.
            turn: of that ``wait``.
        """
        key = self.name + (suffix or self._all(turn))

        def look(store: KeyValues) -> bytes:
            return store.get(key) if store.check([key]) else b"null"

        return json.loads(self._store_client.call(look, phase=self.phase))

    def posted(self) -> int:
        """How many senders have posted."""
        return self._store_client.call(lambda store: store.add(self._count(0), 0), phase=self.phase)

    def messages(self) -> dict[int, Any]:
        """Return the messages that were posted so far, by rank."""
        keys = list(self._by_rank.values())
        values = self._store_client.call(lambda store: read_present(store, keys), phase=self.phase)
        return {rank: json.loads(values[key]) for rank, key in self._by_rank.items() if key in values}

    def message_keys(self, turns: Sequence[int] = (0,)) -> list[str]:
        """All keys of messages, so that they can be deleted when it is over."""
        return [*self._turn_keys(turns), *self._by_rank.values()]

    def _turn_keys(self, turns: Sequence[int]) -> list[str]:
        return [key for turn in turns for key in (self._count(turn), self.name + self._all(turn))]

    def _count(self, turn: int) -> str:
        return f"{self.name}/count/{turn}"

    def _all(self, turn: int) -> str:
        return f"/all/{turn}"


class Receipts:
    """On rank 0: which of its verdicts the others have not read yet. The verdicts are lost when the process ends."""

    def __init__(self) -> None:
        self._expected: dict[str, tuple[int, int, Sequence[str]]] = {}
        self._lock = threading.RLock()  # a save's thread expects some while the one that trains leaves

    def __len__(self) -> int:
        return len(self._expected)

    def expect(
        self, key: str, count: int, call: int = -1, *, instead_of: tuple[str, ...] = (), then_drop: Sequence[str] = ()
    ) -> None:
        """Expect that ``key`` is counted up.

        Args:
            key: which one.
            count: how many ranks do so.
            call: of which call; a rank that gives it up is not waited for.
            instead_of: who has read this one has read those that begin so.
            then_drop: keys that are not needed any more when they have.
        """
        with self._lock:
            if instead_of:
                self._expected = {k: v for k, v in self._expected.items() if not k.startswith(instead_of)}
            self._expected[key] = count, call, then_drop

    def tidy(self, store_client: StoreClient, have_left: Callable[[int], Sequence[int]]) -> bool:
        """Drop the keys of what has been read by all that will. Returns whether none are left.

        Args:
            store_client: a connection to this process's own store.
            have_left: the ranks that have given up a call.
        """
        with self._lock:
            kept = {key: one for key, one in self._expected.items() if one[2]}

        def drop(store: KeyValues) -> bool:
            read = [key for key, (n, call, _) in kept.items() if store.add(key, 0) + len(have_left(call)) >= n]
            for key in read:
                for one in (key, *kept[key][2]):
                    store.delete_key(one)
                with self._lock:
                    self._expected.pop(key, None)
            return len(read) == len(kept)

        return store_client.call(drop, phase="commit")

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
            return max((n - len(have_left(call)) - store.add(key, 0) for key, (n, call, _) in expected), default=0)

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


class TwoPhaseCommit(Round):
    """The keys of one save's background phases: prepared, the reports of what was written, verdict.

    Only rank 0 concludes. A rank that fails reports its error at once, so no rank waits for a timeout to learn of it. Used
    on the background thread alone.

    Args:
        peers: the ranks.
        store_client: the connection of the thread that this is used on.
        op_id: unique to this save.
        writers: the other ranks that have something to write; rank 0 keeps its own report.
        check: called while waiting; raises when the save is to be given up.
        call: the number of the call that it began with.
    """

    def __init__(
        self, peers: Peers, store_client: StoreClient, op_id: str, writers: Sequence[int], check: Check, call: int
    ) -> None:
        super().__init__(store_client, f"op/{op_id}", writers, "write")
        self._call = call
        self._peers = peers
        self._check = check
        self._writers = tuple(writers)

    def prepared(self) -> None:
        """Rank 0: the pending directory exists."""
        if self._peers.size == 1:
            return
        self.put("/prepared", {})
        with contextlib.suppress(CoordinationError):  # those of earlier saves; while the others write
            self._peers.receipts.tidy(self._store_client, self._peers.have_left)

    def await_prepared(self, timeout_s: float) -> None:
        """Another writing rank: wait until the pending directory exists, or the save has failed.

        Raises:
            RendezvousTimeout: rank 0 did neither in time.
            PeerLostError: rank 0 died or stopped.
        """
        try:
            self.get("/prepared", wait_s=timeout_s, check=self._checked([0]), phase="prepare")
        except KeyTimeout:
            raise RendezvousTimeout(phase="prepare", seconds=timeout_s, missing=(0,)) from None

    def report(self, value: Mapping[str, Any]) -> None:
        """A writing rank: what it wrote, or ``{"error": ...}``."""
        self.post(self._peers.rank, value, wake="error" in value)

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
                self.wait(wait_s=left_s, check=self._checked(needed))
                return self.messages()
            except KeyTimeout:
                missing = tuple(rank for rank in self._writers if rank not in self.messages())
                raise RendezvousTimeout(phase="write", seconds=timeout_s, missing=missing) from None
            except PeerLostError:
                # One that reported and died afterwards is not missed.
                reported = self.messages()
                needed = [rank for rank in self._writers if rank not in reported]
                self._check_peers(needed)

    def conclude(self, verdict: Mapping[str, Any]) -> None:
        """Rank 0: publish the outcome. ``prepared`` is set too, so that the ranks that wait there wake up."""
        if self._peers.size == 1:
            return
        keys = [f"{self.name}/prepared", f"{self.name}/verdict", *self.message_keys()]
        self._peers.receipts.expect(self.read, self._peers.size - 1, self._call, then_drop=keys)
        self.put("/verdict", verdict)
        self.put("/prepared", {})
        if "error" in verdict and self._writers:
            self.wake({})  # what still waits for reports, on a connection that was left, ends

    def verdict(self, timeout_s: float, *, given_up: bool = False) -> Any:
        """The other ranks: wait for the outcome, and acknowledge that it was read.

        Args:
            timeout_s: how long.
            given_up: it is wanted although this rank gives the save up.

        Raises:
            KeyTimeout: rank 0 did not conclude in time.
            PeerLostError: rank 0 died or stopped.
        """
        check = functools.partial(self._check_peers, [0]) if given_up else self._checked([0])
        verdict = self.get("/verdict", wait_s=timeout_s, check=check, phase="commit")
        self.acknowledge()
        return verdict

    def leave(self) -> None:
        """Another rank: give up without being able to report it now."""
        self._peers.leave(self._call)

    def refuse_if_a_rank_left(self) -> None:
        """Rank 0, before it commits: refuse if some rank has already raised an error for this save.

        Raises:
            PeerLostError: some ranks gave it up; names them.
        """
        self._refuse(self._peers.have_left(self._call))

    def failed_elsewhere(self) -> SafeCheckpointError | None:
        """The error of another rank, so that this one can stop working for a save that has failed."""
        if self._peers.rank != 0:
            said = [self.peek("/verdict") or {}]
        elif not self._writers:
            return None
        else:
            said = list(self.messages().values()) if self.peek() is not None else []
        return next((from_wire(one["error"]) for one in said if "error" in one), None)

    def _check_peers(self, needed: Sequence[int]) -> None:
        self._peers.check(needed)
        self._refuse(tuple(rank for rank in self._peers.have_left(self._call) if rank in needed))

    def _refuse(self, gone: tuple[int, ...]) -> None:
        if gone:
            reason = "it gave this save up while it could not reach rank 0"
            raise PeerLostError(phase="write", ranks=gone, reason=reason)

    def _checked(self, needed: Sequence[int]) -> Check:
        def check() -> None:
            self._check()
            self._check_peers(needed)

        return check


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


class LogEntry(Round):
    """One entry of the operation log: what rank 0 appends, what every rank answers, and what rank 0 makes of the answers.

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
        super().__init__(store_client, name, range(1, size), kind)
        self._rank = rank
        self._others = range(1, size)
        self._check_others = check
        self._call = call or kind
        self._elsewhere = elsewhere
        text = f"{self._call}: waiting for ranks %s, which are alive and somewhere else. All processes must call {self._call}"
        self._remind = Reminder(f"{text}, not one of them alone", say_s, timeout_s)
        self.timeout_s = timeout_s

    def said(self, suffix: str = "", *, patience: int = 1) -> Any:
        """Another rank: wait for the entry, or with ``"/verdict"`` for what was decided.

        Raises:
            KeyTimeout: it did not appear in ``patience`` times the step's time.
        """
        return self.get(suffix, wait_s=patience * self.timeout_s, check=self._check)

    def answer(self, value: object) -> None:
        """Another rank: answer the entry."""
        self.post(self._rank, value)

    def answers(self, mine: Mapping[str, str]) -> dict[int, Any]:
        """Append the entry and collect what every other rank answers to it.

        Raises:
            RendezvousTimeout: some did not answer in time; names them.
        """
        self.put("", mine)
        try:
            self.wait(wait_s=self.timeout_s, check=self._check)
        except KeyTimeout:
            answered = self.messages()
            raise self.too_late([rank for rank in self._others if rank not in answered]) from None
        return self.messages()

    def too_late(self, missing: Sequence[int]) -> RendezvousTimeout:
        """The error for ranks that did not come. It names the user's call if they are alive and elsewhere."""
        phase = self.phase if self.phase == self._call else f"{self._call} ({self.phase})"
        call = self._call if set(missing) <= set(self._elsewhere()) else ""
        return RendezvousTimeout(phase=phase, seconds=self.timeout_s, missing=tuple(missing), call=call)

    def _check(self) -> None:
        """Called while waiting. Long before the time is over it says who is elsewhere: that may be a mistake in the script."""
        self._check_others()
        self._remind(self._elsewhere)

    def conclude(self, result: Any) -> Any:
        """On rank 0: publish the decision; of a ``Scatter`` each rank's own share. Returns that of rank 0."""
        if not isinstance(result, Scatter):
            self.put("/verdict", {"ok": result})
            return result
        shares = {self._share(rank): json.dumps(result.by_rank.get(rank)) for rank in self._others}

        def hand_out(store: KeyValues) -> None:
            # One by one: it is not answered, so nothing waits. A single request of many MiB takes the store's host seconds.
            for key, share in shares.items():
                store.set(key, share)

        self._store_client.call(hand_out, phase=self.phase)
        self.put("/verdict", {"shared": True})
        return result.by_rank.get(0)

    def fail(self, wire: Mapping[str, Any]) -> None:
        """Rank 0: publish the error. What still waits for answers, on a connection that was left, ends."""
        self.put("/verdict", {"error": wire})
        self.wake({})

    def take_share(self) -> Any:
        """On another rank: take its share, if the verdict has shares."""
        key = self._share(self._rank)

        def take(store: KeyValues) -> bytes:
            value = bytes(store.get(key))
            store.delete_key(key)
            return value

        return json.loads(self._store_client.call(take, phase=self.phase))

    def _share(self, rank: int) -> str:
        return f"{self.name}/share/{rank}"

    def forget(self, before: Sequence[str]) -> None:
        """Have the answers to this entry deleted, and keys of what was ``before`` it. Does not wait for that."""
        self._store_client.begin_delete([*self.message_keys(), *before], phase=self.phase)

    def keys(self, *, answers: bool = False) -> list[str]:
        """Return the keys to drop when all have passed this entry; with ``answers`` also those that ``forget`` drops."""
        return [self.name, f"{self.name}/verdict", self.read, *(self.message_keys() if answers else ())]


def to_wire(error: BaseException, *, rank: int, phase: str) -> dict[str, Any]:
    """Turn an error into JSON-able data for other ranks and processes, with all its fields.

    A foreign one travels as ``named`` has it: its class may not be importable where the data arrives.
    """
    ours = named(error, rank=rank, phase=phase)
    return {"type": type(ours).__name__, "fields": fields_of(ours)}


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
