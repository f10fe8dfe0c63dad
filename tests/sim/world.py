"""One world: a scheduler of greenlets with one seeded random source, a virtual clock, and hosts with processes on them.

At each point where a task gives way (each call of the disk and of a store, locks now and then, every wait), the next one is
chosen at random among those that can run. If none can, the clock goes on to the next timer. Nothing else moves it: a history
of minutes takes milliseconds, and the same seed gives the same history.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
import traceback
from collections.abc import Callable
from typing import Any

import greenlet

_MOST_STEPS = 400_000
_MOST_DEATHS = 2_000


class Killed(BaseException):
    """Raised in a task whose process is dead, at whatever it calls next: nothing that it does has an effect any more."""


class Stuck(Exception):
    """The world does not come to an end: a bug of the simulator, or a loop without a wait."""


class Hub:
    """Which world and which task is running. One at a time in this interpreter.

    Attributes:
        world: the world.
        task: the task; None in the scheduler itself, and while modules are loaded.
        loading: modules are being executed: locks are free then.
    """

    def __init__(self) -> None:
        self.world: Any = None
        self.task: Any = None
        self.loading = False


hub = Hub()


def here() -> Task:
    """The task that runs.

    Raises:
        Killed: its process is dead, or a destructor runs where no task does.
    """
    task = hub.task
    if task is None:
        raise Killed
    if not task.proc.alive:
        task.deaths += 1
        if task.deaths > _MOST_DEATHS:
            raise Stuck(f"{task.name} does not end although its process is dead")
        raise Killed
    return task  # type: ignore[no-any-return]


class Host:
    """A machine: clocks of its own, a mount of the disk, processes.

    Attributes:
        rate: how fast its monotonic clock goes.
        skew_s: what its wall clock is ahead; jumps.
        boot: which boot this is.
        cut_off: the network does not reach it until then, in world time.
    """

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.name = world, number, f"host{number}"
        self.rate = 1.0 + world.rng.uniform(-2e-4, 2e-4)
        self.skew_s = world.rng.uniform(-0.5, 0.5)
        self.boot = 1
        self.since = 0.0
        self.cut_off = 0.0
        self.up = True
        self.procs: list[Proc] = []

    def monotonic(self) -> float:
        """Seconds on this host's monotonic clock."""
        return 1000.0 + (self.world.now - self.since) * self.rate

    def time(self) -> float:
        """Seconds since the epoch, as this host has it."""
        return 1_800_000_000.0 + self.world.now + self.skew_s


class Proc:
    """A process on a host.

    Attributes:
        slot: the modules that it has, see ``loader``.
        ended: how: "" while it lives.
    """

    def __init__(self, world: World, host: Host, name: str) -> None:
        self.world, self.host, self.name = world, host, name
        self.pid = next(world.pids)
        self.started = world.now
        self.alive, self.paused = True, False
        self.ended = ""
        self.tasks: list[Task] = []
        self.held: list[Task] = []
        self.slot: Any = None
        self.facts: dict[str, Any] = {}
        self.at_end: list[Callable[[], None]] = []
        self.stops: list[tuple[float, float]] = []
        host.procs.append(self)

    def start(self, work: Callable[..., None], *arguments: Any) -> Task:
        """Begin its main thread."""
        return Task(self, work, arguments, "main")

    def kill(self, how: str) -> None:
        """End it now: no handler runs, and nothing it has begun goes on."""
        if not self.alive:
            return
        self.alive, self.ended = False, how
        self.world.log("ended", self.name, how)
        for action in self.at_end:
            action()
        self.world.dying.append(self)

    def pause(self, seconds: float) -> None:
        """Stop all its threads (SIGSTOP); clocks go on."""
        if self.alive and not self.paused:
            self.paused = True
            self.stops.append((self.world.now, self.world.now + seconds))

    def go_on(self) -> None:
        """Let it run again."""
        if self.paused:
            self.paused = False
            self.world.ready += self.held
            self.held = []


class Task:
    """A thread.

    Attributes:
        inner: the part of a save that it is in.
    """

    def __init__(self, proc: Proc, work: Callable[..., None], arguments: tuple[Any, ...], name: str) -> None:
        self.proc, self.name = proc, name
        self.world = proc.world
        self.ident = next(self.world.idents)
        self.epoch = 0
        self.waiting = False
        self.timed_out = False
        self.over = False
        self.deaths = 0
        self.errno = 0
        self.inner = ""
        self.thread: Any = None
        self.joiners: list[Task] = []
        self._work, self._arguments = work, arguments
        self.greenlet = greenlet.greenlet(self._run, self.world.greenlet)
        proc.tasks.append(self)
        self.world.ready.append(self)

    def _run(self) -> None:
        try:
            self._work(*self._arguments)
        except Killed:
            pass
        except greenlet.GreenletExit:
            pass
        except BaseException as error:
            if self.proc.alive:
                self.world.uncaught(self, error)
        finally:
            self.over = True
            for task in self.joiners:
                self.world.wake(task)
            if self in self.proc.tasks:
                self.proc.tasks.remove(self)

    def wait(self, seconds: float | None) -> bool:
        """Until somebody wakes it; False if ``seconds`` of its host's clock went by first. None for no limit."""
        world = self.world
        self.waiting, self.timed_out = True, False
        self.epoch += 1
        if seconds is not None:
            world.at(world.now + max(0.0, seconds) / self.proc.host.rate, self._time_out, self.epoch)
        world.greenlet.switch()
        if not self.proc.alive:
            raise Killed
        return not self.timed_out

    def _time_out(self, epoch: int) -> None:
        if self.waiting and self.epoch == epoch:
            self.timed_out = True
            self.world.wake(self)

    def sleep(self, seconds: float) -> None:
        """Let time go by."""
        self.wait(seconds)

    def give_way(self) -> None:
        """Let others run first, perhaps."""
        self.world.ready.append(self)
        self.world.greenlet.switch()
        if not self.proc.alive:
            raise Killed


class World:
    """See the module.

    Args:
        seed: of everything that is random.
        trace: called with each line of the log; None to keep its hash only.
    """

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(f"world {seed}")
        self.names = random.Random(f"names {seed}")
        self.now = 0.0
        self.steps = 0
        self.pids, self.idents, self._order = itertools.count(100), itertools.count(1), itertools.count()
        self.thread_numbers = itertools.count(1)
        self.ready: list[Task] = []
        self._timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.hosts: list[Host] = []
        self.dying: list[Proc] = []
        self.left_open: set[int] = set()  # real descriptors of dead processes; numbers of one history are used once
        self.greenlet = greenlet.getcurrent()
        self._trace = trace
        self._hash = hashlib.blake2b(digest_size=12)
        self.violations: list[str] = []
        self.disk: Any = None
        self.objects: Any = None
        self.net: Any = None
        self.mounts: Any = None
        self.history: Any = None
        self.triggers: list[Any] = []
        self.own_disks = False  # each host has its own at /data

    @property
    def digest(self) -> str:
        """Of the whole log so far."""
        return self._hash.hexdigest()

    def located(self, parts: list[str]) -> list[str]:
        """Where a path leads on the host of the task that runs."""
        if self.own_disks and parts[:1] == ["data"]:
            return ["near", hub.task.proc.host.name, *parts[1:]]
        return parts

    def log(self, what: str, who: str, *facts: object) -> None:
        """One line of what happened."""
        line = f"{self.now:.6f} {who} {what} {' '.join(map(str, facts))}"
        self._hash.update(line.encode())
        if self._trace is not None:
            self._trace(line)

    def violate(self, rule: str, detail: str) -> None:
        """Something happened that must never happen."""
        self.log("VIOLATION", rule, detail)
        self.violations.append(f"{rule}: {detail}")

    def uncaught(self, task: Task, error: BaseException) -> None:
        """A thread ended by an error."""
        text = "".join(traceback.format_exception(error))
        self.log("uncaught", f"{task.proc.name}/{task.name}", text if self._trace else type(error).__name__)
        self.violate("uncaught", f"{task.name}: {type(error).__name__}: {error}")

    def at(self, moment: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do something at a moment of world time, in the scheduler."""
        heapq.heappush(self._timers, (moment, next(self._order), action, arguments))

    def wake(self, task: Task) -> None:
        """Let a task that waits run."""
        if task.waiting:
            task.waiting = False
            task.epoch += 1
            self.ready.append(task)

    def run(self, until_s: float) -> None:
        """Until nothing is left to do, or for so long.

        Raises:
            Stuck: it takes too many steps.
        """
        hub.world, self.greenlet = self, greenlet.getcurrent()
        ready, timers, draw = self.ready, self._timers, self.rng.random
        while True:
            if self.dying:
                self._bury()
            if ready:
                number = int(draw() * len(ready))
                task = ready[number]
                ready[number] = ready[-1]
                ready.pop()
                if task.over:
                    continue
                if task.proc.paused:
                    task.proc.held.append(task)
                    continue
                self.steps += 1
                if self.steps > _MOST_STEPS:
                    where = "".join(traceback.format_stack(task.greenlet.gr_frame)[-6:])
                    raise Stuck(f"{self.steps} steps at {self.now:.3f} s; {task.proc.name}/{task.name} runs: {where}")
                hub.task = task
                task.greenlet.switch()
                hub.task = None
                continue
            if not timers or timers[0][0] > until_s:
                return
            moment, _, action, arguments = heapq.heappop(timers)
            self.now = max(self.now, moment)
            action(*arguments)

    def _bury(self) -> None:
        while self.dying:
            proc = self.dying.pop()
            for task in list(proc.tasks):
                task.waiting = False
                if not task.greenlet:  # it has not begun
                    continue
                hub.task = task
                task.greenlet.throw(Killed())
                hub.task = None
            self.ready[:] = [task for task in self.ready if task.proc is not proc]
            proc.tasks.clear()
            proc.held.clear()
            self.left_open |= proc.facts.get("memory", set())
            proc.facts.clear()
