"""What a registration changes in a framework's object is undone as a whole: at its end, and where it fails on the way."""

import copy
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from lightning_runs import QUICK, module_class, package
from lightning_runs import trainer as lightning_trainer
from torch.utils.data import DataLoader, TensorDataset

from accelerate_runs import CONFIG, fresh, make, stateful
from safe_ckpt import CheckpointConfig, Retention, StorageConfig, Telemetry
from safe_ckpt.accelerate import register
from safe_ckpt.adapters import AttachedHandle, Patch, Saver
from safe_ckpt.errors import ConfigError, DirectoryError, SafeCheckpointError
from safe_ckpt.lightning import SafeCheckpointCallback

URL = "s3://bucket/run"


def facts(accelerator):
    """All that a registration may change."""
    loaders = [set(vars(one.base_dataloader)) for one in accelerator._dataloaders]
    return dict(vars(accelerator)), dict(vars(accelerator.project_configuration)), loaders


@pytest.fixture
def cached(tmp_path):
    """Settings with which an address needs no store until something is saved."""
    return dataclasses.replace(CONFIG, storage=StorageConfig(cache_dir=str(tmp_path / "cache")))


def test_a_project_at_an_address_keeps_its_mirror_when_registered_again(cached):
    """Registered again, also by another Accelerator with that project; what is removed leaves the address where it was."""
    with fresh():
        accelerator = make(URL)
        before = facts(accelerator)
        first = register(accelerator, cached)
        again = register(accelerator, cached)
        other = Accelerator(cpu=True, project_config=accelerator.project_configuration)
        last = register(other, cached)
        assert [one.config.mirror.url for one in (first, again, last)] == [URL] * 3
        assert [one.closed for one in (first, again, last)] == [True, True, False]
        assert other.project_dir == last.project
        assert other.project_dir.startswith(cached.storage.cache_dir)
        again.remove()
        assert other.project_dir == last.project
        last.remove()
        assert facts(accelerator) == before


def test_a_refused_registration_leaves_the_earlier_one_working(cached):
    """Settings, or a limit, that are not allowed: the handle before goes on, its project and its saves with it."""
    with fresh():
        accelerator = make(URL, limit=2)
        with register(accelerator, cached) as handle:
            before = facts(accelerator)
            with pytest.raises(ConfigError, match="total_limit"):
                register(accelerator, dataclasses.replace(cached, retention=Retention(keep_last=3)))
            accelerator.project_configuration.save_on_each_node = True
            with pytest.raises(ConfigError, match="save_on_each_node"):
                register(accelerator, cached)
            accelerator.project_configuration.save_on_each_node = False
            assert facts(accelerator) == before
            assert not handle.closed


@pytest.mark.parametrize("earlier", [False, True], ids=["the first", "a second one"])
def test_a_registration_that_fails_leaves_nothing(tmp_path, cached, earlier):
    """The folder of checkpoints cannot be made: project, trackers, loaders and saves are stock's, and it works once it can."""
    with fresh():
        accelerator = make(URL, dataloader_config=stateful())
        accelerator.prepare(DataLoader(TensorDataset(torch.ones(4, 1))))
        before = facts(accelerator)
        handle = register(accelerator, cached)
        folder = Path(accelerator.project_dir) / "checkpoints"
        if earlier:
            folder.rename(tmp_path / "away")
        else:
            handle.remove()
            assert facts(accelerator) == before
            assert not folder.exists()  # nothing was saved
        folder.parent.mkdir(exist_ok=True)
        folder.touch()
        with pytest.raises(DirectoryError):
            register(accelerator, cached)
        assert facts(accelerator) == before
        folder.unlink()
        with register(accelerator, cached) as handle:
            assert handle.config.mirror.url == URL


def test_a_fit_that_cannot_take_its_directory_leaves_lightnings_own_io(tmp_path):
    """A file where the directory of the second callback's hooks would be, or settings that need another package."""
    pl = package("lightning.pytorch")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".safe_ckpt").touch()
    unmet = dataclasses.replace(QUICK, telemetry=Telemetry(prometheus_textfile=str(tmp_path / "none" / "x.prom")))
    for folder, config in (("run", QUICK), ("other", unmet)):
        callback = SafeCheckpointCallback(dirpath=tmp_path / folder, config=config)
        trainer = lightning_trainer(pl, [callback], tmp_path / "root")
        stock = trainer.strategy.checkpoint_io
        with pytest.raises(SafeCheckpointError):
            trainer.fit(module_class(pl)())
        assert trainer.strategy.checkpoint_io is stock
        assert set(vars(trainer.strategy)) & {"load_checkpoint", "teardown"} == set()


def test_a_handle_is_put_on_whole_or_not_at_all():
    """An attribute that cannot be replaced takes those before it back; the rest of a constructor that fails, all."""

    class Narrow:
        wide = 1

        def __setattr__(self, name, value):
            if name == "narrow":
                raise TypeError(name)
            super().__setattr__(name, value)

    owner = Narrow()
    with pytest.raises(TypeError):
        Patch(owner, {"wide": 2, "narrow": 3})
    assert vars(owner) == {}
    owner = SimpleNamespace(save=None)
    handle = AttachedHandle(owner, Saver(CheckpointConfig()))
    with pytest.raises(KeyError), handle._whole_or_nothing():
        handle._attach({"save": print})
        raise KeyError("later")
    assert owner == SimpleNamespace(save=None)


class Loop:
    def run(self):
        return "stock"


def test_changes_are_taken_back_the_last_first(caplog):
    """One on top of another, for the next call only or for long; what somebody else has put there stays, with a warning."""
    loop, patch = Loop(), Patch()
    patch.put_methods(loop, {"run": lambda: "ours"})
    patch.once(loop, "run", lambda original: f"once, then {original()}")
    assert [loop.run(), loop.run()] == ["once, then ours", "ours"]
    patch.once(loop, "run", lambda original: f"again, then {original()}")
    again = loop.run
    loop.run = lambda: f"theirs, then {again()}"
    assert [loop.run(), loop.run()] == ["theirs, then again, then ours", "theirs, then ours"]
    assert "was replaced by something else" in caplog.text
    del loop.run
    other = Loop()
    undone = []
    with Patch(other, {"run": print}) as second:
        second.also(lambda: undone.append(vars(other).copy()))
        second.put(other, {"more": 1})
        second.give_back(other, "run")
        assert vars(other) == {"more": 1}
    assert undone == [{}]
    assert vars(other) == {}
    assert copy.copy(loop).run() == "stock"


def test_a_change_that_cannot_be_undone_stops_no_other_undoing():
    """Everything before it is taken back all the same, and its error is raised."""
    loop, patch = Loop(), Patch()
    patch.put(loop, {"run": print})
    patch.also(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        patch.give_back()
    assert vars(loop) == {}
