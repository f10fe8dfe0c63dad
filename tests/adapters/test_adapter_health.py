"""A run whose weights go bad, under each framework: it goes on from the last healthy checkpoint, which was never deleted."""

import contextlib
import dataclasses
import math
import os
from pathlib import Path

import pytest
import torch
from lightning_runs import PACKAGES, QUICK, fit, package
from transformers import TrainerCallback
from transformers_runs import names as trainer_names
from transformers_runs import trainer as trainer_of

from accelerate_runs import CONFIG, Training, fresh, make
from kit.inside import save_in_flight
from programs_of.here import StoppedError, full_disk
from safe_ckpt import Health
from safe_ckpt.accelerate import register
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.errors import UnhealthyStateError

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
    pytest.mark.filterwarnings('ignore:.fit.ckpt_path="last". is set, but there is no last checkpoint available'),
]
STOP = dataclasses.replace(QUICK, health=Health(action="stop"))


def is_healthy(module):
    return all(tensor.isfinite().all() for tensor in module.state_dict().values() if tensor.is_floating_point())


def poisons(pl, step, *, optimizer=False):
    """A callback: before that step a weight, or what the optimizer knows of it, becomes NaN."""

    class Poison(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == step:
                weight = pl_module.net[0].weight
                tensor = trainer.optimizers[0].state[weight]["exp_avg"] if optimizer else weight.data
                tensor.view(-1)[3] = math.nan

    return Poison()


HOW = {
    "every step": {"every_n_train_steps": 1, "save_top_k": 1, "monitor": "step", "mode": "max"},
    "no monitor": {"every_n_train_steps": 1},
    "one name": {"every_n_train_steps": 1, "filename": "only", "enable_version_counter": False},
    "last alone": {"every_n_train_steps": 1, "save_top_k": 0, "save_last": True},
    "with a link": {"every_n_train_steps": 1, "save_last": "link"},
    "all": {"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}"},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("optimizer", [False, True], ids=["weight", "optimizer"])
def test_lightning_goes_on_from_the_last_healthy_one(tmp_path, how, optimizer):
    """Whatever ModelCheckpoint is told to keep; its paths name healthy files, and ``last`` is one."""
    pl = package(PACKAGES[0])
    callbacks = [poisons(pl, 4, optimizer=optimizer)]
    _, callback, module = fit(tmp_path, callbacks=callbacks, settings={"max_steps": 8}, **HOW[how])
    assert not is_healthy(module)
    for path in {callback.best_model_path, callback.last_model_path, *callback.best_k_models} - {""}:
        assert not read_manifest(tmp_path / os.path.basename(os.path.realpath(path))).health["marked"], path
    marked = [path for path in tmp_path.glob("*.ckpt") if read_manifest(path).health["marked"]]
    assert marked if how == "all" else len(marked) == 1
    made, _, module = fit(tmp_path, resume="auto", seed=7, settings={"max_steps": 9}, **HOW[how])
    assert made.global_step == 9
    assert is_healthy(module)


def test_lightnings_last_is_a_healthy_checkpoint_or_none(tmp_path):
    """``ckpt_path="last"`` is Lightning's own search by name. Where all are marked it finds none, and says so."""
    pl = package(PACKAGES[0])
    how = {"every_n_train_steps": 2, "save_top_k": 0, "save_last": True}
    fit(tmp_path, callbacks=[poisons(pl, 4)], settings={"max_steps": 8}, **how)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["last.ckpt", "unhealthy-last.ckpt"]
    made, _, module = fit(tmp_path, settings={"max_steps": 9}, path="last", **how)
    assert made.global_step == 9
    assert is_healthy(module)
    other = tmp_path / "other"
    fit(other, callbacks=[poisons(pl, 0)], settings={"max_steps": 4}, **how)
    assert all(read_manifest(path).health["marked"] for path in other.glob("*.ckpt"))
    made, callback, module = fit(other, settings={"max_steps": 2}, path="last", seed=3, **how)
    assert made.global_step == 2
    assert is_healthy(module)
    assert not read_manifest(other / os.path.basename(callback.last_model_path)).health["marked"]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_score_of_a_callback_is_no_alarm(tmp_path, name):
    """EarlyStopping begins with an infinite score; a metric that is NaN is no weight."""
    pl = package(name)
    stopping = pl.callbacks.EarlyStopping("val_loss", patience=100)
    _, callback, _ = fit(tmp_path, name=name, callbacks=[stopping], every_n_train_steps=1, save_top_k=-1)
    assert len(callback.best_k_models) == 0
    found = [read_manifest(path).health for path in tmp_path.glob("*.ckpt")]
    assert len(found) >= 3
    assert [health["healthy"] for health in found] == [True] * len(found)


def test_lightning_stops_on_all_ranks_at_bad_numbers_if_told_to(tmp_path):
    """All ranks raise at the next hook; the message names the tensor."""
    pl = package(PACKAGES[0])
    with pytest.raises(UnhealthyStateError, match=r"state_dict.net.0.weight has \d+ NaN"):
        fit(tmp_path, callbacks=[poisons(pl, 2)], settings={"max_steps": 8}, config=STOP, every_n_train_steps=1)


def test_accelerate_goes_on_from_the_last_healthy_one(tmp_path):
    """With automatic names and a limit of two: the healthy one is neither counted nor deleted."""
    with fresh():
        accelerator = make(tmp_path, limit=2)
        with register(accelerator, CONFIG):
            training = Training(accelerator)
            for number, batch in enumerate(training.loader):
                training.step(batch)
                if number == 2:
                    training.net[0].weight.data[0, 0] = math.inf
                accelerator.save_state()
    folder = tmp_path / "checkpoints"
    marked = {path.name: read_manifest(path).health["marked"] for path in folder.glob("checkpoint_*")}
    assert marked == {"checkpoint_0": False, "checkpoint_1": False, "checkpoint_5": True}
    with fresh():
        accelerator = make(tmp_path, limit=2)
        with register(accelerator, CONFIG) as handle:
            training = Training(accelerator)
            training.scramble()
            accelerator.load_state()
            assert training.counter.count == 2
            assert is_healthy(training.net)
            assert handle is not None


def test_accelerate_keeps_a_healthy_checkpoint_where_a_bad_one_has_its_name(tmp_path):
    """One directory is saved into again and again: bad, good, bad."""
    with fresh():
        accelerator = make(tmp_path, limit=2)
        accelerator.project_configuration.automatic_checkpoint_naming = False
        with register(accelerator, CONFIG):
            training = Training(accelerator)
            training.step(next(iter(training.loader)))
            healthy = training.net[0].weight.detach().clone()
            for value in (math.inf, None, math.nan):
                with torch.no_grad():
                    training.net[0].weight.copy_(healthy)
                    if value is not None:
                        training.net[0].weight[0, 0] = value
                accelerator.save_state(str(tmp_path / "own"))
    assert not read_manifest(tmp_path / "own").health["marked"]
    assert read_manifest(tmp_path / "unhealthy-own").health["marked"]


class Score(TrainerCallback):
    """Scores of the evaluations, one after the other; behind the second one the optimizer's state goes bad."""

    def __init__(self, scores, bad_step=2):
        self.scores, self.bad_step = list(scores), bad_step

    def on_evaluate(self, args, state, control, metrics=None, **_):
        metrics["eval_score"] = self.scores.pop(0)

    def on_step_end(self, args, state, control, optimizer=None, **_):
        if state.global_step == self.bad_step:
            inner = getattr(optimizer, "optimizer", optimizer)
            next(iter(inner.state.values()))["exp_avg_sq"].view(-1)[0] = math.inf


def scored(folder, scores, bad_step=2, **more):
    """A Trainer that evaluates and saves at each of four steps, and loads the best at its end."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_score", "greater_is_better": True}
    each = {"save_steps": 1, "eval_steps": 1, "eval_strategy": "steps", "save_total_limit": 2, "max_steps": 4}
    return trainer_of(folder, callbacks=[Score(scores, bad_step)], **{**each, **best, **more})


def test_the_best_of_a_trainer_is_a_healthy_one(tmp_path):
    """The best score belongs to a marked checkpoint: it is not the best, is not loaded, and no healthy one goes for it."""
    made = scored(tmp_path, [0.5, 0.9, 0.7, 0.2])
    made.train()
    assert not read_manifest(Path(made.state.best_model_checkpoint)).health["marked"]
    assert made.state.best_metric != 0.9
    assert is_healthy(made.model)


@pytest.mark.parametrize("failing", [{2}, {1, 2}, {2, 3}, {1}])
def test_the_best_of_a_trainer_is_one_that_was_saved(tmp_path, failing):
    """The save of the best score fails, and training goes on: the best of those that are there is named, kept and loaded."""
    scores = dict(zip(range(1, 5), (0.5, 0.9, 0.7, 0.2), strict=True))
    made = scored(tmp_path, scores.values(), bad_step=None)
    made.checkpoint_config = dataclasses.replace(QUICK, on_failure="warn", max_consecutive_failures=100)
    with full_disk(lambda: made.state.global_step in failing):
        made.train()
    saved = {step: score for step, score in scores.items() if step not in failing}
    best_step = max(saved, key=saved.get)
    assert made.state.best_metric == saved[best_step]
    assert Path(made.state.best_model_checkpoint).name == f"checkpoint-{best_step}"
    assert trainer_names(tmp_path) == sorted({f"checkpoint-{best_step}", "checkpoint-4"})


class SavesBetween(TrainerCallback):
    """Behind a step that is not evaluated; the next one raises."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 6:
            raise StoppedError
        control.should_save |= state.global_step == 5


def test_a_save_without_an_evaluation_names_no_best_that_was_not_saved(tmp_path):
    """Behind a best whose save failed: the best of those that are there stays, and who resumes finds it as without a stop."""
    more = {"bad_step": None, "save_total_limit": 1, "save_steps": 2, "eval_steps": 2, "max_steps": 8}
    stopped = scored(tmp_path, [0.5, 0.9, 0.7], **more)
    stopped.add_callback(SavesBetween())
    stopped.checkpoint_config = dataclasses.replace(QUICK, on_failure="warn", max_consecutive_failures=100)
    with full_disk(lambda: stopped.state.global_step == 4), contextlib.suppress(StoppedError):
        stopped.train()
    assert trainer_names(tmp_path) == ["checkpoint-2", "checkpoint-5"]
    resumed = scored(tmp_path, [0.7, 0.2], **more)
    resumed.train(resume_from_checkpoint=True)
    assert (resumed.state.best_global_step, resumed.state.best_metric) == (6, 0.7)
    assert trainer_names(tmp_path) == ["checkpoint-6", "checkpoint-8"]


class SlowCommit(TrainerCallback):
    """The save of that step is not committed until somebody waits for a save."""

    def __init__(self, step, stack):
        self.step, self.stack = step, stack

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            self.stack.enter_context(save_in_flight())


def test_the_best_of_a_trainer_stays_though_its_commit_is_slow(tmp_path):
    """Evaluated behind its save, and the next save comes before its commit: as the best one it is kept beside the newest."""
    with contextlib.ExitStack() as stack:
        callbacks = [Score([0.9, 0.2], bad_step=None), SlowCommit(6, stack)]
        best = {"metric_for_best_model": "eval_score", "greater_is_better": True, "eval_strategy": "epoch"}
        trainer_of(tmp_path, save_steps=1, save_total_limit=1, max_steps=12, callbacks=callbacks, **best).train()
    assert trainer_names(tmp_path) == ["checkpoint-12", "checkpoint-6"]


class Poison(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **_):
        if state.global_step == 2:
            model.lm_head.weight.data[3, 3] = math.nan


def test_a_trainer_goes_on_from_the_last_healthy_one(tmp_path):
    """``resume_from_checkpoint=True`` passes over marked ones; ``save_total_limit`` does not count them."""
    trainer_of(tmp_path, save_steps=1, save_total_limit=1, callbacks=[Poison()]).train()
    assert trainer_names(tmp_path) == ["checkpoint-2", "checkpoint-6"]
    made = trainer_of(tmp_path, save_steps=1, save_total_limit=2, max_steps=4)
    made.train(resume_from_checkpoint=True)
    assert is_healthy(made.model)
    assert made.state.global_step == 4


def test_masks_learnt_before_a_restart_are_known_after_it(tmp_path):
    """What was learnt of masks before is known after it: a Llama's buffers, and a mask of one's own."""
    for steps in (2, 4):
        made = trainer_of(tmp_path, save_steps=1, max_steps=steps)
        made.model.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        made.train(resume_from_checkpoint=steps > 2)
    found = [read_manifest(tmp_path / name).health["healthy"] for name in trainer_names(tmp_path)]
    assert found == [True] * 4
