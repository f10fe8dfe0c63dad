"""What Lightning's loggers are told of saves, and hooks given to its callback."""

import json
import shutil
import threading
from dataclasses import replace

import pytest
from lightning_runs import module_class, package, trainer

from kit.limits import QUICK
from safe_ckpt import CheckpointConfig, SafeCheckpointError, Telemetry
from safe_ckpt.hooks.logging_hook import LoggingHook
from safe_ckpt.lightning import SafeCheckpointCallback

COMMITTED = {"ckpt/stall_s", "ckpt/write_gbps", "ckpt/seconds", "ckpt/bytes", "ckpt/failures", "ckpt/respawns"}
CONFIG = CheckpointConfig(timeouts=QUICK)
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


@pytest.mark.quick
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


@pytest.mark.quick
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


@pytest.mark.quick
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


@pytest.mark.quick
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
    from lightning.pytorch.cli import LightningCLI

    hook = {"class_path": "safe_ckpt.hooks.logging_hook.LoggingHook"}
    callback = {"class_path": "safe_ckpt.lightning.SafeCheckpointCallback", "init_args": {"hooks": [hook]}}
    settings = [f"--trainer.callbacks={json.dumps([callback])}", "--trainer.logger=false", "--trainer.accelerator=cpu"]
    monkeypatch.setattr("sys.argv", ["train.py", *settings])
    cli = LightningCLI(module_class(pl), run=False, save_config_callback=None, seed_everything_default=1)
    (found,) = (each for each in cli.trainer.callbacks if isinstance(each, SafeCheckpointCallback))
    assert [type(each) for each in found.hooks] == [LoggingHook]
