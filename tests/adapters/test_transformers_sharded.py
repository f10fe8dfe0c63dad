"""A Trainer of a model that Transformers shards when it loads it (``DistributedConfig``), on gloo ranks.

Transformers 5.24 refuses to resume such a model. Before that a save under tensor parallelism never ended, a resume failed on
shapes, and every rank got the optimizer of rank 0 (huggingface/transformers, pull request 48569).
"""

import os
import signal
import time

import pytest
import torch
from sharded_runs import (
    EP,
    FSDP,
    TP,
    TP_FSDP,
    WHOLE,
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
from transformers_runs import Die, names

from kit.ranks import spawn_ranks, values
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.core.sharding import gather_transport
from safe_ckpt.errors import ConfigError, PeerLostError, RestoreError, SafeCheckpointError

pytestmark = pytest.mark.timeout(600)
LIMIT_S = 280


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


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        pytest.param(TP, 2, id="tp"),
        pytest.param(FSDP, 2, id="fsdp", marks=pytest.mark.thorough),
        pytest.param(TP_FSDP, 4, id="tp and fsdp", marks=pytest.mark.thorough),
    ],
)
def test_a_killed_trainer_goes_on_bit_for_bit(tmp_path, layout, count):
    """As an uninterrupted stock run, on every rank; and ``from_pretrained`` reads whole weights from its checkpoints."""
    base(tmp_path / "base")
    dead = ranks(_train_and_die, count, tmp_path, layout)
    assert [outcome.exit_code for outcome in dead] == [-9] * count, dead
    found = values(ranks(_go_on, count, tmp_path, layout))
    assert all(killed_at >= 3 and equal for killed_at, equal, _ in found), [one[:2] for one in found]
    assert names(tmp_path / "ours") == ["checkpoint-4", "checkpoint-5", "checkpoint-6"]
    last = tmp_path / "ours" / "checkpoint-6"
    verify_files(last, read_manifest(last))
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
    "experts, tp on one rank": (TP, 2, 3, WHOLE, 1, 2),
    "experts, each on a rank of its own, on tp": (EP, 2, 3, TP, 2, 3),
}
"""How and on how many ranks it is sharded, and the groups of its optimizer; then and now."""
ALWAYS = ("tp and fsdp on fsdp", "experts, tp on one rank")


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.thorough) for name in MESHES]
)
def test_a_resume_on_another_mesh_gets_the_saved_state(tmp_path, name):
    """Weights, optimizer and schedule are those that were saved, although a mesh has parameter groups of its own.

    With biases the Trainer makes one group for what is sharded and one for what is not; on one rank that is one group.
    Experts have gate and up in one weight: each rank of tensor parallelism has rows of both.
    """
    then, count, groups_then, now, on, groups_now = MESHES[name]
    base(tmp_path / "base", bias=True, experts="experts" in name)
    (saved, groups), *_ = values(ranks(_saves, count, tmp_path, then))
    assert len(groups) == groups_then
    for state, found, step in values(ranks(_loads, on, tmp_path, now)):
        assert same(state, saved)
        assert len(found) == groups_now
        assert all(group in groups for group in found)
        assert step == 6


def _three_failures(rank, folder):
    begun = time.monotonic()
    run = made(rank, folder / "run", folder / "base", TP, max_steps=2, save_steps=2)
    run.train()
    took_s = time.monotonic() - begun
    before = {name: local(value).clone() for name, value in of_optimizer(run).items()}
    again = made(rank, folder / "run", folder / "base", TP, max_steps=2, save_strategy="no", callbacks=[Look()])
    with pytest.raises(Loaded):
        again.train(resume_from_checkpoint=True)
    after = {name: local(value).clone() for name, value in of_optimizer(again).items()}
    weights = {name: local(value).clone() for name, value in again.model.state_dict().items()}
    trained = {name: local(value) for name, value in run.model.state_dict().items()}
    return took_s, same(before, after), same(weights, trained), after


def test_tensor_parallel_saves_end_and_each_rank_resumes_its_part(tmp_path):
    """A save ends, a resume fits the parts of every rank, and each rank gets its own part of the optimizer back."""
    base(tmp_path / "base")
    found = values(ranks(_three_failures, 2, tmp_path))
    assert [(optimizer, weights) for _, optimizer, weights, _ in found] == [(True, True)] * 2
    assert max(took_s for took_s, *_ in found) < 200, "it waited for a rank that never gathered"
    (*_, first), (*_, second) = found
    assert not (tmp_path / "run" / "checkpoint-2" / "optimizer.pt").exists(), "that of rank 0, for every rank"
    parts = [name for name in first if name.endswith("q_proj.weight.exp_avg")]
    assert parts
    assert not any(first[name].equal(second[name]) for name in parts)


class FailsOn1(Safe):
    """Fails on rank 1 while the others are on their way to the gather."""

    def save_model(self, *args, **kwargs):
        if self.args.process_index == 1:
            raise RuntimeError("mine")
        super().save_model(*args, **kwargs)


class FailsOn0(Safe):
    """Fails on rank 0 behind the gather."""

    def _save_rng_state(self, folder):
        if self.args.process_index == 0:
            raise RuntimeError("mine")
        super()._save_rng_state(folder)


def _fails(rank, folder, layout):
    for number, kind in enumerate((FailsOn0, FailsOn1)):
        run = made(rank, folder / kind.__name__, folder / "base", layout, kind, save_steps=2)
        begun = time.monotonic()
        with pytest.raises(RuntimeError if rank == number else SafeCheckpointError, match="mine"):
            run.train()
        assert time.monotonic() - begun < 120, "the others waited in a collective"


@pytest.mark.parametrize(
    "layout", [pytest.param(TP, id="tp"), pytest.param(FSDP, id="fsdp", marks=pytest.mark.thorough)]
)
def test_an_error_of_one_rank_is_raised_on_all(tmp_path, layout):
    """Before the gather or behind it; no checkpoint appears."""
    base(tmp_path / "base")
    values(ranks(_fails, 2, tmp_path, layout))
    assert names(tmp_path / "FailsOn0") == names(tmp_path / "FailsOn1") == []


def _dies(rank, folder, layout):
    run = made(rank, folder / "run", folder / "base", layout, save_steps=2)
    if rank == 1:
        gather_transport.to_rank_0 = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        run.train()
    return caught.value.ranks, time.monotonic() - begun


@pytest.mark.parametrize(
    "layout", [pytest.param(FSDP, id="fsdp"), pytest.param(TP, id="tp", marks=pytest.mark.thorough)]
)
def test_a_rank_that_dies_in_the_gather_is_named(tmp_path, layout):
    """Within seconds, and no checkpoint appears."""
    base(tmp_path / "base")
    alive, dead = ranks(_dies, 2, tmp_path, layout)
    assert dead.exit_code == -9
    assert alive.error is None, alive.error
    assert alive.value[0] == (1,)
    assert alive.value[1] < 120
    assert names(tmp_path / "run") == []


class Scored(Safe):
    def evaluate(self, *args, **kwargs):
        return {"eval_loss": {1: 3.0, 2: 1.0}.get(self.state.global_step, 2.0)}


def _whole_weights(rank, folder, layout):
    best = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_loss", "greater_is_better": False}
    kept = []

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2:
                kept.append(everything(run))

    run = made(rank, folder / "best", folder / "base", layout, Scored, max_steps=3, load_best_model_at_end=True,
               callbacks=[Keep()], **best)  # fmt: skip
    run.train()
    found = [all(kept[0][name].equal(value) for name, value in weights_of(run).items())]
    light = made(rank, folder / "light", folder / "base", layout, save_only_model=True, max_steps=2)
    light.train()
    again = made(rank, folder / "light", folder / "base", layout, save_strategy="no", callbacks=[Look()])
    with pytest.raises(Loaded):
        again.train(resume_from_checkpoint=True)
    found.append(same(weights_of(light), weights_of(again)))
    again = made(rank, folder / "plain", folder / "base", layout, save_strategy="no")
    with pytest.raises(RestoreError, match="optimizer was saved whole"):
        again.train(resume_from_checkpoint=str(folder / "plain" / "checkpoint-2"))
    found.append(same(weights_of(again), torch.load(folder / "plain.pt")))
    return found


def weights_of(run):
    return {name: value for name, value in everything(run).items() if name in run.model.state_dict()}


def _plain(rank, folder):
    run = made(rank, folder / "plain", folder / "base", WHOLE, max_steps=2)
    run.train()
    torch.save(run.model.state_dict(), folder / "plain.pt")


@pytest.mark.parametrize(
    "layout", [pytest.param(FSDP, id="fsdp"), pytest.param(TP, id="tp", marks=pytest.mark.thorough)]
)
def test_whole_weights_are_read_into_parts(tmp_path, layout):
    """Of the best checkpoint, of one with weights alone, of a plain Trainer; a whole optimizer is refused by name."""
    base(tmp_path / "base")
    values(ranks(_plain, 1, tmp_path))
    assert values(ranks(_whole_weights, 2, tmp_path, layout)) == [[True] * 3] * 2
    light = {path.name for path in (tmp_path / "light" / "checkpoint-2").iterdir()}
    assert "model.safetensors" in light
    assert not [name for name in light if "optimizer" in name or "fsdp" in name]


def _refusals(rank, folder):
    with pytest.raises(ValueError, match="Resuming is not supported"):
        made(rank, folder / "run", folder / "base", TP, Stock)
    run = made(rank, folder / "run", folder / "base", TP)
    assert run.args.save_only_model is False
    run.model._is_distributed_loading_by_transformers = False
    with pytest.raises(ConfigError, match="DistributedConfig"):
        run.train()
    piped = loaded(folder / "base", TP)
    piped.config.distributed_config.pp_size = 2
    with pytest.raises(ValueError, match="Resuming is not supported"):  # theirs: we do not resume it either
        made(rank, folder / "run", folder / "base", TP, of=piped)
    fresh = made(rank, folder / "run", folder / "base", TP, of=None, model_init=lambda: loaded(folder / "base", TP))
    torch.distributed.barrier()  # rank 0 has the store: it stays until the other one has met it in the last mesh
    return fresh.args.save_only_model


def test_a_model_sharded_at_load_without_a_resume_stays_refused(tmp_path):
    """The stock refusal is passed only for what is resumed; the arguments are then as they were, ``model_init`` included."""
    base(tmp_path / "base")
    assert values(ranks(_refusals, 2, tmp_path)) == [False, False]
