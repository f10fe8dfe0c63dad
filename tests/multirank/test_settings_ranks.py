"""Settings that differ between the ranks: every rank says the same, at once, and says what to change."""

import os
import time

import pytest
import torch

from kit.ranks import spawn_ranks, values
from safe_ckpt import (
    CheckpointConfig,
    Checkpointer,
    Mirror,
    Retention,
    SafeCheckpointError,
    consolidate_offloaded,
    lengthy_timeouts,
    restore_offloaded,
    set_up_directory,
)
from safe_ckpt.core.coordination.agreed_config import config_of_all
from safe_ckpt.errors import ConfigError, DesyncError

MIRRORED = Mirror(url="s3://bucket/mirror")


def _open(rank, directory, environment, configs=(None, None)):
    """``directory`` None: the settings are read and nothing is opened."""
    for name in [name for name in os.environ if name.startswith("SAFE_CKPT_")]:
        del os.environ[name]
    os.environ.update(environment[rank])
    begun = time.monotonic()
    try:
        if directory is None:
            return config_of_all(configs[rank]).deviations(), 0.0
        with Checkpointer(directory, configs[rank]) as ckpt:
            return ckpt.config.deviations(), 0.0
    except SafeCheckpointError as error:
        return error, time.monotonic() - begun


def opened(*args):
    return list(zip(*values(spawn_ranks(_open, 2, *args)), strict=True))


@pytest.mark.parametrize("bad", [0, 1])
def test_a_mistake_in_one_ranks_environment_is_every_ranks_error(tmp_path, bad):
    """A variable that is not allowed, or a file that is missing on one node: rank, source and key on both, in seconds."""
    missing = tmp_path / "none.yaml"
    for wrong, source, key, words in (
        ({"SAFE_CKPT__TIMEOUTS__BARRIER_S": "0"}, "SAFE_CKPT__TIMEOUTS__BARRIER_S", "timeouts.barrier_s", "above 0"),
        ({"SAFE_CKPT_CONFIG": str(missing)}, str(missing), "", "No such file"),
    ):
        environment = [wrong if rank == bad else {} for rank in range(2)]
        errors, seconds = opened(tmp_path / "runs", environment)
        assert max(seconds) < 10
        assert str(errors[0]) == str(errors[1])
        for error in errors:
            assert type(error) is ConfigError
            assert (error.source, error.key) == (source, key)
            assert words in error.message
            assert error.message.endswith(f"(rank {bad})")


def test_environments_that_differ_are_told_apart_key_by_key(tmp_path):
    """Each side says what it has, not a hash, and where to look, before one adapter refuses what only its rank has."""
    environment = [{}, {"SAFE_CKPT__RETENTION__KEEP_LAST": "3"}]
    errors, seconds = opened(None, environment)
    assert max(seconds) < 10
    for error in errors:
        assert type(error) is DesyncError
        assert "ranks [0]: the defaults; ranks [1]: retention.keep_last=3. Give all ranks the same settings" in str(
            error
        )
    assert opened(tmp_path / "runs", 2 * [environment[1]])[0] == ("retention.keep_last=3",) * 2


@pytest.mark.parametrize(
    ("configs", "said"),
    [
        (
            (CheckpointConfig(), CheckpointConfig(retention=Retention(keep_last=2))),
            "on settings: ranks [0]: the defaults; ranks [1]: retention.keep_last=2. Give all ranks the same settings",
        ),
        ((CheckpointConfig(), None), "disagree on kind"),
        ((None, CheckpointConfig()), "disagree on kind"),
    ],
)
def test_arguments_that_differ_are_an_error_at_once(tmp_path, configs, said):
    """Also where only one rank was given settings in Python: nobody waits for the timeout."""
    errors, seconds = opened(tmp_path / "runs", [{}, {}], configs)
    assert max(seconds) < 10
    for error in errors:
        assert type(error) is DesyncError
        assert said in str(error)


def _with_torch(rank, directory, versions):
    torch.__version__ = versions[rank]
    return _open(rank, directory, [{}] * len(versions), [None] * len(versions))


def test_ranks_with_different_versions_are_told_who_has_which(tmp_path):
    """Who has what, on every rank, before anything is opened; a build for other hardware is the same version."""
    found = values(spawn_ranks(_with_torch, 3, tmp_path / "runs", ("2.13.0+cpu", "2.9.1", "2.13.0+cu128")))
    for error, seconds in found:
        assert type(error) is DesyncError
        assert seconds < 10
        assert "on versions: ranks [0, 2]: safe_ckpt " in str(error)
        assert ", torch 2.13.0, Python 3." in str(error)
        assert "; ranks [1]: safe_ckpt " in str(error)
        assert ", torch 2.9.1, Python 3." in str(error)
        assert "Install the same on every node" in str(error)
    assert not (tmp_path / "runs").exists()
    same = values(spawn_ranks(_with_torch, 2, tmp_path / "runs", ("2.13.0+cpu", "2.13.0+cu128")))
    assert [said for said, _ in same] == ["the defaults"] * 2


def _enter(rank, folder, bad):
    """Each entry point, with a wrong environment on one rank: the error and the seconds, or what came of it."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from safe_ckpt.lightning import SafeCheckpointCallback

    def train():
        callback = SafeCheckpointCallback(dirpath=folder / "lightning")
        plain = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        made = Trainer(callbacks=[callback], strategy="ddp", devices=2, max_epochs=0, **plain)
        made.fit(BoringModel())

    def modes():
        set_up_directory(folder / "made", mode="any" if rank == bad else "fresh")

    if rank == bad:
        os.environ["SAFE_CKPT__TIMEOUTS__BARRIER_S"] = "0"
    os.environ.update(
        LOCAL_RANK=str(rank), WORLD_SIZE="2", RANK=str(rank), TORCHELASTIC_RUN_ID="1", LOCAL_WORLD_SIZE="2"
    )
    return _refused([lambda: consolidate_offloaded({}, folder / "offloaded"), modes, train])


def _refused(calls):
    """The error of each call, and the seconds until it came."""
    found = []
    for call in calls:
        begun = time.monotonic()
        with pytest.raises(ConfigError) as raised:
            call()
        found.append((str(raised.value), time.monotonic() - begun))
    return found


def _same_at_once(both):
    """Each error is the same on both ranks, and neither waited for the other. Returns those of the first."""
    first, second = both
    for one, other in zip(first, second, strict=True):
        assert one[0] == other[0]
        assert max(one[1], other[1]) < 20
    return first


@pytest.mark.parametrize("bad", [0, 1])
def test_every_entry_point_refuses_on_all_what_one_rank_refuses(tmp_path, bad):
    """consolidate_offloaded, set_up_directory, Lightning's callback: what is wrong on one rank is the same error on both."""
    first = _same_at_once(values(spawn_ranks(_enter, 2, tmp_path, bad, timeout_s=120)))
    assert f"(rank {bad})" in first[0][0]
    assert "fresh" in first[1][0]
    assert f"(rank {bad})" in first[2][0]


def _refuse(rank, folder, bad):
    """Each entry point that is given what is wrong on one rank alone: the error and the seconds."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration
    from torch import nn
    from transformers import Trainer, TrainingArguments

    from safe_ckpt.accelerate import register
    from safe_ckpt.transformers import SafeCheckpointMixin

    class SafeTrainer(SafeCheckpointMixin, Trainer):
        checkpoint_config = CheckpointConfig()

    wrong = rank == bad
    os.environ.update(
        LOCAL_RANK=str(rank), WORLD_SIZE="2", RANK=str(rank), LOCAL_WORLD_SIZE="2", ACCELERATE_USE_CPU="1"
    )

    def project():
        configuration = ProjectConfiguration(str(folder / "project"), automatic_checkpoint_naming=True)
        configuration.total_limit = 0 if wrong else 3
        register(Accelerator(cpu=True, project_config=configuration), CheckpointConfig())

    def raised():
        with lengthy_timeouts(None, -1.0 if wrong else 60.0):
            pass

    def trainer(resumed=None, **given):
        arguments = TrainingArguments(str(folder / "trainer"), use_cpu=True, report_to=[], max_steps=1)
        made = SafeTrainer(nn.Linear(1, 1), arguments, train_dataset=[{"x": 1}])
        for name, value in given.items():
            setattr(made.args, name, value)
        made.train(resumed)

    return _refused(
        [
            lambda: restore_offloaded("s3://bucket/there" if wrong else folder, {}),
            raised,
            lambda: Checkpointer("s3://bucket/run" if wrong else folder / "plain", CheckpointConfig(mirror=MIRRORED)),
            project,
            lambda: trainer(output_dir="s3://bucket/out" if wrong else str(folder / "trainer")),
            lambda: trainer("s3://bucket/from" if wrong else None),
            lambda: trainer(save_on_each_node=wrong),
        ]
    )


@pytest.mark.parametrize("bad", [0, 1])
def test_an_argument_that_is_wrong_on_one_rank_is_refused_on_all(tmp_path, bad):
    """Offloaded parts, raised timeouts, Checkpointer, Accelerate, Transformers: no rank waits for one that was refused."""
    _same_at_once(values(spawn_ranks(_refuse, 2, tmp_path, bad, timeout_s=120)))
