"""References in trackers, which upload nothing; and the warning of a disk that fills."""

import json
import logging
import shutil
import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from safe_ckpt import Checkpointer, Retention
from safe_ckpt.config import CheckpointConfig
from safe_ckpt.hooks.disk import DiskHook
from safe_ckpt.hooks.trackers import MlflowHook, WandbHook


class Usage(NamedTuple):
    total: int
    used: int
    free: int


class Told:
    """A tracker's library that notes what it is told, and whether the checkpoint was there in that moment."""

    def __init__(self, directory):
        self.run, self.id, self.references, self.logged, self.tags = self, "r1", [], [], {}
        self.info = SimpleNamespace(run_id="r1")
        self.directory = directory

    def Artifact(self, name, type, metadata):  # noqa: N802, A002 - the library's
        return SimpleNamespace(name=name, type=type, metadata=metadata, add_reference=self.add_reference)

    def add_reference(self, uri, *, name, checksum):
        self.references.append((uri, name, checksum))

    def log_artifact(self, artifact, aliases):
        assert (self.directory / artifact.metadata["path"].rpartition("/")[2] / "manifest.json").is_file()
        self.logged.append((artifact.metadata, aliases))

    def active_run(self):
        return self

    def MlflowClient(self):  # noqa: N802 - the library's
        return self

    def log_dict(self, run_id, facts, path):
        self.logged.append((json.loads(json.dumps(facts)), [path]))

    def set_tag(self, run_id, key, value):
        self.tags[key] = value


def train(directory, hook):
    with Checkpointer(directory, hooks=[hook]) as ckpt:
        ckpt.save(1, {"w": {"t": torch.ones(10)}}, metrics={"loss": 0.5}).result(timeout_s=20)
        ckpt.save(2, {"w": {"t": torch.full((10,), float("nan"))}}).result(timeout_s=20)


@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_a_committed_checkpoint_is_referred_to(tmp_path, monkeypatch, kind):
    """After the commit: path, digest, metrics; bad numbers are flagged, and are not the newest. No byte is uploaded."""
    library = Told(tmp_path)
    monkeypatch.setitem(sys.modules, kind, library)
    train(tmp_path, {"wandb": WandbHook, "mlflow": MlflowHook}[kind]())
    (good, named), (bad, flagged) = library.logged
    assert (good["path"], good["step"], good["metrics"]) == (str(tmp_path / "step-00000001"), 1, {"loss": 0.5})
    assert good["digest"].startswith("sha256:")
    assert good["healthy"] is not False
    assert bad["healthy"] is False
    if kind == "wandb":
        assert (named, flagged) == (["latest", "step-1"], ["step-2", "unhealthy"])
        assert library.references[0] == ((tmp_path / "step-00000001").as_uri(), "step-00000001", False)
    else:
        assert named == ["checkpoints/step-00000001.json"]
        assert library.tags == {"safe_ckpt.checkpoint": good["path"]}


def test_a_tracker_without_an_answer_is_named_and_asked_again(tmp_path, monkeypatch, caplog):
    """The saves go on, and later ones are referred to."""
    library = Told(tmp_path)
    monkeypatch.setitem(sys.modules, "mlflow", library)
    hook, answers = MlflowHook(), [OSError("no answer"), None]

    def log_dict(*_):
        if (error := answers.pop(0)) is not None:
            raise error

    library.log_dict = log_dict
    with caplog.at_level(logging.WARNING):
        train(tmp_path, hook)
    assert answers == []
    assert "no answer" in caplog.text


@pytest.mark.parametrize(("free", "kept", "warns"), [(9, None, True), (11, None, False), (2, 2, False)])
def test_a_disk_that_fills_is_warned_of_once(tmp_path, monkeypatch, caplog, free, kept, warns):
    """With fewer than ten more to come and no rule: how many, and which line keeps some. With a rule, or room: nothing."""
    config = CheckpointConfig(retention=Retention(keep_last=kept)) if kept else CheckpointConfig()
    state = {"w": {"t": torch.ones(1000)}}
    with Checkpointer(tmp_path, config) as ckpt:
        size = ckpt.save(0, state).result(timeout_s=20).size_bytes
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1, 1, free * size + 1))
        with caplog.at_level(logging.WARNING, logger="safe_ckpt"):
            for step in range(1, 6):
                ckpt.save(step, state).result(timeout_s=20)
            ckpt.wait()
    told = [one.getMessage() for one in caplog.records if one.name == DiskHook.__module__]
    assert len(told) == warns
    if warns:
        assert f"will hold {free} more" in told[0]
        assert "Retention(keep_last=3)" in told[0]
