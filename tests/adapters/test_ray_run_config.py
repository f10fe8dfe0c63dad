"""Ray's own list of reported checkpoints, and what ``SafeRunConfig`` does to it: for ``make test-ray``. Nothing is started."""

import asyncio
import json
import shutil

import pytest

pytest.importorskip("ray")

import pyarrow.fs
from ray.train import Checkpoint, CheckpointConfig, RunConfig
from ray.train.v2._internal.exceptions import CheckpointManagerInitializationError
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport

from safe_ckpt.errors import ConfigError
from safe_ckpt.ray import RayCheckpointer, SafeRunConfig
from safe_ckpt.ray.run_config import SNAPSHOT

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray about pydantic


def manager(storage, **rules):
    return CheckpointManager(CheckpointConfig(**rules), StorageContext(storage, "run"))


def reported(storage, *steps, **rules):
    """The list that Ray's manager writes when these are reported, one after the other. Returns the folder of the run."""
    folder = storage / "run"

    async def report():
        there = manager(storage, **rules)
        for step in steps:
            path = folder / f"checkpoints/step-{step}"
            path.mkdir(parents=True, exist_ok=True)
            checkpoint = Checkpoint(str(path), filesystem=pyarrow.fs.LocalFileSystem())
            there.register_checkpoint(_TrainingReport(checkpoint=checkpoint, metrics={"step": step}, validation=False))

    asyncio.run(report())
    return folder


def listed(storage):
    """What a driver that starts now reads: the steps, and the newest."""
    there = manager(storage)
    newest = there.latest_checkpoint_result
    return [one.metrics["step"] for one in there._checkpoint_results], newest and newest.metrics["step"]


def again(storage):
    return SafeRunConfig(name="run", storage_path=str(storage))


def test_a_run_starts_again_where_reported_checkpoints_are_gone(tmp_path):
    """Ray refuses a list that names what is not there; behind SafeRunConfig it reads the rest, and the newest of that."""
    folder = reported(tmp_path, 1, 2, 3, 4)
    assert isinstance(again(tmp_path), RunConfig)
    assert listed(tmp_path) == ([1, 2, 3, 4], 4)
    for step in (1, 4):
        shutil.rmtree(folder / f"checkpoints/step-{step}")
    with pytest.raises(CheckpointManagerInitializationError, match="does not exist anymore"):
        listed(tmp_path)
    again(tmp_path)
    assert listed(tmp_path) == ([2, 3], 3)
    for step in (2, 3):
        shutil.rmtree(folder / f"checkpoints/step-{step}")
    again(tmp_path)
    assert listed(tmp_path) == ([], None)


def test_a_step_that_was_reported_twice_is_listed_once(tmp_path):
    """Saved again after a resume from an older one: it is where it was reported last."""
    reported(tmp_path, 1, 2, 3, 2)
    again(tmp_path)
    assert listed(tmp_path) == ([1, 3, 2], 2)


@pytest.mark.parametrize(
    "text", ["", '{"ray_version": "2.60.0", "checkpoint_re', "[]", "{}", '{"checkpoint_results": 1}']
)
def test_a_torn_list_is_moved_aside(tmp_path, text):
    """A controller that is killed while it writes leaves half a list, with which Ray does not start."""
    folder = reported(tmp_path, 1)
    (folder / SNAPSHOT).write_text(text)
    again(tmp_path)
    assert listed(tmp_path) == ([], None)
    (aside,) = folder.glob(f"{SNAPSHOT}.unreadable-*")
    assert aside.read_text() == text
    assert (folder / "checkpoints/step-1").is_dir()


def test_a_list_that_leads_out_of_the_run_is_moved_aside(tmp_path):
    """A name with .. in it is no checkpoint of this run."""
    folder = reported(tmp_path, 1)
    text = json.dumps(json.loads((folder / SNAPSHOT).read_text())).replace(
        "checkpoints/step-1", "../checkpoints/step-1"
    )
    (folder / SNAPSHOT).write_text(text)
    again(tmp_path)
    assert listed(tmp_path) == ([], None)


def test_rays_own_retention_would_delete_a_step_that_was_saved_again(tmp_path):
    """Why ``num_to_keep`` is refused: Ray deletes the newest checkpoint, as it stands in its list twice."""
    folder = reported(tmp_path, 2, 3, 2, num_to_keep=2)
    assert not (folder / "checkpoints/step-2").exists()
    with pytest.raises(ConfigError, match=r"num_to_keep.*Retention"):
        SafeRunConfig(name="run", storage_path=str(tmp_path), checkpoint_config=CheckpointConfig(num_to_keep=2))


@pytest.mark.parametrize("address", ["s3://bucket/runs", "gs://bucket/runs"])
def test_storage_in_a_bucket_is_refused_with_what_to_do(address):
    """A file system is needed for the run; the bucket may be the mirror."""
    with pytest.raises(ConfigError, match=r"mirror\.url") as caught:
        SafeRunConfig(name="run", storage_path=address)
    assert caught.value.key == "RunConfig.storage_path"
    with pytest.raises(ConfigError):
        SafeRunConfig(name="run", storage_path="bucket/runs", storage_filesystem=pyarrow.fs.LocalFileSystem())


def test_an_address_of_a_file_is_a_path(tmp_path):
    """``file://`` is what Ray takes, too."""
    folder = reported(tmp_path, 1)
    (folder / SNAPSHOT).write_text("")
    SafeRunConfig(name="run", storage_path=tmp_path.as_uri())
    assert listed(tmp_path) == ([], None)


def test_outside_of_a_worker_it_says_what_to_use():
    """In the driver, or in a program without Ray."""
    with pytest.raises(ConfigError, match=r"within the function that TorchTrainer runs.*safe_ckpt\.Checkpointer"):
        RayCheckpointer()
