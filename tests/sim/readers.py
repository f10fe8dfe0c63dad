"""Readers as processes of their own beside the jobs of a history: what must never happen to what they hold.

Only the histories of a range of seeds have readers: all others stay as they are.
"""

from __future__ import annotations

import random
from typing import Any

from sim.oracle import _problem
from sim.world import Killed, Proc, here

FIRST, LAST = 7_000_000, 8_000_000
TTL_S = 6.0
_MOST_STARTS = 4


def has_readers(seed: int) -> bool:
    """Whether there are readers in this history."""
    return FIRST <= seed < LAST


def with_readers(plan: Any) -> Any:
    """The same plan, with more saves, a retention that keeps one, and hosts that see what is there."""
    plan.stale_s, plan.keep_last = 0.0, 1
    for job in plan.jobs:
        job.facts["config"] = {**job.facts["config"], "retention": {"keep_last": 1}}
        job.facts["steps"] += 6
    return plan


class Readers:
    """The readers of one history, and the rules that are held against what they see.

    Args:
        history: to which they belong.
    """

    def __init__(self, history: Any) -> None:
        self.history, self.world = history, history.world
        self.chance = random.Random(f"readers {history.seed}")
        self.over = False

    def begin(self) -> None:
        """Start some of them, at moments of their own."""
        for number in range(self.chance.choice((1, 2, 2, 3))):
            self.world.at(self.chance.uniform(0.0, 8.0), self._start, number, 0)

    def end(self) -> None:
        """The faults are over, and with them the readers."""
        self.over = True
        for host in self.world.hosts:
            for proc in host.procs:
                if "reader" in proc.facts:
                    proc.kill("no reader any more")

    def _start(self, number: int, count: int) -> None:
        host = self.chance.choice(self.world.hosts)
        if self.over or count >= _MOST_STARTS:
            return
        if not host.up:
            self.world.at(self.world.now + 2.0, self._start, number, count)
            return
        proc = Proc(self.world, host, f"reader{number}.{count}")
        proc.slot = self.history.take_slot(proc)
        proc.facts |= {"reader": number, "namespace": 4026531836}
        proc.at_end.append(lambda: self.world.at(self.world.now + 1.0, self._start, number, count + 1))
        proc.start(self._read)
        if self.chance.random() < 0.5:
            self.world.at(self.world.now + self.chance.uniform(0.5, 25.0), proc.kill, "a kill of a reader")

    def _read(self) -> None:
        task = here()
        proc, oracle = task.proc, self.history.oracle
        hold_s = self.chance.choice((0.1, 1.0, 3 * TTL_S))
        taken: list[int] = []
        missed: set[str] = set()
        began = 0
        try:
            follow = proc.slot.load("safe_ckpt.following").follow
            every = 1 if proc.facts["reader"] % 2 == 0 else None
            for one in follow(self.history.directory, every=every, limit=1000, ttl_s=TTL_S, timeout_s=60.0):
                since = self.world.now
                missed |= set(one.missed)
                if not taken:
                    began = max([one.sequence, *(other.sequence for other in oracle.commits.values())])
                if every is not None:
                    self._refuse_gaps(proc, one, began, taken, missed)
                taken.append(one.sequence)
                oracle.count("read")
                self.world.log("reads", proc.name, one.name, one.pinned)
                self._refuse_torn(proc, one, since)
                task.sleep(hold_s * self.world.rng.random())
                self._refuse_torn(proc, one, since)
        except Killed:
            raise
        except Exception as error:
            known = proc.slot.load("safe_ckpt.errors").SafeCheckpointError
            oracle.count(f"reader raised {type(error).__name__}")
            if not isinstance(error, (known, OSError)):
                self.world.violate("reader", f"{proc.name}: {type(error).__name__}: {error}")
        finally:
            if proc.alive:
                self.world.at(self.world.now, proc.kill, "exit")

    def _was_hindered(self, proc: Proc, since: float) -> bool:
        """Whether the reader could not show itself, or write: its pin may have ended."""
        oracle, since = self.history.oracle, since - 2 * TTL_S
        spans = [*oracle._hindered(proc, since, self.world.now), *oracle._full()]
        return any(end > since and start < self.world.now for start, end in spans)

    def _refuse_torn(self, proc: Proc, one: Any, since: float) -> None:
        if not one.pinned or self._was_hindered(proc, since):
            return
        oracle = self.history.oracle
        commit = oracle.commits.get(one.op_id)
        if commit is None:
            self.world.violate("read too early", f"{proc.name} took {one.name}, which nobody committed")
            return
        others = (other for other in oracle.commits.values() if other.name == commit.name)
        if any(other.sequence > commit.sequence for other in others) or commit.undone:
            return  # the step was saved again
        aside = oracle._at(f"{oracle.directory}/.safe_ckpt/quarantine").children.values()
        if commit.node in aside or any(commit.node in one.children.values() for one in aside):
            return  # a resume has read it wrongly
        hidden = f"{oracle.directory}/.safe_ckpt"
        pending = oracle._at(f"{hidden}/pending").children
        for op_id, left in oracle._at(f"{hidden}/trash").children.items():
            if commit.node in left.children.values() and op_id in pending and one.path.name in pending[op_id].children:
                return  # the step is being saved again: the old one has left, and the new one has not its name yet
        node = oracle._root().children.get(one.path.name)
        if node is not commit.node or _problem(node) is not None:
            what = "gone" if node is not commit.node else _problem(node)
            self.world.violate("held and gone", f"{proc.name} holds {one.name}: {what}")

    def _refuse_gaps(self, proc: Proc, one: Any, began: int, taken: list[int], missed: set[str]) -> None:
        """With ``every=1`` none is left out of what was committed since this reader began, unless it is told."""
        if not taken or self._was_hindered(proc, proc.started):
            return
        for other in self.history.oracle.commits.values():
            between = began < other.sequence < one.sequence
            again = any(
                more.name == other.name and more.sequence > other.sequence
                for more in self.history.oracle.commits.values()
            )
            if between and not other.undone and not again and other.sequence not in taken and other.name not in missed:
                self.world.violate("left out", f"{proc.name} was not given {other.name} ({other.sequence})")
