"""A Trainer of a model that Transformers shards when it loads it (``DistributedConfig``), on gloo ranks.

Transformers 5.24 refuses to resume such a model. Before that a save under tensor parallelism never ended, a resume failed on
shapes, and every rank got the optimizer of rank 0 (huggingface/transformers, pull request 48569).
"""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from sharded_runs import (
    FSDP,
    TP,
    TP_FSDP,
    WHOLE,
    Die,
    Safe,
    Stock,
    base,
    digest,
    everything,
    loaded,
    local,
    made,
    of_optimizer,
)
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers_runs import names

from kit.ranks import spawn_ranks, values
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify
from safe_ckpt.core.sharding import gather_transport
from safe_ckpt.errors import ConfigError, PeerLostError, RestoreError, SafeCheckpointError

pytestmark = pytest.mark.timeout(300)
LIMIT_S = 200


def ranks(function, count, *args):
    return spawn_ranks(function, count, *args, init=False, timeout_s=LIMIT_S)


def _train_and_die(rank, folder, layout):
    stock = made(rank, folder / "stock", folder / "base", layout, Stock, save_strategy="no")
    stock.train()
    (folder / f"want{rank}").write_text(digest(stock))
    made(rank, folder / "ours", folder / "base", layout, save_total_limit=3, callbacks=[Die()]).train()


def _go_on(rank, folder, layout):
    killed_at = max(int(name.removeprefix("checkpoint-")) for name in names(folder / "ours"))
    run = made(rank, folder / "ours", folder / "base", layout, save_total_limit=3)
    run.train(resume_from_checkpoint=True)
    return killed_at, digest(run) == (folder / f"want{rank}").read_text(), everything(run)


def same(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize(("layout", "count"), [(TP, 2), (FSDP, 2), (TP_FSDP, 4)], ids=["tp", "fsdp", "tp and fsdp"])
def test_a_killed_trainer_goes_on_bit_for_bit(tmp_path, layout, count):
    """As an uninterrupted stock run, on every rank; and ``from_pretrained`` reads whole weights from its checkpoints."""
    base(tmp_path / "base")
    dead = ranks(_train_and_die, count, tmp_path, layout)
    assert [outcome.exit_code for outcome in dead] == [-9] * count, dead
    found = values(ranks(_go_on, count, tmp_path, layout))
    assert all(killed_at >= 3 and equal for killed_at, equal, _ in found), [one[:2] for one in found]
    assert names(tmp_path / "ours") == ["checkpoint-4", "checkpoint-5", "checkpoint-6"]
    last = tmp_path / "ours" / "checkpoint-6"
    verify(last, read_manifest(last))
    read = AutoModelForCausalLM.from_pretrained(last).state_dict()
    assert all(found[0][2][name].equal(value) for name, value in read.items())


class Loaded(Exception):
    pass


class Look(TrainerCallback):
    """Ends ``train()`` where its first step would be."""

    def on_train_begin(self, *_, **__):
        raise Loaded


def groups_of(run):
    """What the optimizer and its schedule know of each group."""
    inner, schedule = run.optimizer.optimizer, run.lr_scheduler
    settings = [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups]
    return list(zip(settings, schedule.get_last_lr(), schedule.base_lrs, strict=True))


def _saves(rank, folder, layout):
    run = made(rank, folder / "run", folder / "base", layout, max_steps=3, save_steps=3, **SCHEDULE)
    run.train()
    return everything(run), groups_of(run)


def _loads(rank, folder, layout):
    run = made(rank, folder / "again", folder / "base", layout, save_strategy="no", callbacks=[Look()], **SCHEDULE)
    with pytest.raises(Loaded):
        run.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-3"))
    found = everything(run), groups_of(run)
    again = made(rank, folder / "again", folder / "base", layout, save_strategy="no", **SCHEDULE)
    again.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-3"))
    return *found, again.state.global_step


SCHEDULE = {"lr_scheduler_type": "linear", "warmup_steps": 2, "weight_decay": 0.1}
MESHES = {
    "tp on one rank": (TP, 2, 3, WHOLE, 1, 2),
    "tp and fsdp on fsdp": (TP_FSDP, 4, 3, FSDP, 2, 2),
    "fsdp on tp": (FSDP, 2, 2, TP, 2, 3),
}
"""How and on how many ranks it is sharded, and the groups of its optimizer; then and now."""


@pytest.mark.parametrize("meshes", MESHES.values(), ids=MESHES)
def test_another_mesh_gets_what_was_saved(tmp_path, meshes):
    """Weights, optimizer and schedule are those that were saved, although a mesh has parameter groups of its own.

    With biases the Trainer makes one group for what is sharded and one for what is not; on one rank that is one group.
    """
    then, count, groups_then, now, on, groups_now = meshes
    base(tmp_path / "base", bias=True)
    (saved, groups), *_ = values(ranks(_saves, count, tmp_path, then))
    assert len(groups) == groups_then
    for state, found, step in values(ranks(_loads, on, tmp_path, now)):
        assert same(state, saved)
        assert len(found) == groups_now
        assert all(group in groups for group in found)
        assert step == 6
