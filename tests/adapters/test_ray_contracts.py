"""The parts of Ray that are not public and that we call or read; the messages say which file of ours needs a look."""

import dataclasses

import pytest

pytest.importorskip("ray")

import ray.train.v2
import ray.train.v2._internal.constants as constants
import ray.train.v2._internal.execution.context as context
from contracts import Part, unlisted
from ray.train.v2._internal.execution.checkpoint import checkpoint_manager

from safe_ckpt.ray import run_config

PARTS = [
    Part(ray.train.v2, "_internal", "ray/worker.py", "has the next one"),
    Part(context, "get_train_context", "ray/worker.py", "the settings of the run, and its storage", ()),
]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_each_listed_part_of_ray_exists_and_takes_our_arguments(part):
    """It is there, takes what we give it, and the file that is named does use it."""
    part.check()


def test_no_private_part_is_used_without_a_contract():
    """Every private part of Ray that we use is listed with the reason."""
    assert unlisted("ray", PARTS) == {}


def test_a_worker_knows_the_settings_of_its_run():
    """ray/worker.py looks there whether the driver made a SafeRunConfig."""
    assert "train_run_context" in {field.name for field in dataclasses.fields(context.TrainContext)}
    assert "run_config" in {field.name for field in dataclasses.fields(context.TrainRunContext)}


def test_rays_list_of_checkpoints_has_the_known_form():
    """ray/run_config.py takes out of it what is not there: a new field may name checkpoints, too."""
    assert constants.CHECKPOINT_MANAGER_SNAPSHOT_FILENAME == run_config.SNAPSHOT
    assert set(checkpoint_manager._CheckpointManagerState.model_fields) == {
        "ray_version",
        "checkpoint_results",
        "checkpoint_report_indices",
        "latest_checkpoint_result",
        "pending_training_results",
        "pending_validation_specs",
        "current_report_index",
        "validated_checkpoint_dir_names",
        "timed_out_validation_checkpoint_dir_names",
        "failed_validation_checkpoint_dir_names",
    }
    assert set(checkpoint_manager._TrainingResultState.model_fields) == {"version", "checkpoint_dir_name", "metrics"}
