"""What an Accelerator's trackers are told of saves, and hooks given to its registration."""

import shutil
import threading
from dataclasses import replace

import pytest
import torch

from accelerate_runs import CONFIG, Tracker, Training, fresh, make
from safe_ckpt import SafeCheckpointError, Telemetry
from safe_ckpt.accelerate import SafeCheckpointPlugin, register

COMMITTED = {"ckpt/stall_s", "ckpt/write_gbps", "ckpt/seconds", "ckpt/bytes", "ckpt/failures", "ckpt/respawns"}
SILENT = replace(CONFIG, telemetry=Telemetry(logger_scalars=False))


@pytest.mark.parametrize("name", ["tensorboard", "ours"])
@pytest.mark.quick
def test_accelerate_trackers_hear_of_every_save(tmp_path, name):
    """At the next call or the end of training; a failure counts; hooks hear of everything. One that keeps a step for each
    value gets the save's step as that; any other gets it as a number."""
    tracker, seen = Tracker(name), []
    with fresh():
        accelerator = make(tmp_path, log_with=tracker)
        accelerator.init_trackers("project")
        handle = register(accelerator, CONFIG, hooks=[seen.append])
        Training(accelerator)
        accelerator.save_state(step=10)
        handle.wait()
        pending = tmp_path / ".safe_ckpt/pending"
        shutil.rmtree(pending)
        pending.touch()
        accelerator.save_state(step=20)
        with pytest.raises(SafeCheckpointError):
            handle.wait()
        pending.unlink()
        accelerator.save_state(step=30)
        assert len(tracker.heard) == 2
        accelerator.end_training()
    told = [(step or values.pop("ckpt/step"), set(values)) for step, values, _ in tracker.heard]
    assert told == [(10, COMMITTED), (20, {"ckpt/failures", "ckpt/respawns"}), (30, COMMITTED)]
    assert [step is None for step, *_ in tracker.heard] == [name == "ours"] * 3
    assert [values["ckpt/failures"] for _, values, _ in tracker.heard] == [0, 1, 1]
    assert {thread for *_, thread in tracker.heard} == {threading.current_thread()}
    assert [event.kind for event in seen if event.kind in ("committed", "failed")] == [
        "committed",
        "failed",
        "committed",
    ]


@pytest.mark.quick
def test_trackers_of_accelerate_hear_nothing_with_logger_scalars_off(tmp_path):
    """Telemetry(logger_scalars=False); the plugin takes hooks too."""
    tracker, seen = Tracker(), []
    with fresh():
        accelerator = make(tmp_path, log_with=tracker)
        accelerator.init_trackers("project")
        with SafeCheckpointPlugin(SILENT, hooks=[seen.append]).register(accelerator):
            Training(accelerator)
            accelerator.save_state(step=10)
    assert tracker.heard == []
    assert "committed" in [event.kind for event in seen]


class WandB(Tracker):
    """One step for all. It never goes back: what comes with a smaller one is dropped. A row ends when its step does."""

    def __init__(self):
        super().__init__("wandb")
        self.rows, self.step = {}, 0

    def log(self, values, step=None, commit=None):
        if step is not None and step < self.step:
            return
        self.step = self.step if step is None else step
        self.rows.setdefault(self.step, {}).update(values)
        self.step += step is None if commit is None else commit


class Comet(Tracker):
    """One step for all, the last one that was given."""

    def __init__(self):
        super().__init__("comet_ml")
        self.rows, self.step = {}, 0

    def log(self, values, step=None):
        self.step = self.step if step is None else step
        self.rows.setdefault(self.step, {}).update(values)


class DVCLive(Comet):
    """One step for all. ``log`` ends it, what ``tracker`` is told does not."""

    def __init__(self):
        super().__init__()
        self.name = "dvclive"

    @property
    def tracker(self):
        return self

    def log_metric(self, name, value):
        self.rows.setdefault(self.step, {})[name] = value

    def log(self, values, step=None):
        super().log(values, step)
        self.step += 1


@pytest.mark.parametrize("steps", [True, False], ids=["steps", "no steps"])
@pytest.mark.parametrize("path", [None, "step_{}000000"])
@pytest.mark.parametrize("kind", [WandB, Comet, DVCLive])
@pytest.mark.quick
def test_a_step_that_is_shared_with_the_user_stays_the_users(tmp_path, kind, path, steps):
    """Whatever the checkpoints' names: the same rows at the same steps as without us, and ours among them."""
    told = {}
    for ours in (False, True):
        tracker = kind()
        with fresh():
            accelerator = make(tmp_path / str(ours), log_with=tracker, automatic=path is None)
            accelerator.init_trackers("project")
            handle = register(accelerator, CONFIG) if ours else None
            accelerator.prepare(torch.nn.Linear(2, 2))
            for step in range(1, 5):
                accelerator.log({"loss": step}, **({"step": step} if steps else {}))
                if ours and step % 2 == 0:
                    accelerator.save_state(None if path is None else tmp_path / path.format(step))
                    handle.wait()
                accelerator.log({"accuracy": step}, **({"step": step} if steps else {}))
            accelerator.end_training()
        told[ours] = tracker.rows
    theirs = {step: {k: v for k, v in row.items() if "ckpt/" not in k} for step, row in told[True].items()}
    assert {step: row for step, row in theirs.items() if row} == told[False]
    numbers = [0, 1] if path is None else [2e6, 4e6]
    heard = [row["ckpt/step"] for row in told[True].values() if "ckpt/step" in row]
    assert heard == (numbers if kind is not Comet or steps else numbers[-1:])
