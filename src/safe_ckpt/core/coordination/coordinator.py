"""How the ranks act as one: through keys in a store, never through collectives.

A ``Coordinator`` is what the ranks of one process group share while they save. Its operations form one log. Rank 0
appends an entry. Every other rank compares its own view with the entry and answers. Rank 0 decides and publishes the verdict.
The log has one order, so a rank that asks for something else is detected at once, and a late rank reads the same verdict.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.util
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from safe_ckpt.config import CheckpointConfig, Network, Timeouts
from safe_ckpt.core.coordination import process_groups
from safe_ckpt.core.coordination.heartbeat import Heartbeat
from safe_ckpt.core.coordination.process_groups import ProcessGroup
from safe_ckpt.core.coordination.rendezvous import Rendezvous, no_store, rendezvous
from safe_ckpt.core.coordination.rounds import Decide, LogEntry, Receipts, Scatter, decided, from_wire, to_wire
from safe_ckpt.core.coordination.store import KeyTimeout, KeyValues, StoreClient
from safe_ckpt.errors import (
    ClosedError,
    ConfigError,
    CoordinationError,
    ForkedError,
    PeerLostError,
    RendezvousTimeout,
    SafeCheckpointError,
    naming,
)

logger = logging.getLogger(__name__)
_IN_ORDER = ("log/", "gather/")
"""Keys that a rank has read when it has read a later entry of the log."""

_open: list[Coordinator] = []
_open_lock = threading.RLock()


def open_coordinator(
    group: ProcessGroup | None, timeouts: Timeouts, *, observe: bool = True, network: Network | None = None
) -> Coordinator:
    """Join the session of this process group, making it where not every rank has it. Every rank calls this.

    Release it when done.

    Args:
        group: the ranks; None means WORLD.
        timeouts: of a session that is made here.
        observe: whether they hold from now on in one that is there already, too.
        network: where rank 0 listens in one that is made here; None for what the environment says.

    Raises:
        RendezvousTimeout: some ranks did not come within ``barrier_s``; names them.
    """
    facts = process_groups.group_of(group)
    with _open_lock:
        for coordinator in [one for one in _open if one.users == 0 and one.bereft]:
            coordinator.close()
        serving = [coordinator for coordinator in _open if coordinator.serves(facts)]
    have = serving[-1] if serving else None
    if facts.size == 1 and have is not None:
        return _used_once_more(have, timeouts, observe=observe)
    met: Rendezvous | int | None = None
    if facts.size > 1:
        where = network or (_network_of_environment() if facts.rank == 0 else Network())
        known = (have.id, have.call) if have is not None else ("", -1)
        met = rendezvous(facts, timeouts, where, *known)
        if isinstance(met, int) and have is not None:
            have.start_at(met)  # a rank that was interrupted in here may have made another number of calls
            return _used_once_more(have, timeouts, observe=observe)
    for coordinator in serving:
        if coordinator.users == 0:  # some other rank has it no more
            coordinator.close()
    coordinator = Coordinator(facts, timeouts, met if isinstance(met, Rendezvous) else None)
    with _open_lock:
        _open.append(coordinator)
    # After the engines (priority 100), which finish what is in flight, and also where atexit does not run: atexit's own hooks
    # would come first, and rank 0's store would be gone under a running save. Here and not at import: a process that
    # multiprocessing forks forgets what was arranged before.
    weak = weakref.ref(coordinator)
    coordinator.at_exit = multiprocessing.util.Finalize(None, _close_at_exit, (weak,), exitpriority=50)
    return coordinator


def _network_of_environment() -> Network:
    try:
        return CheckpointConfig.from_environment().network
    except ConfigError:  # raised where the settings themselves are read
        return Network()


def _used_once_more(coordinator: Coordinator, timeouts: Timeouts, *, observe: bool) -> Coordinator:
    coordinator.users += 1
    if observe:
        coordinator.observe(timeouts)
    return coordinator


def _close_at_exit(weak: weakref.ref[Coordinator]) -> None:
    coordinator = weak()
    if coordinator is not None:
        coordinator.close()


class Coordinator:
    """The session that the ranks of one process group share while they save. Made by ``open_coordinator``.

    Attributes:
        id: the same on all ranks, and of no other session.
        rank: this process's rank.
        size: number of ranks.
        call: the number of the newest call, the same on all ranks that made the same calls.
        receipts: on rank 0, of which verdicts it is still to learn that the others have read them.
        unsure: whether this rank failed in its newest agreement after it had answered: the others may have gone on.
        over: on rank 0, keys of what is over that some rank may still be reading; dropped when all have come to the next entry.
        progress_sources: numbers of this rank that change as long as bytes move; their sum is sent to the other ranks.
        at_exit: closes it when the process ends; cancelled by ``close``.
    """

    def __init__(self, group: process_groups.Group, timeouts: Timeouts, met: Rendezvous | None) -> None:
        self.id = met.id if met is not None else ""
        self.rank, self.size, self.users = group.rank, group.size, 1
        self._hosts = (0,) if group.rank else ()  # of the store; no rank is lost to itself
        self.receipts = Receipts()
        self.progress_sources: list[Callable[[], int]] = []
        self.over: list[str] = []
        self.at_exit: multiprocessing.util.Finalize | None = None
        self._shutdown_s = timeouts.shutdown_s
        self._name = group.name
        # Only weakly: the default store holds the port that a later process group may want to bind.
        self._meeting = weakref.ref(group.meeting_store) if group.meeting_store is not None else None
        self._pid = os.getpid()
        self.call, self._part = -1, 0
        self._depth, self._goes_on, self._named = 0, False, ""
        self.unsure = False
        self._closed = False
        # On rank 0 this is the store itself; it goes with this reference.
        self._store: KeyValues | None = met.store if met is not None else None
        self._connect = met.connect if met is not None else no_store
        self._answer_s = timeouts.peer_stall_s
        self._heartbeat = Heartbeat(
            StoreClient(self._connect, name="heartbeat", answer_s=self._answer_s, hosts=self._hosts),
            rank=group.rank,
            peers=met.peers if met is not None else {},
            stall_s=self._answer_s,
            interval_s=_beat_interval_s(timeouts),
            progress=self._own_progress,
        )
        self._calls = self.store_client("calls", self._store)

    def agree(
        self,
        kind: str,
        *,
        timeout_s: float,
        must_match: Mapping[str, object] | None = None,
        local: Callable[[], object] | None = None,
        decide: Decide | None = None,
        phase: str = "",
    ) -> Any:
        """Make one agreed step. Every rank calls this, on the thread that drives training.

        Args:
            kind: the name of the step, the same on all ranks.
            timeout_s: how long to wait for the others, and for ``decide``.
            must_match: values that must be equal, as text, on all ranks; compared when ``local`` failed on none.
            local: this rank's part, done before the ranks meet. What it returns (JSON-able) is this rank's answer for
                ``decide``; what it raises, all ranks raise.
            decide: runs on rank 0, when ``local`` failed nowhere. Without it the result is None.
            phase: what ``local`` does, for errors that are not ours; "" for ``kind``.

        Returns:
            What ``decide`` returned, on every rank; of ``Scatter`` this rank's own.

        Raises:
            DesyncError: the ranks are at different steps, or differ in ``must_match``.
            RendezvousTimeout: some ranks did not come; names them.
            PeerLostError: a rank died or stopped.
            ForkedError: this process was forked from the one that opened the session.
            SafeCheckpointError: what ``local`` raised on the lowest rank on which it did; a rank on which it failed raises
                its own exception instead, whatever that is, with its traceback. Or what ``decide`` raised.
        """
        self.refuse_fork(kind)
        if self._closed:
            raise ClosedError(message=f"{kind}: this session was closed")
        if self.size == 1:
            return _agree_alone(kind, local, decide)
        failure: Exception | None = None
        if not self._goes_on:
            self._heartbeat.at = self.call + 1  # it has come, and ``local`` may take a while
        try:
            own: dict[str, object] = {"answer": local() if local is not None else None}
        except Exception as error:  # the other ranks wait for this one
            failure = error
            own = {"error": to_wire(error, rank=self.rank, phase=phase or kind)}
        view = {"kind": kind, **{key: str(value) for key, value in (must_match or {}).items()}}
        entry = self._next_entry(kind, timeout_s, phase or kind)
        try:
            return self._lead(entry, view, own, decide) if self.rank == 0 else self._follow(entry, view, own)
        except SafeCheckpointError as reported:
            if failure is None:
                raise
            if isinstance(reported, CoordinationError):  # a collective fails here because a rank has died in it there
                raise reported from (reported.__cause__ or failure)
            raise failure from failure.__cause__

    def _next_entry(self, kind: str, timeout_s: float, phase: str) -> LogEntry:
        """The next entry of the log. Every rank uses up its number, also if it fails."""
        if self._goes_on:
            self._part += 1
        else:
            self.call, self._part = self.call + 1, 0
        self._goes_on = self._depth > 0
        self.unsure = False
        self._heartbeat.at = self.call
        number, needed = self.call, [0] if self.rank else range(1, self.size)

        def check() -> None:
            if self.rank == 0 and (gone := self._heartbeat.are_past(number)):
                raise RendezvousTimeout(phase=kind, seconds=timeout_s, missing=gone)
            self._heartbeat.check(needed, phase)

        return LogEntry(
            self._calls,
            self.rank,
            self.size,
            f"log/{number}.{self._part}",
            kind,
            timeout_s,
            check,
            call=self._named,
            elsewhere=lambda: self._heartbeat.are_before(number),
            say_s=self._answer_s / 2,
        )

    def start_at(self, call: int) -> None:
        """Count calls from here on. All ranks do this at the same place."""
        self.call, self._goes_on = call, False

    @contextlib.contextmanager
    def together(self, call: str = "") -> Iterator[None]:
        """All agreements within are parts of one call: a rank that fails on the way begins the next call with the others.

        Args:
            call: as the user knows it, for messages; the outermost one that has a name counts.
        """
        outer = self._named
        self._depth, self._named = self._depth + 1, outer or call
        try:
            yield
        finally:
            self._depth, self._named = self._depth - 1, outer
            if not self._depth:
                self._goes_on = False

    def leave(self, call: int) -> None:
        """Give up a call that this rank cannot answer now. Rank 0 learns of it from a later heartbeat."""
        if self.rank != 0:
            self._heartbeat.leave(call)

    def have_left(self, call: int) -> tuple[int, ...]:
        """On rank 0: the ranks that have given up that call, and what it began."""
        return self._heartbeat.have_left(call) if self.rank == 0 else ()

    def refuse_fork(self, what: str) -> None:
        """Raise ``ForkedError`` in a forked child: nothing that answers is there."""
        if self._pid != os.getpid():
            raise ForkedError(what=what, pid=self._pid)

    def store_client(self, name: str, store: KeyValues | None = None) -> StoreClient:
        """One more connection, for a thread of its own. The caller closes it. ``store`` is a connection that is open."""
        alive, hosts = self._heartbeat.host_is_alive, self._hosts
        return StoreClient(self._connect, name=name, answer_s=self._answer_s, store=store, hosts=hosts, alive=alive)

    def check(self, needed: Sequence[int]) -> None:
        """Raise ``PeerLostError`` if one of the ``needed`` ranks is known to be dead or stopped."""
        self._heartbeat.check(needed)

    def observe(self, timeouts: Timeouts) -> None:
        """Use these timeouts from now on. Every rank calls this, or none."""
        self._shutdown_s = timeouts.shutdown_s
        self._answer_s = timeouts.peer_stall_s
        self._calls.answer_s = timeouts.peer_stall_s
        self._heartbeat.observe(timeouts.peer_stall_s, _beat_interval_s(timeouts))

    def progress(self) -> int:
        """A number that changes as long as bytes move, here or on a rank that this one waits for."""
        return self._own_progress() + self.progress_elsewhere()

    def progress_elsewhere(self) -> int:
        """The same of the ranks that this one waits for alone."""
        return self._heartbeat.progress()

    def _own_progress(self) -> int:
        return sum(source() for source in list(self.progress_sources))

    @property
    def stall_s(self) -> float:
        """How long a rank may show no sign of life."""
        return self._answer_s if self.size > 1 else 0.0

    @property
    def bereft(self) -> bool:
        """Whether the process group that this belonged to is gone."""
        return self._meeting is not None and self._meeting() is None

    def serves(self, group: process_groups.Group) -> bool:
        """Whether this is the session of ``group``."""
        if self._pid != os.getpid():  # a forked child has none of this
            return False
        if group.meeting_store is None:
            return self._meeting is None
        return self._name == group.name and self._meeting is not None and self._meeting() is group.meeting_store

    def release(self, *, keep: bool = False) -> None:
        """One user is done. The last one ends the session, or with ``keep`` leaves it for the next."""
        self.users -= 1
        if self.users == 0 and not keep:
            self.close()

    def close(self) -> None:
        """End the session. Rank 0 stays until the others have read its verdicts, at most ``shutdown_s``."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        if self.at_exit is not None:
            self.at_exit.cancel()
        if self in _open:
            _open.remove(self)
        try:
            if self.rank == 0 and self.size > 1:
                lost, over = self._heartbeat.lost, self._heartbeat.all_gone
                self.receipts.await_all(
                    self._calls, within_s=self._shutdown_s, have_left=self.have_left, lost=lost, over=over
                )
        except (CoordinationError, KeyTimeout) as error:
            logger.debug("left without waiting for the others: %s", error)
        finally:
            self._heartbeat.close()
            self._calls.close()
            self._store = None

    def _lead(self, entry: LogEntry, view: Mapping[str, str], own: Mapping[str, object], decide: Decide | None) -> Any:
        try:
            result = entry.conclude(decided(view, {0: own, **entry.answers(view)}, decide))
        except BaseException as error:
            # The other ranks wait for this verdict, so they get the cause before this rank unwinds.
            wire = to_wire(error, rank=0, phase=entry.phase)
            entry.fail(wire)
            # After a rank was lost the rest may still be on their way here. They must learn which one it was.
            lost = len(error.ranks) if isinstance(error, PeerLostError) else 0
            reads = self.size - 1 - lost if lost else entry.posted()
            self.receipts.expect(entry.read, reads, self.call, instead_of=_IN_ORDER)
            self.over += entry.keys(answers=True)
            if isinstance(error, Exception) and not isinstance(error, CoordinationError):
                raise from_wire(wire) from error
            raise
        self.receipts.expect(entry.read, self.size - 1, self.call, instead_of=_IN_ORDER)
        entry.forget(self.over)
        self.over = entry.keys()
        return result

    def _follow(self, entry: LogEntry, view: Mapping[str, str], own: Mapping[str, object]) -> Any:
        answered = False
        try:
            appended = entry.said()
            answered = True
            entry.answer(own if appended == view else {**own, "view": view})
            verdict = self._await_verdict(entry)
            share = entry.take_share() if verdict.get("shared") else None
        except BaseException as error:
            # Rank 0 may start this entry later, wait for this rank in it, or finish it without this rank.
            self.unsure = answered
            self.leave(self.call)
            if isinstance(error, KeyTimeout):
                raise entry.too_late((0,)) from None
            raise
        entry.acknowledge()
        if "error" in verdict:
            raise from_wire(verdict["error"])
        return share if verdict.get("shared") else verdict["ok"]

    def _await_verdict(self, entry: LogEntry) -> Any:
        try:
            # Rank 0 waits timeout_s for the slowest rank and may take as long to decide. It names the missing ranks.
            return entry.said("/verdict", patience=2)
        except KeyTimeout:
            phase = f"{entry.phase}: verdict"
            raise RendezvousTimeout(phase=phase, seconds=2 * entry.timeout_s, missing=(0,)) from None


def _agree_alone(kind: str, local: Callable[[], object] | None, decide: Decide | None) -> Any:
    """``agree`` with one rank: there is nothing to wait for, to compare or to publish."""
    answer = local() if local is not None else None
    with naming(rank=0, phase=kind):
        result = decide({0: answer}) if decide is not None else None
    return result.by_rank.get(0) if isinstance(result, Scatter) else result


def _beat_interval_s(timeouts: Timeouts) -> float:
    # Often enough to notice a lost rank in time, and progress before a shutdown gives up on it.
    return min(5.0, max(0.02, min(timeouts.peer_stall_s / 6, timeouts.shutdown_s / 4)))
