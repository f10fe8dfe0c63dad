"""What the corpus holds of ``Checkpointer``, on one rank and on two: how each was saved, and what a resume finds in it."""

from __future__ import annotations

import importlib
import math
import random

import numpy
import torch
from torch.distributed.fsdp import fully_shard

from corpus.filled import fill, same, step
from kit.limits import PATIENT
from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, Retention, RngState

CONFIG = CheckpointConfig(timeouts=PATIENT, retention=Retention(keep_last=2))
SHARDED = ("plain_sharded", "plain_together")
"""At first each sharded item had a ``.metadata`` of its own; now one says of all of them."""
INPUTS = torch.linspace(-1, 1, 8).reshape(1, 8)


class Job:
    """A model, an optimizer, data, and what belongs to this rank; its numbers follow from that of the step."""

    def __init__(self, rank=0, *, rng=False, frozen=False, sharded=False):
        torch.manual_seed(99)
        self.rank = rank
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 6))
        self.model[0].requires_grad_(not frozen)
        if sharded:
            for part in (self.model[1], self.model):
                fully_shard(part)
        self.optimizer = torch.optim.Adam([p for p in self.model.parameters() if p.requires_grad])
        self.state = {"model": self.model, "optimizer": self.optimizer, "note": {}, "own": PerRank({})}
        if rng:
            self.state["rng"] = RngState()

    def fill(self, number):
        """As it is at this step."""
        if not self.optimizer.state:
            step(self.model, self.optimizer, INPUTS)
        fill(number, self.model, self.optimizer)
        for name, there in self.data(number).items():
            self.state[name] = there
        seed(number)

    def data(self, number):
        own = {"numbers": torch.arange(3) + 10 * self.rank + number, "rank": self.rank}
        return {"note": {"epoch": number, "words": ["ü", None], "ratio": 0.1}, "own": PerRank(own)}

    def same(self, number):
        """Raise unless it is as at this step."""
        same(number, self.model, self.optimizer)
        expected = self.data(number)
        assert self.state["note"] == expected["note"]
        own, wanted = self.state["own"].value, expected["own"].value
        assert own["rank"] == wanted["rank"]
        assert torch.equal(own["numbers"], wanted["numbers"])
        if "rng" in self.state:
            drawn = draw()
            seed(number)
            assert drawn == draw()


def seed(number):
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def draw():
    return random.random(), float(numpy.random.rand()), torch.rand(1).item()


def save(folder, job, steps=(1, 2)):
    with Checkpointer(folder, CONFIG) as ckpt:
        for number in steps:
            job.fill(number)
            ckpt.save(number, job.state).result()


def resume(folder, job, steps=(2, 1)):
    """The newest, which is the first of ``steps``, and then each of the others by its number."""
    with Checkpointer(folder, CONFIG) as ckpt:
        for number in steps:
            assert ckpt.resume(job.state, step=None if number == steps[0] else number).step == number
            job.same(number)


def save_one_rank(folder):
    save(folder, Job(rng=True))


def resume_one_rank(folder):
    resume(folder, Job(rng=True))


def save_frozen(folder):
    """The two have the part that is not trained in common. Here it is smaller than what is shared otherwise."""
    # Names of the commit that saved it.
    unchanged = importlib.import_module("safe_ckpt.core.staging.unchanged")
    plan = importlib.import_module("safe_ckpt.core.state.plan")
    before = unchanged.LEAST_BYTES
    unchanged.LEAST_BYTES = plan.LEAST_BYTES = 512
    try:
        save(folder, Job(frozen=True))
    finally:
        unchanged.LEAST_BYTES = plan.LEAST_BYTES = before
    assert [file.stat().st_nlink for file in frozen_files(folder)] == [2, 2]


def frozen_files(folder):
    return sorted(folder.glob("*/model-00002-of-00002.safetensors"))


def resume_frozen(folder):
    """Git kept two files of what was one."""
    first, second = frozen_files(folder)
    assert first.read_bytes() == second.read_bytes()
    second.unlink()
    second.hardlink_to(first)
    resume(folder, Job(frozen=True))


def save_objects(url):
    """In an object store."""
    save(url, Job())


def resume_objects(url):
    resume(url, Job())


def save_marked(folder):
    """The newest has a number that is none."""
    job = Job()
    save(folder, job, [1])
    with Checkpointer(folder, CONFIG) as ckpt:
        job.fill(2)
        with torch.no_grad():
            job.model[0].weight[0, 0] = math.nan
        assert ckpt.save(2, job.state).result().marked


def resume_marked(folder):
    resume(folder, Job(), [1])


def save_ranks(rank, folder):
    save(folder / "plain_ranks", Job(rank))
    save(folder / SHARDED[-1], Job(rank, sharded=True))


def resume_ranks(rank, folder):
    resume(folder / "plain_ranks", Job(rank))
    for name in SHARDED:
        resume(folder / name, Job(rank, sharded=True))


def resume_sharded_on_one_rank(folder):
    """The shards of two, put together."""
    resume(folder, Job())


ONE_RANK = {
    "plain_one_rank": (save_one_rank, resume_one_rank),
    "plain_frozen": (save_frozen, resume_frozen),
    "plain_marked": (save_marked, resume_marked),
}
