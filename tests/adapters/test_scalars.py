"""What loggers and trackers are told of saves, and hooks given to the adapters."""

import json
import shutil
import threading
from dataclasses import replace

import pytest
import torch
from accelerate.tracking import GeneralTracker
from lightning.pytorch.cli import LightningCLI
from lightning_runs import module_class, package, trainer

from accelerate_runs import CONFIG, Training, fresh, make
from safe_ckpt import SafeCheckpointError, Telemetry
from safe_ckpt.accelerate import SafeCheckpointPlugin, register
from safe_ckpt.hooks.logging_hook import LoggingHook
from safe_ckpt.lightning import SafeCheckpointCallback

COMMITTED = {"ckpt/stall_s", "ckpt/write_gbps", "ckpt/seconds", "ckpt/bytes", "ckpt/failures", "ckpt/respawns"}
SILENT = replace(CONFIG, telemetry=Telemetry(logger_scalars=False))
pl = package("lightning.pytorch")


class Log(pl.loggers.CSVLogger):
    """Keeps what is said of saves, and on which thread."""

    def __init__(self, folder, *, fails=False):
        super().__init__(folder)
        self.heard = []
        self.fails = fails

    def log_metrics(self, metrics, step=None):
        if any(name.startswith("ckpt/") for name in metrics):
            self.heard.append((step, metrics, threading.current_thread()))
            if self.fails:
                raise RuntimeError("the logger broke")
        super().log_metrics(metrics, step)


def fit(folder, logger, *, config=CONFIG, callbacks=(), **more):
    callback = SafeCheckpointCallback(dirpath=folder, config=config, save_top_k=-1, **more)
    trainer(pl, [callback, *callbacks], folder, logger=logger, log_every_n_steps=1).fit(module_class(pl)())
    return callback


def test_lightning_loggers_hear_of_every_save(tmp_path):
    """At the step of the checkpoint, on the thread that trains, before fit returns; a logger that fails harms nobody."""
    log, broken = Log(tmp_path / "logs"), Log(tmp_path / "broken", fails=True)
    fit(tmp_path / "ckpt", [broken, log])
    assert [step for step, *_ in log.heard] == [step for step, *_ in broken.heard] == [3, 6, 9]
    for _, values, thread in log.heard:
        assert set(values) == COMMITTED
        assert thread is threading.current_thread()
        assert values["ckpt/bytes"] > 1000
        assert 0 < values["ckpt/stall_s"] < values["ckpt/seconds"]
        assert values["ckpt/write_gbps"] > 0
        assert values["ckpt/failures"] == values["ckpt/respawns"] == 0
    header = (tmp_path / "logs/lightning_logs/version_0/metrics.csv").read_text().splitlines()[0].split(",")
    assert {*COMMITTED, "train_loss"} <= set(header)


def test_lightning_loggers_that_break_at_a_commit_have_the_numbers(tmp_path, caplog):
    """A logger whose after_save_checkpoint raises, on rank 0 alone, has the numbers of that save; training goes on."""

    class Down(Log):
        def after_save_checkpoint(self, checkpoint_callback):
            raise ValueError("the logger is down")

    log = Down(tmp_path / "logs")
    fit(tmp_path / "ckpt", log)
    assert "after_save_checkpoint of <" in caplog.text
    assert "the logger is down" in caplog.text
    assert log.heard[0][0] == 3
    assert set(log.heard[0][1]) == COMMITTED


def test_lightning_loggers_hear_of_a_failure(tmp_path):
    """A save that failed counts, and fit still ends with its error."""

    class Break(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 4:
                trainer.checkpoint_callback._saver.land()  # the save of step 3 is to succeed
                pending = tmp_path / "ckpt/.safe_ckpt/pending"
                shutil.rmtree(pending)
                pending.touch()

    log = Log(tmp_path / "logs")
    with pytest.raises(SafeCheckpointError):
        fit(tmp_path / "ckpt", log, callbacks=[Break()])
    assert [(step, values["ckpt/failures"]) for step, values, _ in log.heard] == [(3, 0), (6, 1)]
    assert set(log.heard[1][1]) == {"ckpt/failures", "ckpt/respawns"}


def test_loggers_of_lightning_hear_nothing_with_logger_scalars_off(tmp_path):
    """Telemetry(logger_scalars=False); and hooks of a callback hear of everything, one shared by two of them once."""
    log, seen = Log(tmp_path / "logs"), []
    hook = seen.append
    second = SafeCheckpointCallback(dirpath=tmp_path / "second", config=SILENT, every_n_epochs=5, hooks=[hook])
    fit(tmp_path / "ckpt", log, config=SILENT, hooks=[hook], callbacks=[second])
    assert log.heard == []
    assert [event.step for event in seen if event.kind == "committed"] == [3, 6, 9]


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")  # Lightning's own calls
def test_lightning_cli_takes_hooks(monkeypatch):
    """By class_path, as everything else in its YAML."""
    hook = {"class_path": "safe_ckpt.hooks.logging_hook.LoggingHook"}
    callback = {"class_path": "safe_ckpt.lightning.SafeCheckpointCallback", "init_args": {"hooks": [hook]}}
    settings = [f"--trainer.callbacks={json.dumps([callback])}", "--trainer.logger=false", "--trainer.accelerator=cpu"]
    monkeypatch.setattr("sys.argv", ["train.py", *settings])
    cli = LightningCLI(module_class(pl), run=False, save_config_callback=None, seed_everything_default=1)
    (found,) = (each for each in cli.trainer.callbacks if isinstance(each, SafeCheckpointCallback))
    assert [type(each) for each in found.hooks] == [LoggingHook]


class Tracker(GeneralTracker):
    """Keeps what is said, and on which thread."""

    name = "ours"
    requires_logging_directory = False

    def __init__(self, name="ours"):
        super().__init__()
        self.name = name
        self.heard = []

    @property
    def tracker(self):
        return self.heard

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **_):
        self.heard.append((step, values, threading.current_thread()))


@pytest.mark.parametrize("name", ["tensorboard", "ours"])
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
