"""The lease by which one job holds a directory, and what keeps it: the same for the files and the objects that record it.

The record names the holder completely: host, kernel, PID namespace, pid and the start of that process. The same host name
alone proves nothing: a restarted pod has the name of the one before it. The holder changes the record all the time. Another job
takes the directory over at once from a process that is known to be gone. From a holder that cannot be checked (another host,
another container) it takes it over after the record has not changed for the holder's own ``lease_s``. Imports neither torch nor
a framework.

While the storage gives no answer, the holder cannot show a sign of life either. So that time does not count, and afterwards the
holder gets the time of some signs more.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import socket
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Any, Literal

from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.errors import DirectoryError, DirectoryInUseError
from safe_ckpt.machine import kernel_id, pid_namespace, process_start

logger = logging.getLogger(__name__)
_HEARTBEATS = 10**9
_LONGEST_S = 3600.0  # as the settings have it: of a record that says more, somebody has written nonsense
_PER_LEASE = 6  # signs of life
_LOOKS_PER_LEASE = 12
_SPARED = 3
"""Signs of life, of a holder that an outage kept from showing them: one that hangs, a pause, and one that comes."""
_ATTEMPTS = 100
_AGAIN_AND_AGAIN = "other jobs take it again and again, or the storage is inconsistent: start again"
_PAUSE_S = 0.05
SLOW_S = 1.0
"""A process that takes longer stood still."""
MOMENT_S = 1.5
_FREE = "or free it with safe-ckpt unlock --break-lock"
_held: dict[str, str] = {}
"""The holder of each lease of this process, by its token."""
_made: set[str] = set()
"""All tokens of this process. One that is not held any more may still stand where it could not be given back."""

Fate = Literal["alive", "dead", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Who holds a directory, as its lock file has it.

    Attributes:
        token: unique to this taking of the lock.
        host: the host's name.
        pid: the process, as its own PID namespace counts.
        started_at: when the lock was taken, ISO 8601.
        lease_s: the holder changes the file at least every sixth of this.
        kernel: tells boots of machines apart; "" where that is not known.
        namespace: the PID namespace; 0 where that is not known.
        process_start: when the process began, in clock ticks since the kernel did.
        device: the file system as that kernel numbers it; 0 where the holder has no lock of the kernel beside this one.
        beat: heartbeats: counts up as long as the holder lives. A key of lock files and heads, and stays.
    """

    token: str
    host: str
    pid: int
    started_at: str
    lease_s: float
    kernel: str
    namespace: int
    process_start: int
    device: int = 0
    beat: int = 0

    def to_bytes(self) -> bytes:
        """Write it as the lock file has it: one line of the same length for each heartbeat, so that one write replaces it."""
        return (json.dumps({**asdict(self), "beat": f"{self.beat % _HEARTBEATS:09d}"}) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Lease | None:
        """From a lock file; None where it is empty, torn or not one of ours."""
        try:
            fields: dict[str, Any] = json.loads(data)
            lease_s = min(float(fields["lease_s"]), _LONGEST_S)
            lease = cls(**{**fields, "beat": int(fields["beat"]), "lease_s": lease_s})
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            return None
        texts = (lease.token, lease.host, lease.started_at, lease.kernel)
        numbers = (lease.pid, lease.namespace, lease.process_start, lease.device)
        right = all(isinstance(text, str) for text in texts) and all(isinstance(number, int) for number in numbers)
        return lease if right and lease.lease_s > 0 else None

    def next(self) -> Lease:
        """The next heartbeat."""
        return replace(self, beat=self.beat + 1)


def own_lease(*, token: str, started_at: str, lease_s: float) -> Lease:
    """Return the lease that this process writes into a lock file."""
    start = 0  # it is not known
    with contextlib.suppress(OSError):
        start = process_start(os.getpid()) or 0
    return Lease(
        token=token,
        host=socket.gethostname(),
        pid=os.getpid(),
        started_at=started_at,
        lease_s=lease_s,
        kernel=kernel_id(),
        namespace=pid_namespace(),
        process_start=start,
    )


def fate_of_process(lease: Lease) -> Fate:
    """Find out if the holder still lives, where it is a process that this one can see."""
    # A namespace of our number is ours, or it is gone and the kernel has given its number to ours.
    if not lease.kernel or lease.kernel != kernel_id() or not lease.namespace or lease.namespace != pid_namespace():
        return "unknown"
    try:
        began = process_start(lease.pid)
    except (FileNotFoundError, ProcessLookupError):
        began = None
        # Processes of other users may be (hidepid): only the existence of the pid is known then.
        if _is_hidden(lease.pid):
            return "unknown"
    except OSError:  # no descriptors left, say: no sign of a death
        return "unknown"
    return "alive" if began is not None and lease.process_start in (0, began) else "dead"  # 0: it is not known


def _is_hidden(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


NOBODY = Lease(token="", host="?", pid=0, started_at="?", lease_s=1.0, kernel="", namespace=0, process_start=0)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The findings of one look at the record of a lease.

    Attributes:
        state: differs whenever the record was changed.
        lease: the holder's; None where it names none.
        lease_s: how long it may stand still before another job takes over.
        was_out: the storage gave no answer at first.
    """

    state: Any
    lease: Lease | None
    lease_s: float
    was_out: bool


class LeaseLock(ABC):
    """The right to write in one directory. A storage says how its record is read, taken, renewed and given back.

    Used on rank 0 only; by several threads.

    Args:
        subject: the directory that is protected, for messages.
        lease_s: how long the record may stand still before another job may take over.
        owner: what holds it within this process and how to free it, for messages.
    """

    _longest_pause_s = math.inf
    """Between two looks at the record of another job."""
    _outage_s: float | None = None
    """How long a storage without an answer is tried again; None where it tries by itself, and a call fails at once."""

    def __init__(self, subject: Place, *, lease_s: float, owner: str) -> None:
        self._subject = subject
        self._lease_s = lease_s
        self._period_s = lease_s / _PER_LEASE
        self._owner = owner
        self._lease: Lease | None = None
        self._pid = 0
        self._keeper: threading.Thread | None = None
        self._stop = threading.Event()

    @abstractmethod
    def _look(self, *, again: bool = False) -> Seen | None:
        """The record; None where there is none. ``again``: over another connection."""

    @abstractmethod
    def _take(self, lease: Lease, seen: Seen | None) -> Lease | None:
        """Replace the record that was seen, or create it, in one step. Returns what it names now; None: another was faster."""

    @abstractmethod
    def _renew(self, lease: Lease) -> None:
        """Show this sign of life. Raises ``DirectoryInUseError`` if another job has taken over."""

    @abstractmethod
    def _give_back(self, lease: Lease) -> None:
        """Take this lease away, or have the record name nobody."""

    @abstractmethod
    def _fate(self, lease: Lease) -> Fate:
        """Find out if that holder still lives, where this process can know."""

    def _waited_s(self, seen: Seen) -> float:
        """How long jobs before this one have waited for this state to change."""
        del seen
        return 0.0

    def acquire(self, patience_s: float | None = None) -> None:
        """Take the lock.

        Waits only for a holder that cannot be asked whether it lives, until its own lease is over.

        Args:
            patience_s: wait no longer than this; None for as long as the holder's lease says.

        Raises:
            DirectoryInUseError: another job holds it; names host, pid and start.
            OSError: the storage refuses, or gives no answer.
        """
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        lease = own_lease(token=uuid.uuid4().hex, started_at=now, lease_s=self._lease_s)
        # Before it is recorded: another thread would take it for one that was left behind.
        _held[lease.token] = self._owner
        _made.add(lease.token)
        try:
            self._lease = self._contend(lease, patience_s)
        except BaseException:
            _held.pop(lease.token, None)
            raise
        self._pid, self._stop = os.getpid(), threading.Event()
        arguments = self._lease, self._stop
        self._keeper = threading.Thread(target=self._keep, args=arguments, name="safe_ckpt-lease", daemon=True)
        try:
            self._keeper.start()
        except BaseException:
            self.release()
            raise

    @property
    def is_held(self) -> bool:
        """Whether this process took it and has not given it back."""
        return self._lease is not None and self._pid == os.getpid()

    def release(self) -> None:
        """Give the lock back. An error of the storage is logged: the lease of a process that ends is taken over anyway."""
        lease, self._lease = self._lease, None
        self._stop.set()
        if lease is None or self._pid != os.getpid():
            return
        # A collector may call this from anywhere, from that thread too.
        if self._keeper is not None and self._keeper is not threading.current_thread() and self._keeper.is_alive():
            self._keeper.join(MOMENT_S)  # a storage that does not answer holds it up
        try:
            self._give_back(lease)
        except (OSError, DirectoryError) as error:
            logger.warning("the lock of %s could not be given back, its lease runs out: %s", self._subject, error)
        finally:
            _held.pop(lease.token, None)

    def in_use(self, message: str, lease: Lease | None) -> DirectoryInUseError:
        """The error that names the holder."""
        lease = lease or NOBODY
        return DirectoryInUseError(
            path=str(self._subject), message=message, host=lease.host, pid=lease.pid, started_at=lease.started_at
        )

    def _contend(self, lease: Lease, patience_s: float | None) -> Lease:
        began, lost = time.monotonic(), 0
        deadline = None if patience_s is None else began + patience_s
        while lost < _ATTEMPTS:
            seen = self._await_free(lease, began, deadline)
            try:
                if (taken := self._take(lease, seen)) is not None:
                    return taken
                lost += 1
            except TimeoutError:  # the holder's sign of life may fail as well, so it has all its time again
                lease_s = seen.lease_s if seen is not None else 0.0
                if self._outage_s is None or time.monotonic() > began + self._outage_s + lease_s:
                    raise
            time.sleep(_PAUSE_S)
        raise self.in_use(_AGAIN_AND_AGAIN, seen.lease if seen else None)

    def _await_free(self, lease: Lease, began: float, deadline: float | None) -> Seen | None:
        """Look at the record until it may be taken. Returns it."""
        silence, overslept = _Silence(), False
        while (seen := self._sure_look(silence)) is not None:
            looked = time.monotonic()
            if seen.lease is not None and seen.lease.token == lease.token:  # by a request whose answer was lost
                return seen
            if silence.is_broken_by(seen):
                message = "it is alive, it gave a sign of life: stop it, or choose another directory"
                raise self.in_use(message, seen.lease)
            if self._refuse_if_alive(seen.lease):
                break
            # Here: a wait is noted for who comes next.
            silence.heard(seen, self._waited_s, outage=overslept or seen.was_out)
            last = math.inf if self._outage_s is None else began + seen.lease_s + self._outage_s
            if self._was_silent_long_enough(seen, silence, last if deadline is None else deadline):
                break
            if silence.holders > _ATTEMPTS:
                raise self.in_use(_AGAIN_AND_AGAIN, seen.lease)
            pause_s = min(self._longest_pause_s, seen.lease_s / _LOOKS_PER_LEASE)
            time.sleep(pause_s)
            # Since the look, not since the sleep began: to ask for the holder's fate may take long, too.
            overslept = time.monotonic() - looked > pause_s + SLOW_S
        return seen

    def _sure_look(self, silence: _Silence) -> Seen | None:
        """Look. What is new counts once it was seen twice: one read may bring other bytes, and would be a sign of life."""
        seen, before = self._look(), silence.before
        for _ in range(4):
            if seen is None or seen.lease is None or (before is not None and seen.state == before.state):
                return seen
            before, seen = seen, self._look(again=True)
        # Looks that never agree, such as old and new ones in turn, tell of no silence.
        return None if seen is None else replace(seen, was_out=True)

    def _refuse_if_alive(self, lease: Lease | None) -> bool:
        """Whether the holder is known to be dead.

        Raises:
            DirectoryInUseError: it is known to be alive.
        """
        fate = "unknown" if lease is None else self._fate_of_holder(lease)
        if fate == "alive":
            raise self.in_use("it is alive: stop it, or choose another directory", lease)
        if fate == "dead" and lease is not None:
            logger.info("%s is taken over from host %s: its process is dead", self._subject, lease.host)
        return fate == "dead"

    def _was_silent_long_enough(self, seen: Seen, silence: _Silence, deadline: float) -> bool:
        """Whether a holder that cannot be asked was silent for long enough.

        Raises:
            DirectoryInUseError: there is no time left to wait.
        """
        lease = seen.lease
        if lease is None and not seen.lease_s:
            return True  # a record that was given back
        host, left_s = "unknown" if lease is None else lease.host, silence.needed_s - silence.seconds
        if left_s <= 0:
            message = "%s is taken over from host %s: no sign of life for %.0f s"
            logger.info(message, self._subject, host, silence.seconds)
            return True
        if time.monotonic() >= deadline:
            what = "it" if lease is not None else "its lock names no holder yet, and"
            message = f"{what} shows no sign of life; its lease ends in {left_s:.0f} s: start again then, {_FREE}"
            raise self.in_use(message, lease)
        if not silence.seconds:
            waiting = "%s is held by host %s: waiting up to %.0f s for a sign of life. If it is dead, wait, %s"
            logger.info(waiting, self._subject, host, left_s, _FREE)
        return False

    def _fate_of_holder(self, lease: Lease) -> Fate:
        """Find out as ``_fate`` does; of a lease of this process its own list decides."""
        if lease.token in _made and lease.token not in _held:
            return "dead"
        fate = self._fate(lease)
        if fate != "dead" and lease.pid == os.getpid() and lease.token in _held:
            gc.collect()  # an object that is only referenced by itself ends now
            if (who := _held.get(lease.token)) is not None:
                who = who or "use one Checkpointer per directory and process"
                raise self.in_use(f"this process has it open already: {who}", lease)
            return "dead"
        # Of this very process, which has no list of it: it has begun anew by an exec.
        return "dead" if fate == "alive" and lease.pid == os.getpid() else fate

    def _keep(self, lease: Lease, stop: threading.Event) -> None:
        """Show signs of life. An outage of the storage does not end this: afterwards the record is still ours, or it is not."""
        warned = False
        while not stop.wait(self._period_s) and self._pid == os.getpid():
            lease = lease.next()
            try:
                self._renew(lease)
                warned = False
            except DirectoryInUseError as error:
                if not stop.is_set():
                    logger.error("%s: nothing more is committed there", error)  # noqa: TRY400 - the next save raises it
                return
            except Exception as error:  # the next try may succeed, whatever it was
                if not warned:
                    logger.warning("the lock of %s cannot be renewed: %s", self._subject, error)
                warned = True


class _Silence:
    """For how long a holder has shown no sign of life although it could have.

    Attributes:
        seconds: so long.
        needed_s: until it counts as dead.
        holders: how many records there were.
        before: the newest of them.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.needed_s = 0.0
        self.holders = 0
        self.before: Seen | None = None
        self._looked_at = 0.0

    def is_broken_by(self, seen: Seen) -> bool:
        """Whether the holder has changed the record since it was first seen."""
        tokens = [one.lease.token for one in (seen, self.before) if one is not None and one.lease is not None]
        changed = self.before is not None and seen.state != self.before.state
        return changed and len(tokens) == 2 and tokens[0] == tokens[1]

    def heard(self, seen: Seen, waited_s: Callable[[Seen], float], *, outage: bool) -> None:
        """The record was looked at. ``outage``: something stood still meanwhile, perhaps for the holder too."""
        now, before = time.monotonic(), self._looked_at
        self._looked_at = now
        period_s = seen.lease_s / _PER_LEASE
        if self.before is None or seen.state != self.before.state:
            self.before, self.seconds, self.holders = seen, 0.0, self.holders + 1
            # Earlier waits were measured by the clocks of several machines. A live holder shows itself in the time left.
            self.needed_s = max(seen.lease_s - waited_s(seen), 2 * period_s)
            return
        # A look that took long tells of no more than one sign of life that did not come.
        self.seconds += min(now - before, period_s)
        if outage:
            self.seconds = min(self.seconds, self.needed_s - _SPARED * period_s)
