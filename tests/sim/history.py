"""One history: a world, jobs in one directory, faults, and what the oracle says in the end."""

from __future__ import annotations

import collections
import contextlib
import gc
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sim import hosts, mirror_plans, object_plans, plans, readers
from sim.disk import Disk
from sim.faults import Mounts
from sim.job import Job
from sim.loader import Slots
from sim.mirror_oracle import MirrorOracle
from sim.object_oracle import StoreOracle
from sim.objects import Objects
from sim.oracle import Oracle
from sim.shims.network import Network
from sim.world import Host, Killed, Proc, Stuck, World, here, hub

DIRECTORY = "/data/run"
_NEVER = (
    "RestoreError", "UnexpectedError", "UnsupportedFormatError", "HostileCheckpointError", "TamperedError", "DesyncError",
    "ForkedError", "ClosedError", "ConfigError", "StateError",
)  # fmt: skip
"""Errors of which no fault here is a cause."""


@dataclass
class Result:
    """What came of a history.

    Attributes:
        digest: of its whole log; equal for equal seeds.
        coverage: how often each fault met each phase.
    """

    seed: int
    violations: list[str]
    digest: str
    steps: int
    virtual_s: float
    counts: dict[str, int]
    coverage: dict[tuple[str, str], int] = field(default_factory=dict)
    faults: list[Any] = field(default_factory=list)


class History:
    """See the module.

    Args:
        seed: decides everything.
        slots: where processes get their modules.
        trace: called with each line of the log.
        faults: these alone, of those in the plan, by their place; None for all.
    """

    def __init__(
        self, seed: int, slots: Slots, trace: Callable[[str], None] | None = None, faults: list[int] | None = None
    ) -> None:
        self.seed, self._slots = seed, slots
        self.world = World(seed, trace)
        self.choices = random.Random(f"choices {seed}")
        self.plan = plans.plan_of(seed)
        if faults is not None:
            self.plan.faults = [one for number, one in enumerate(self.plan.faults) if number in faults]
        self.coverage: dict[tuple[str, str], int] = {}
        self.trouble_s = 0.0
        self.worst_until = 0.0
        world = self.world
        world.disk = Disk(world, local=self.plan.local, exchanges=self.plan.exchanges, links=self.plan.links)
        world.disk.stale_s = self.plan.stale_s
        world.disk.make_folder("/data")
        world.disk.make_folder("/tmp")
        world.mounts = Mounts(world)
        world.mounts.slow = self.plan.slow
        world.net = Network(world)
        world.hosts = [Host(world, number) for number in range(self.plan.hosts)]
        for host in world.hosts:
            host.up = True
        world.objects = Objects(world)
        self.oracle = Oracle(world, DIRECTORY, self.plan.keep_last)
        self.directory = DIRECTORY
        if self.plan.objects:
            self._move_to_a_store()
        self.mirror: Any = None
        if self.plan.mirror:
            below = mirror_plans.URL.rpartition("/")[2]
            self.mirror = MirrorOracle(world, below, self.plan.mirror, self.oracle)
        if hosts.has_hosts(seed):
            self.oracle, self.mirror = hosts.set_up(world, self.plan)
        self._taken: list[tuple[Any, Proc]] = []
        self.jobs: list[Job] = []
        world.history = self

    def _move_to_a_store(self) -> None:
        world, self.directory = self.world, object_plans.URL
        self.oracle = StoreOracle(world, object_plans.URL.rpartition("/")[2], self.plan.keep_last)
        for host in world.hosts:  # what a host fetches lies on a disk of its own
            world.disk.make_folder(f"/tmp/{host.name}")

    def take_slot(self, proc: Proc) -> Any:
        """The modules of a process that starts."""
        slot = self._slots.take()
        if not getattr(slot, "is_probed", False):
            _probe(slot)
        self._taken.append((slot, proc))
        if self.plan.objects:
            slot.load("tempfile").tempdir = f"/tmp/{proc.host.name}"
        return slot

    def run(self) -> Result:
        """Run it to its end."""
        world, plan = self.world, self.plan
        was = gc.isenabled()
        gc.disable()
        hub.world = world
        try:
            for job in plan.jobs:
                self.add_job(job)
            for fault in plan.faults:
                fault.arm(self)
            if readers.has_readers(self.seed):
                beside = readers.Readers(self)
                beside.begin()
                world.run(plan.horizon_s)
                beside.end()
            else:
                world.run(plan.horizon_s)
            self.heal()
            world.run(plan.horizon_s + 900.0)
            self._refuse_living("does not end")
            self._judge()
            self._audit()
        except Stuck as stuck:
            world.violate("stuck", str(stuck))
        finally:
            self._end()
            hub.world = hub.task = None
            if was:
                gc.enable()
        counts = dict(sum((collections.Counter(one.counts) for one in self._oracles()), collections.Counter()))
        counts |= {"calls of the disk": world.mounts.calls, "requests": world.objects.requests}
        return Result(
            seed=self.seed, violations=world.violations, digest=world.digest, steps=world.steps, virtual_s=world.now,
            counts=counts, coverage=self.coverage, faults=plan.faults,
        )  # fmt: skip

    def add_job(self, spec: plans.JobPlan) -> None:
        """Start a job when it is due."""
        facts = {**spec.facts, "directory": self.directory}
        job = Job(self, spec.name, spec.hosts, facts)
        self.jobs.append(job)
        self.world.at(max(self.world.now, spec.at), job.start)

    def heal(self) -> None:
        """No more faults: all hosts are up, everything answers."""
        world = self.world
        world.mounts.heal()
        world.objects.heal()
        world.triggers = []
        world.net.losing = world.net.delays = 0.0
        world.disk.free_bytes = 1 << 40
        for host in world.hosts:
            host.cut_off = 0.0
            host.up = True
            for proc in host.procs:
                proc.go_on()
        world.log("healed", "world")

    def _audit(self) -> None:
        """A last job comes, in a world without faults: it must start by itself, resume, save, and leave nothing behind."""
        world = self.world
        world.disk.stale_s = 0.0
        spec = self.plan.audit
        spec.at = world.now + 1.0
        before = world.now
        self.add_job(spec)
        job = self.jobs[-1]
        world.run(before + 900.0)
        self._refuse_living("does not end (audit)")
        if hosts.has_hosts(self.seed) and not job.done and not self.oracle.is_anywhere(spec.hosts):
            return
        if not job.done or len(job.attempts) > 1:
            world.violate("needs a human", f"the last start of all did not succeed: {len(job.attempts)} attempts")
            return
        self._judge()
        for key in [key for one in self._oracles() for key in one.left_behind()]:
            world.violate("left behind", key)
        for path in world.disk.tree():
            hidden = path.removeprefix(f"{DIRECTORY}/.safe_ckpt")
            stays = hidden == "" or hidden.startswith(("/events.jsonl", "/quarantine", "/pins"))
            if hidden != path and not stays:
                world.violate("left behind", path)

    def _oracles(self) -> list[Oracle]:
        return [self.oracle, *([self.mirror] if self.mirror is not None else [])]

    def _judge(self) -> None:
        for one in self._oracles():
            one.judge_end()

    def opened(self, proc: Proc, home: str) -> None:
        """A process has cleaned up a directory that it owns from now on."""
        (self.mirror if self.mirror is not None and home == "ObjectHome" else self.oracle).opened(proc)

    def _refuse_living(self, what: str) -> None:
        for host in self.world.hosts:
            for proc in host.procs:
                if proc.alive and "rank" in proc.facts:
                    where = proc.facts.get("phase", "?")
                    names = sorted(task.name for task in proc.tasks)
                    self.world.violate("hangs", f"{proc.name} {what}: in {where}; threads {names}")
                    proc.kill("hangs")
        self.world.run(self.world.now)

    def _end(self) -> None:
        for host in self.world.hosts:
            for proc in host.procs:
                proc.kill("end")
        self.world._bury()
        for fd in self.world.left_open:
            os.close(fd)
        for slot, _ in self._taken:
            self._slots.give_back(slot)
        self._taken = []

    def raised(self, proc: Proc, error: BaseException, *, known: bool) -> None:
        """A rank ended by an error."""
        self.oracle.count(f"raised {type(error).__name__}")
        if type(error).__name__ in _NEVER:
            self.world.violate("unexpected", f"{proc.name}: {type(error).__name__}: {error}")
        if not known:
            import traceback

            lines = "".join(traceback.format_exception(error)[-3:])
            self.world.violate("foreign error", f"{proc.name}: {type(error).__name__}: {error} {lines}")

    @contextlib.contextmanager
    def timed(self, what: str, limits_s: dict[str, float]) -> Iterator[None]:
        """A call that must be over in time, but for what faults took."""
        task = here()
        proc, began, trouble = task.proc, self.world.now, self.trouble_s
        try:
            yield
        finally:
            if proc.alive:
                took = self.world.now - began - (self.trouble_s - trouble)
                if took > limits_s[what]:
                    self.world.violate("too late", f"{proc.name}: {what} took {took:.1f} s of {limits_s[what]:.1f}")

    def met(self, kind: str, proc: Proc | None) -> None:
        """A fault met a phase."""
        inner = hub.task.inner if hub.task is not None and hub.task.proc is proc else ""
        where = inner or proc.facts.get("phase", "start") if proc is not None else "world"
        self.coverage[kind, where] = self.coverage.get((kind, where), 0) + 1
        self.world.log("FAULT", kind, proc.name if proc is not None else "", where)


def _probe(slot: Any) -> None:
    """See, and change nothing: in which phase of a save a process is."""
    for module, kind, method, name in (
        ("core.home.file_home", "FilePublication", "prepare", "prepare"),
        ("core.home.file_home", "FilePublication", "commit", "commit"),
        ("core.home.file_home", "FileHome", "_repair", "repair"),
        ("core.home.file_home", "FileHome", "_sweep", "sweep"),
        ("core.saving.one_save", "", "write", "write"),
        ("core.saving.after_commit", "AfterCommit", "apply_rules", "retain"),
        ("core.home.lease", "LeaseLock", "acquire", "lock"),
        ("core.home.objects.home", "ObjectPublication", "prepare", "prepare"),
        ("core.home.objects.home", "ObjectPublication", "commit", "commit"),
        ("core.home.objects.home", "ObjectHome", "_sweep", "sweep"),
        ("extensions.mirror.mirror", "MirrorUploads", "_work", "mirror"),
    ):
        found = slot.load(f"safe_ckpt.{module}")
        _mark(getattr(found, kind) if kind else found, method, name)
    slot.load("safe_ckpt.checkpointer")
    slot.is_probed = True


def _mark(kind: Any, method: str, name: str) -> None:
    real = getattr(kind, method)

    def marked(self: Any, *given: Any, **named: Any) -> Any:
        task = here()
        before, task.inner = task.inner, name
        try:
            result = real(self, *given, **named)
            if name == "sweep":
                task.world.history.opened(task.proc, type(self).__name__)
            return result
        finally:
            task.inner = before

    setattr(kind, method, marked)


class _Lines(logging.Handler):
    """What the modules log goes into the log of the world."""

    def emit(self, record: logging.LogRecord) -> None:
        world, task = hub.world, hub.task
        if world is None or task is None:
            return
        if record.msg.startswith("not mirrored in time") and world.history.mirror is not None:
            world.history.mirror.told.add(task.proc)
        if world._trace is not None:
            world._trace(f"{world.now:.6f} {task.proc.name} | {record.levelname.lower()} {record.getMessage()}")


def quiet() -> None:
    """Set up logging and what happens to destructors of dead processes; once in an interpreter."""
    logging.getLogger("concurrent.futures").disabled = True  # it reports that a dead process's thread ends
    logger = logging.getLogger("safe_ckpt")
    if not any(isinstance(handler, _Lines) for handler in logger.handlers):
        logger.addHandler(_Lines())
        logger.propagate = False
        logger.setLevel(logging.INFO)
        before = sys.unraisablehook

        def unraisable(what: Any) -> None:
            if not issubclass(what.exc_type, Killed):
                before(what)

        sys.unraisablehook = unraisable


def run(seed: int, slots: Slots, **options: Any) -> Result:
    """Run one history."""
    quiet()
    return History(seed, slots, **options).run()
