"""The kinds of faults, and how each strikes: at a moment, or at the n-th call of a process in one phase of a save."""

from __future__ import annotations

import errno
import signal
from dataclasses import dataclass
from typing import Any

from sim.world import Proc, Task, here

PHASES = ("lock", "repair", "sweep", "open", "resume", "prepare", "write", "commit", "retain", "close", "save", "wait")
KINDS = {
    "kill": "", "power": "", "pause": "", "cut": "shared", "down": "shared", "eio": "", "estale": "shared", "full": "",
    "outage": "shared", "wrong read": "", "answer lost": "", "delays": "", "clock": "", "signal": "", "kill all": "",
}  # fmt: skip
"""What it is for: "shared" makes no sense on the disk of one host."""
AT_PHASES = (
    "kill",
    "power",
    "pause",
    "down",
    "eio",
    "estale",
    "full",
    "kill all",
    "outage",
    "wrong read",
    "cut",
    "clock",
    "signal",
)
_READS = ("stat", "open", "list", "read")
_CHANGES = ("create", "write", "fsync", "mkdir", "rename", "unlink", "rmdir", "link", "truncate")


@dataclass
class Fault:
    """One fault.

    Attributes:
        at: when, unless it waits for a phase.
        phase: it strikes at the ``nth`` call of the disk of a process in this phase; "" for at the moment.
        length_s: how long it lasts, where it does.
        chance: how likely each call fails, where calls fail.
    """

    kind: str
    at: float
    host: int
    rank: int
    length_s: float
    chance: float
    phase: str = ""
    nth: int = 0
    job: str = ""
    seen: int = 0

    def __str__(self) -> str:
        where = f"in {self.phase}, call {self.nth}" if self.phase else f"at {self.at:.3f} s"
        return f"{self.kind} {where}, host {self.host}, rank {self.rank}, {self.length_s:g} s, chance {self.chance:g}"

    def arm(self, history: Any) -> None:
        """Have it strike when it is due."""
        self.seen = 0
        if self.phase:
            history.world.triggers.append(self)
        else:
            history.world.at(self.at, self.strike, history, None)

    def look(self, task: Task) -> None:
        """A process calls the disk."""
        facts = task.proc.facts
        if "rank" not in facts or (task.inner or facts.get("phase")) != self.phase:
            return
        if self.job and facts["job"].name != self.job:
            return
        if facts["rank"] != self.rank and self.phase not in ("lock", "repair", "sweep", "prepare", "commit", "retain"):
            return
        self.seen += 1
        if self.seen >= self.nth:
            task.world.triggers.remove(self)
            self.strike(task.world.history, task.proc)
            here()

    def strike(self, history: Any, proc: Proc | None) -> None:
        """Do it."""
        world = history.world
        if world.now > history.plan.horizon_s:
            return
        host = proc.host if proc is not None else world.hosts[self.host]
        proc = proc or _some_rank(history, self.rank)
        history.met(self.kind, proc)
        getattr(self, f"_{self.kind.replace(' ', '_')}")(history, host, proc)

    def _kill(self, history: Any, host: Any, proc: Proc | None) -> None:
        if proc is not None:
            proc.kill("killed")

    def _writer_killed(self, history: Any, host: Any, proc: Proc | None) -> None:
        for one in _writers_of(host, proc):
            one.kill("killed")

    def _writer_stopped(self, history: Any, host: Any, proc: Proc | None) -> None:
        for one in _writers_of(host, proc):
            self._pause(history, host, one)

    def _kill_all(self, history: Any, host: Any, proc: Proc | None) -> None:
        if proc is not None:
            for one in proc.facts["attempt"].procs.values():
                one.kill("killed")

    def _power(self, history: Any, host: Any, proc: Proc | None) -> None:
        world = history.world
        if not host.up:
            return
        host.up = False
        for one in list(host.procs):
            one.kill("power")
        world.disk.power_cut(host)
        host.__dict__.pop("kernel_locks", None)
        world.at(world.now + self.length_s, _boot, host)

    def _pause(self, history: Any, host: Any, proc: Proc | None) -> None:
        if proc is not None and proc.alive:
            proc.pause(self.length_s)
            history.world.at(history.world.now + self.length_s, proc.go_on)

    def _cut(self, history: Any, host: Any, proc: Proc | None) -> None:
        host.cut_off = history.world.now + self.length_s

    def _down(self, history: Any, host: Any, proc: Proc | None) -> None:
        history.world.mounts.hang(host.number, self.length_s)

    def _outage(self, history: Any, host: Any, proc: Proc | None) -> None:
        for one in history.world.hosts:
            history.world.mounts.hang(one.number, self.length_s)

    def _wrong_read(self, history: Any, host: Any, proc: Proc | None) -> None:
        history.world.mounts.wrong_reads[host.number] = 1

    def _fails(self, history: Any, host: Any, calls: tuple[str, ...], code: int) -> None:
        until = history.world.now + min(self.length_s, 12.0)
        history.world.mounts.trouble(host.number, history.world.now, until)
        history.world.mounts.failing.append((host.number, calls, code, self.chance, until))

    def _eio(self, history: Any, host: Any, proc: Proc | None) -> None:
        calls = (_READS, _CHANGES, ("fsync",), ("rename",), (*_READS, *_CHANGES))[self.nth % 5]
        self._fails(history, host, calls, errno.EIO)

    def _estale(self, history: Any, host: Any, proc: Proc | None) -> None:
        self._fails(history, host, (*_READS, "rename", "unlink"), errno.ESTALE)

    def _full(self, history: Any, host: Any, proc: Proc | None) -> None:
        disk = history.world.disk
        disk.free_bytes = 0
        history.world.mounts.full.append((history.world.now, history.world.now + self.length_s))
        history.world.at(history.world.now + self.length_s, setattr, disk, "free_bytes", 1 << 40)

    def _answer_lost(self, history: Any, host: Any, proc: Proc | None) -> None:
        net = history.world.net
        net.losing = 0.3 * self.chance
        history.world.at(history.world.now + self.length_s, setattr, net, "losing", 0.0)

    def _delays(self, history: Any, host: Any, proc: Proc | None) -> None:
        net = history.world.net
        net.delays = 0.5 * self.chance
        history.world.at(history.world.now + self.length_s, setattr, net, "delays", 0.0)

    def _clock(self, history: Any, host: Any, proc: Proc | None) -> None:
        host.skew_s += history.world.rng.choice((-86400.0, -60.0, 60.0, 86400.0))

    def _signal(self, history: Any, host: Any, proc: Proc | None) -> None:
        if proc is None or not proc.alive:
            return
        handler = proc.facts.get("handlers", {}).get(signal.SIGTERM)
        if handler is signal.SIG_IGN:
            return
        if not callable(handler):
            proc.kill("SIGTERM")
            return
        main = next((task for task in proc.tasks if task.name == "main"), None)
        if main is not None:
            proc.facts["signalled"] = True
            Task(proc, handler, (signal.SIGTERM, None), "signal")


def _some_rank(history: Any, rank: int) -> Proc | None:
    """The one of that number, of a job that lives."""
    for job in history.jobs:
        if job.attempts and not job.attempts[-1].over:
            procs = job.attempts[-1].procs
            proc = procs[rank % len(procs)]
            if proc.alive:
                return proc  # type: ignore[no-any-return]
    return None


def _writers_of(host: Any, proc: Proc | None) -> list[Proc]:
    """The processes that write for this one; itself, if it is one."""
    return [
        one
        for one in host.procs
        if one.alive and one.facts.get("writes for") and proc in (one, one.facts["writes for"])
    ]


def _boot(host: Any) -> None:
    host.boot += 1
    host.since = host.world.now
    host.up = True
    host.world.mounts.forget_all(host)
