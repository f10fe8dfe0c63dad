"""An address of an object store where a framework's method takes a path alone: it is refused, and no folder ``s3:`` is made."""

import dataclasses

import pytest
from lightning_runs import QUICK, module_class, package
from lightning_runs import trainer as lightning_trainer
from transformers_runs import trainer as hugging_face

from accelerate_runs import CONFIG, fresh, registered
from safe_ckpt import Checkpointer, StorageConfig
from safe_ckpt.errors import ConfigError
from safe_ckpt.lightning import SafeCheckpointCallback

URL = "s3://bucket/run"


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch):
    """A folder in which a path that begins with ``s3:`` would appear."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not [path for path in tmp_path.iterdir() if path.name.lower().startswith("s3")]


def refused(key):
    return pytest.raises(ConfigError, match=f"^{key}: ")


def test_lightning_saves_to_no_address(tmp_path):
    """``trainer.save_checkpoint`` in a hook of ``fit``, after it, and without a callback of ours."""
    pl = package("lightning.pytorch")
    errors = []

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            with refused("save_checkpoint: filepath") as caught:
                trainer.save_checkpoint(f"{URL}/x.ckpt")
            errors.append(caught.value)

    callback = SafeCheckpointCallback(dirpath=tmp_path / "run", config=QUICK)
    trainer = lightning_trainer(pl, [callback, Saves()], tmp_path / "root")
    trainer.fit(module_class(pl)())
    assert errors
    with refused("save_checkpoint: filepath"):
        trainer.save_checkpoint(f"{URL}/x.ckpt")


def test_a_trainer_saves_to_no_address(tmp_path):
    """``output_dir`` before anything is made of it, ``save_model``, and the checkpoint to resume from."""
    with refused("output_dir"):
        hugging_face(URL)
    made = hugging_face(tmp_path / "run")
    with refused("save_model: output_dir"):
        made.save_model(f"{URL}/model")
    with refused("resume_from_checkpoint"):
        made.train(resume_from_checkpoint=f"{URL}/checkpoint-2")
    made.save_model(str(tmp_path / "model"))
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_an_address_in_capitals_is_refused_and_makes_no_folder():
    """An address is one in capitals, too."""
    with refused("directory"):
        Checkpointer("S3://bucket/run")


def test_trackers_of_a_project_get_a_local_folder(tmp_path):
    """Where ``project_dir`` is an address, what trackers write lies beside the files of the host."""
    config = dataclasses.replace(CONFIG, storage=StorageConfig(cache_dir=str(tmp_path / "cache")))
    with fresh(), registered(URL, config) as (accelerator, _):
        assert accelerator.logging_dir == f"{accelerator.project_dir}-logs"
        assert accelerator.logging_dir.startswith(str(tmp_path / "cache"))
