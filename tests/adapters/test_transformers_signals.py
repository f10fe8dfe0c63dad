"""A signal of ``save_on_signals`` ends ``train()`` at one step on all processes; a resume goes on exactly."""

import dataclasses
import logging
import os
import signal

import pytest
from transformers import TrainerCallback
from transformers_runs import CONFIG, SafeTrainer, fingerprint, names, trainer

from kit.ranks import spawn_ranks, values
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.transformers.lookers import anyone_looks

EACH_EPOCH = {"save_strategy": "epoch", "eval_strategy": "epoch"}
BEST = {
    "save_strategy": "best", "eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "eval_loss",
    "load_best_model_at_end": False, "greater_is_better": True,
}  # fmt: skip


class Stoppable(SafeTrainer):
    checkpoint_config = dataclasses.replace(CONFIG, save_on_signals=("SIGTERM",))


class Get(TrainerCallback):
    """This process gets SIGTERM within a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.step - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def told(made):
    """What was logged and evaluated, but for times and the summary of a whole run."""
    return [
        {key: value for key, value in row.items() if not key.endswith(("_runtime", "_per_second"))}
        for row in made.state.log_history
        if "train_runtime" not in row
    ]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("step", "more", "saved"),
    [
        (5, {}, [2, 4, 5]),
        (4, {}, [2, 4]),
        (5, {"save_strategy": "no"}, [5]),
        (5, EACH_EPOCH, [5]),
        (6, EACH_EPOCH, [6]),
        (7, {**EACH_EPOCH, "save_total_limit": 1}, [7]),
        (6, BEST, [3, 6]),
        (4, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}, [2, 4]),
    ],
)
def test_a_signal_ends_training_behind_a_save_from_which_it_goes_on_exactly(tmp_path, caplog, step, more, saved):
    """Whatever the strategies save: in the middle of an epoch nothing is evaluated for its end, at its end it is."""
    more = {"max_steps": 10, "logging_steps": 1, **more}
    straight = trainer(tmp_path / "straight", **more)
    straight.train()
    handler = signal.getsignal(signal.SIGTERM)
    stopped = trainer(tmp_path / "stopped", Stoppable, callbacks=[Get(step)], **more)
    stopped.train()
    assert stopped.stopped_by_signal
    assert stopped.state.global_step == step
    assert names(tmp_path / "stopped") == [f"checkpoint-{one}" for one in saved]
    path = tmp_path / f"stopped/checkpoint-{step}"
    verify_files(path, read_manifest(path))
    assert signal.getsignal(signal.SIGTERM) is handler
    resumed = trainer(tmp_path / "stopped", Stoppable, **more)
    resumed.train(resume_from_checkpoint=True)
    assert not resumed.stopped_by_signal
    assert "a callback stopped training" not in caplog.text
    assert fingerprint(resumed) == fingerprint(straight)
    assert told(resumed) == told(straight)
    assert resumed.state.best_metric == straight.state.best_metric


@pytest.mark.quick
def test_a_signal_in_the_last_step_is_no_stop(tmp_path):
    """Training is over then: nothing is saved besides, and nobody is told that it was stopped."""
    made = trainer(tmp_path, Stoppable, callbacks=[Get(6)], save_strategy="no")
    made.train()
    assert (made.stopped_by_signal, names(tmp_path)) == (False, [])


@pytest.mark.quick
def test_without_the_setting_a_signal_is_not_watched(tmp_path):
    """SIGTERM keeps its handler, and the Trainer its callbacks."""
    made = trainer(tmp_path)
    before, callbacks = signal.getsignal(signal.SIGTERM), list(made.callback_handler.callbacks)
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            seen.append(signal.getsignal(signal.SIGTERM) is before)

    made.add_callback(Look)
    made.train()
    assert seen == [True] * 6
    assert made.callback_handler.callbacks[:-1] == callbacks


@pytest.mark.quick
def test_no_save_is_waited_for_because_signals_are_watched(tmp_path):
    """What watches for them is a callback with an ``on_save``, and does not look at the folder."""
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            seen.append(anyone_looks(made))

    made = trainer(tmp_path, Stoppable, callbacks=[Look()])
    made.train()
    assert seen == [False] * 6
    assert len(made.callback_handler.callbacks) == len(trainer(tmp_path, callbacks=[Look()]).callback_handler.callbacks)


def _one_rank_gets_it(rank, folder, way):
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    more = {"ddp_backend": "gloo", "max_steps": 400, "save_steps": 1000, "per_device_train_batch_size": 2}
    more |= {"lr_scheduler_type": "constant"}
    if way == "straight":
        more |= {"max_steps": int((folder / "step").read_text()) + 3}
        made = trainer(folder / way, **more)
        made.train()
        return fingerprint(made)
    if way == "resumed":
        more |= {"max_steps": int((folder / "step").read_text()) + 3}
        made = trainer(folder / "stopped", Stoppable, **more)
        made.train(resume_from_checkpoint=True)
        return fingerprint(made)
    said: list[str] = []
    heard = logging.Handler()
    heard.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("safe_ckpt").addHandler(heard)
    made = trainer(folder / way, Stoppable, callbacks=[Get(3)] if rank == 1 else [], enable_jit_checkpoint=True, **more)
    made.train()
    if rank == 0:
        (folder / "step").write_text(str(made.state.global_step))
    aside = any("enable_jit_checkpoint is left aside" in line for line in said)
    return made.state.global_step, made.stopped_by_signal, names(folder / way), aside


@pytest.mark.timeout(180)
def test_a_signal_on_one_process_stops_all_trainers_at_one_step(tmp_path):
    """Beside ``enable_jit_checkpoint``, which is left aside, by name: a resume ends as a run that was not stopped."""
    pytest.importorskip("transformers.trainer_jit_checkpoint")
    stopped = values(spawn_ranks(_one_rank_gets_it, 2, tmp_path, "stopped", init=False, timeout_s=120))
    step = stopped[0][0]
    name = [f"checkpoint-{step}"]
    assert stopped == [(step, True, name, False), (step, True, name, True)]  # said where the signal came
    assert 3 <= step < 400
    found = [values(spawn_ranks(_one_rank_gets_it, 2, tmp_path, way, init=False)) for way in ("straight", "resumed")]
    assert found[0] == found[1]
