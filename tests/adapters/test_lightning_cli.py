"""The callback under a real LightningCLI, from arguments and from YAML. All in this process."""

import inspect
import os
import sys
import typing
from datetime import timedelta

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from safe_ckpt import CheckpointConfig, Retention, Timeouts
from safe_ckpt.errors import ConfigError
from safe_ckpt.lightning import SafeCheckpointCallback
from safe_ckpt.settings import texts

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
APPEND = "--trainer.callbacks+=safe_ckpt.lightning.SafeCheckpointCallback"


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SAFE_CKPT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # LightningCLI's own calls


def parse(*args, **options):
    return LightningCLI(
        BoringModel, args=list(args), seed_everything_default=False, trainer_defaults=QUIET, **{"run": False, **options}
    )


def callback(cli):
    (found,) = [one for one in cli.trainer.callbacks if isinstance(one, SafeCheckpointCallback)]
    return found


def test_arguments_of_the_command_line_reach_the_callback(tmp_path):
    """Its own arguments, ModelCheckpoint's, and the nested settings arrive with their types; the rest has its defaults."""
    built = callback(
        parse(
            APPEND,
            f"--trainer.callbacks.dirpath={tmp_path}",
            "--trainer.callbacks.resume=auto",
            "--trainer.callbacks.save_top_k=2",
            "--trainer.callbacks.monitor=loss",
            "--trainer.callbacks.train_time_interval=0:10:0",
            "--trainer.callbacks.config.timeouts.barrier_s=7",
            "--trainer.callbacks.config.save_on_signals=[SIGTERM]",
            "--trainer.callbacks.config.writer.direct_io=off",
        )
    )
    assert (built.dirpath, built.resume, built.save_top_k, built.monitor) == (str(tmp_path), "auto", 2, "loss")
    assert built._train_time_interval == timedelta(minutes=10)
    wanted = {"timeouts": {"barrier_s": 7}, "save_on_signals": ["SIGTERM"], "writer": {"direct_io": "off"}}
    assert built.config == CheckpointConfig.from_mapping(wanted)


def test_a_run_from_yaml_saves_as_the_file_says(tmp_path):
    """class_path and init_args with nested settings: fit runs and leaves a checkpoint where the file says.

    The configuration that LightningCLI saves beside it gives the same callback again.
    """
    file = tmp_path / "train.yaml"
    file.write_text(f"""
trainer:
  max_steps: 1
  default_root_dir: {tmp_path}
  limit_val_batches: 0
  callbacks:
    - class_path: safe_ckpt.lightning.SafeCheckpointCallback
      init_args:
        dirpath: {tmp_path / "run"}
        filename: it
        resume: auto
        config:
          snapshot: eager
          timeouts:
            barrier_s: 9
          telemetry:
            logger_scalars: false
""")
    built = callback(parse("fit", f"--config={file}", run=True))
    assert (built.config.snapshot, built.config.timeouts, built.config.telemetry.logger_scalars) == (
        "eager",
        Timeouts(barrier_s=9),
        False,
    )
    assert (tmp_path / "run/it.ckpt").is_file()
    again = callback(parse("fit", f"--config={tmp_path / 'config.yaml'}", run=True, save_config_callback=None))
    assert (again.dirpath, again.filename, again.config) == (built.dirpath, built.filename, built.config)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("resum=auto", "resum"),
        ("resume=always", "auto"),
        ("save_top_k=many", "save_top_k"),
        ("config.timeouts.barier_s=7", "barier_s"),
        ("config.timeouts.barrier_s=soon", "barrier_s"),
        ("config.snapshot=lazy", "overlapped"),
        ("config.save_on_signals=SIGTERM", "save_on_signals"),
    ],
)
def test_a_wrong_key_or_type_is_refused_and_named(tmp_path, capsys, argument, words):
    """A mistyped argument ends the program with status 2 and is named, nested ones too: nothing is ignored."""
    with pytest.raises(SystemExit) as caught:
        parse(APPEND, f"--trainer.callbacks.dirpath={tmp_path}", f"--trainer.callbacks.{argument}")
    assert caught.value.code == 2
    assert words in capsys.readouterr().err.rpartition("error:")[2]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("config.timeouts.barrier_s=-1", "barrier_s: expected above 0"),
        ("config.retention.keep_last=2", "save_top_k, monitor and save_last are the retention"),
        ("config.max_in_flight=2", "leave on_busy and max_in_flight alone"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_before_training(tmp_path, argument, words):
    """What has the right type and cannot be is refused when the callback is made, with what to do instead."""
    with pytest.raises(ValueError, match=words):
        parse(APPEND, f"--trainer.callbacks.dirpath={tmp_path}", f"--trainer.callbacks.{argument}")


def test_the_environment_is_used_where_no_config_is_given(tmp_path, monkeypatch):
    """The file of SAFE_CKPT_CONFIG and a variable over it; a config that is given is left as it is; both are checked.

    What the environment says is refused when fit begins, on every rank: where the callback is made the ranks cannot meet.
    """

    def begin():
        plain = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        Trainer(callbacks=[SafeCheckpointCallback(tmp_path)], max_steps=1, **plain).fit(BoringModel())

    file = tmp_path / "ckpt.yaml"
    file.write_text("timeouts: {barrier_s: 9}\nlease_s: 9")
    monkeypatch.setenv("SAFE_CKPT_CONFIG", str(file))
    monkeypatch.setenv("SAFE_CKPT__LEASE_S", "8")
    built = callback(parse(APPEND, f"--trainer.callbacks.dirpath={tmp_path}"))
    assert built.config == CheckpointConfig(timeouts=Timeouts(barrier_s=9), lease_s=8)
    assert SafeCheckpointCallback(tmp_path, config=CheckpointConfig()).config == CheckpointConfig()
    file.write_text("retention: {keep_last: 2}")
    with pytest.raises(
        ConfigError, match=r"ckpt\.yaml:1: retention\.keep_last: save_top_k.*take the rules of retention out"
    ):
        begin()
    monkeypatch.setenv("SAFE_CKPT__RETENTION__KEEP_LAST", "3")
    with pytest.raises(ConfigError, match=r"^SAFE_CKPT__RETENTION__KEEP_LAST: retention\.keep_last: save_top_k"):
        begin()
    with pytest.raises(ConfigError, match=r"config\.retention: save_top_k"):
        SafeCheckpointCallback(tmp_path, config=CheckpointConfig(retention=Retention(keep_last=2)))


def test_help_says_what_each_setting_means(capsys):
    """``--help`` of the callback's settings has the texts of config.py, those of the sections within it too."""
    with pytest.raises(SystemExit):
        parse(APPEND, "--trainer.callbacks.config.help=safe_ckpt.CheckpointConfig")
    shown = " ".join(capsys.readouterr().out.split())
    assert texts.option(CheckpointConfig, "max_in_flight") in shown.replace("`", "")
    assert texts.summary(Retention) in shown


def test_every_argument_has_a_type():
    """jsonargparse takes anything for an argument without a type: there is none, and all types can be resolved."""
    names = set(inspect.signature(SafeCheckpointCallback).parameters)
    hints = typing.get_type_hints(SafeCheckpointCallback.__init__)
    assert names == set(hints) - {"return"}
    assert not [name for name, hint in hints.items() if hint is typing.Any]
