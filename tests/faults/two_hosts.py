"""A job over several hosts: started, watched line by line, struck."""

import os
import random
from dataclasses import dataclass, field

import host_job

from kit.patience import wait_until

START_S = 60.0


RANKS_PER_HOST = 2


def chosen(name, usual):
    """How many trials, and the random choices for them, from a seed that is printed."""
    seed = int(os.environ.get("SAFE_CKPT_KILL_SEED") or random.randrange(1 << 30))
    print(f"SAFE_CKPT_KILL_SEED={seed}")
    return int(os.environ.get(name, usual)), random.Random(seed)


@dataclass
class Said:
    """One line of a job."""

    word: str
    rank: int
    step: int
    rest: list[str]
    at: float
    seconds: float = 0.0


@dataclass
class Job:
    """A job over some hosts, rank 0 on the first of them, so many ranks on each."""

    hosts: list
    plan: host_job.Plan
    per_host: int = RANKS_PER_HOST
    processes: list = field(default_factory=list)

    @classmethod
    def begin(cls, hosts, folder, number, *, per_host=RANKS_PER_HOST, **more):
        work = hosts[0].work
        size = len(hosts) * per_host
        plan = host_job.Plan(
            folder=folder,
            lines=work / f"lines{number}",
            master=hosts[0].address,
            port=20000 + number,
            size=size,
            **more,
        )
        plan.lines.touch()
        job = cls(hosts, plan, per_host)
        for rank in range(size):
            job.processes.append(hosts[rank // per_host].fork(host_job.lead, plan, rank))
        return job

    def lines(self):
        """What it has said so far."""
        *whole, _ = self.plan.lines.read_text().split("\n")
        return [parsed(line) for line in whole]

    def said(self, *words):
        return [line for line in self.lines() if line.word in words]

    def await_words(self, word, count, seconds, what=""):
        """Wait until it has said the word so often; fails at once when it has ended before."""

        def there():
            if len(self.said(word)) >= count:
                return True
            if all(not process.is_alive() for process in self.processes):
                raise AssertionError(f"ended without {word} {what}: {self.text()}")
            return False

        try:
            wait_until(there, seconds)
        except TimeoutError:
            raise AssertionError(f"no {count} {word} within {seconds} s {what}: {self.text()}") from None

    def text(self):
        return "\n" + self.plan.lines.read_text()[-6000:]

    def reap(self):
        for process in self.processes:
            process.join(timeout=30)


def parsed(line):
    said, _, at = line.rpartition(" @")
    word, *rest = said.split()
    seconds = float(rest[1]) if word == "HELD" else 0.0
    numbers = [int(value) if value.isdigit() else -1 for value in rest[:2]]
    rank, step = (0, numbers[0]) if word == "COMMITTED" else (*numbers, -1, -1)[:2]
    return Said(word, rank, step, rest[2:], float(at), seconds)


def check_start(job, committed, where):
    """What a start of a job promises: it goes on by itself, at nothing older, and with every byte. Returns its step."""
    job.await_words("RESUMED", job.plan.size, START_S, where)
    said = f"{where}: {job.text()}"
    steps = {line.step for line in job.said("RESUMED")}
    assert len(steps) == 1, said
    (step,) = steps
    assert step >= committed, f"step {step} is older than {committed}, which was reported committed; {said}"
    return step
