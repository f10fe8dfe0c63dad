"""What the corpus holds of two ranks that come in by other doors: ``safe_ckpt.dcp``, ``publishing``, and a model in parts."""

from __future__ import annotations

import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
from sharded_runs import TP, OnCpus, base
from sharded_runs import made as sharded
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers_runs import Stop

import safe_ckpt
from corpus.filled import fill, same
from corpus.of_transformers import STEP, Noting, Numbers
from corpus.plain import CONFIG, Job
from safe_ckpt import dcp

NOTE = {"words": ["ü", None], "ratio": 0.1}


class Run:
    """A sharded model and its optimizer as one Stateful, as DCP's tutorial has it."""

    def __init__(self, job):
        self.job = job

    def state_dict(self):
        model, optimizer = get_state_dict(self.job.model, self.job.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.job.model, self.job.optimizer, **parts)


def save_dcp(rank, folder):
    job = Job(rank, sharded=True)
    for number in (1, 2):
        job.fill(number)
        dcp.save({"run": Run(job), "step": number, "note": NOTE}, checkpoint_id=folder / f"step-{number}")


def resume_dcp(rank, folder):
    """The newest, and the other one by its name; on any number of ranks."""
    for number, name in ((2, "."), (1, "step-1")):
        job = Job(rank, sharded=dist.is_initialized())
        state = {"run": Run(job), "step": 0, "note": {"words": ["", 0], "ratio": 0.0}}
        dcp.load(state, checkpoint_id=folder / name)
        assert (state["step"], state["note"]) == (number, NOTE)
        same(number, job.model, job.optimizer)


def published(rank):
    """What this rank writes: where, and of what numbers."""
    torch.manual_seed(5)
    return f"ranks/{rank}.pt", torch.nn.Linear(4, 3 + rank)


def save_published(rank, folder):
    name, model = published(rank)
    for number in (1, 2):
        fill(number, model)
        with safe_ckpt.publishing(folder, number, config=CONFIG, metrics={"loss": 1 / number}) as inside:
            (inside / "ranks").mkdir(exist_ok=True)
            torch.save(model.state_dict(), inside / name)
            if rank == 0:
                (inside / "note.txt").write_text(f"step {number}")


def resume_published(rank, folder):
    found = safe_ckpt.newest(folder)
    assert (found.step, found.metrics) == (2, {"loss": 0.5})
    name, model = published(rank)
    model.load_state_dict(torch.load(found.path / name))
    same(2, model)
    assert (found.path / "note.txt").read_text() == "step 2"


class Parted(OnCpus, Noting):
    """Its model has tensor parallelism."""


def trainer(rank, folder, source, *callbacks):
    options = {"save_steps": STEP, "lr_scheduler_type": "constant", "callbacks": callbacks}
    found = sharded(rank, folder, source, TP, Parted, **options)
    found.seen = []
    return found


def save_trainer(rank, folder):
    with tempfile.TemporaryDirectory() as source:
        base(source)
        with pytest.raises(KeyboardInterrupt):
            trainer(rank, folder, source, Numbers(), Stop(STEP + 1)).train()


def resume_trainer(rank, folder):
    """The rows that are left of the epoch."""
    with tempfile.TemporaryDirectory() as source:
        base(source)
        numbers = Numbers()
        found = trainer(rank, folder, source, numbers)
        found.train(resume_from_checkpoint=True)
    assert numbers.looked
    return found.seen


def save(rank, folder):
    warnings.simplefilter("ignore")
    save_trainer(rank, folder / "transformers_sharded")  # makes the group of processes that all use
    save_dcp(rank, folder / "dcp")
    save_published(rank, folder / "published")
    dist.barrier()


def resume(rank, folder):
    """The rows that are left with the Trainer."""
    warnings.simplefilter("ignore")
    left = resume_trainer(rank, folder / "transformers_sharded")
    resume_dcp(rank, folder / "dcp")
    resume_published(rank, folder / "published")
    dist.barrier()
    return left
