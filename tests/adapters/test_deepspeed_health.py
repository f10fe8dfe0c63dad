"""A DeepSpeed engine whose weights go bad: ``latest`` stays with the last healthy tag, on all ranks."""

import math
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")
from deepspeed_runs import engine, train, weights

from kit.limits import PATIENT
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Retention
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.deepspeed import install
from safe_ckpt.deepspeed.directories import order

pytestmark = pytest.mark.timeout(300)
CONFIG = CheckpointConfig(timeouts=PATIENT, retention=Retention(keep_last=1))


def _train(rank, folder, stage):
    made = engine(stage, width=64)
    with install(made, CONFIG):
        for step in range(1, 5):
            train(made, rank, step - 1, step)
            if step == 3 and rank == 1:  # of one rank's optimizer alone
                optimizer = made.optimizer
                groups = (
                    getattr(optimizer, "fp32_partitioned_groups_flat", None)
                    or optimizer.single_partition_of_fp32_groups
                )
                groups[0].data.view(-1)[5] = math.nan
            made.save_checkpoint(folder)


def _go_on(rank, folder, stage):
    made = engine(stage, width=64)
    with install(made, CONFIG):
        path, _ = made.load_checkpoint(folder)
        train(made, rank, made.global_steps, made.global_steps + 1)
        return path, made.global_steps, bool(weights(made).isfinite().all())


def _several(rank, folder):
    made, found = engine(0, width=64), {}
    with install(made, CheckpointConfig(timeouts=CONFIG.timeouts)):
        for step in range(1, 5):
            train(made, rank, step - 1, step)
            healthy = weights(made).clone()
            if step in (2, 4):
                next(made.module.parameters()).data.view(-1)[0] = math.nan
            made.save_checkpoint(folder)
            if step in (2, 4):
                next(made.module.parameters()).data.view(-1)[0] = healthy[0]
        found["named"] = [path.name for path in order(Path(folder), None)]
        Path(folder, "latest").unlink()
        found["without latest"] = [path.name for path in order(Path(folder), None)]
        found["by name"] = [path.name for path in order(Path(folder), "global_step4")]
    return found


def test_a_load_falls_back_to_healthy_tags_alone(tmp_path):
    """Behind the one that ``latest`` names, and without that file. By its name a marked one is loaded."""
    (told,) = values(spawn_ranks(_several, 1, str(tmp_path), timeout_s=120))
    assert told["named"] == ["global_step3", "global_step1"]
    assert told["without latest"] == ["global_step3", "global_step1"]
    assert told["by name"] == ["global_step4"]


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_latest_never_names_a_marked_tag(tmp_path, stage):
    """A flipped number in the optimizer's part of one rank: the tag is marked for all, and a load takes the one before."""
    values(spawn_ranks(_train, 2, str(tmp_path), stage, timeout_s=120))
    assert (tmp_path / "latest").read_text() == "global_step2"
    marked = {path.name: read_manifest(path).health["marked"] for path in tmp_path.glob("global_step*")}
    assert marked == {"global_step2": False, "global_step4": True}
    for path, step, healthy in values(spawn_ranks(_go_on, 2, str(tmp_path), stage, timeout_s=120)):
        assert "global_step2" in path
        assert (step, healthy) == (3, True)
