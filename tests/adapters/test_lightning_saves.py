"""Saving from a Trainer: what is on disk, when, and what the callback believes."""

import copy
import errno
import inspect
import json
import logging
import os
import pickle
import threading
import time
import warnings
import zipfile

import numpy
import pytest
import torch
from lightning_runs import PACKAGES, QUICK, fingerprint, fit, module_class, names, package, trainer

from safe_ckpt import CheckpointConfig, Retention, WriterConfig
from safe_ckpt.adapters import pickles
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.errors import (
    ConfigError,
    CorruptCheckpointError,
    DirectoryError,
    DirectoryInUseError,
    NotEnoughSpaceError,
    SafeCheckpointError,
)
from safe_ckpt.lightning import SafeCheckpointCallback, resumable
from safe_ckpt.lightning.directories import FileSaver
from support import needs_root, small_disk, writers_of


@pytest.mark.parametrize("name", PACKAGES)
def test_everything_upstream_reads_the_file(tmp_path, name):
    """torch.load in all its ways, load_from_checkpoint, fit/validate/test with best, last and a path."""
    pl = package(name)
    made, callback, module = fit(tmp_path, name=name, monitor="val_loss", save_top_k=2, save_last=True)
    best = callback.best_model_path
    for mmap in (True, False):
        for weights_only in (True, False):
            assert torch.load(best, mmap=mmap, weights_only=weights_only)["global_step"] in (3, 6, 9)
    assert type(module).load_from_checkpoint(best) is not None
    for path in ("best", "last", best):
        made.validate(module, ckpt_path=path, verbose=False)
    again = trainer(
        pl, [SafeCheckpointCallback(dirpath=tmp_path, monitor="val_loss", config=QUICK)], tmp_path, max_epochs=4
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not empty.*")
        again.fit(module_class(pl)(), ckpt_path="last")
    assert again.global_step == 12
    with zipfile.ZipFile(best) as archive:
        assert archive.testzip() is None
        assert "archive/.safe_ckpt/manifest.json" in archive.namelist()


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ({}, {}),
        ({"save_top_k": -1}, {}),
        ({"save_top_k": 0, "save_last": True}, {}),
        ({"monitor": "val_loss", "save_top_k": 2, "save_last": True}, {}),
        ({"monitor": "val_loss", "mode": "max", "save_top_k": 1}, {}),
        ({"monitor": "train_loss", "every_n_train_steps": 2, "save_top_k": 3, "save_last": "link"}, {}),
        ({"every_n_train_steps": 2}, {}),
        ({"every_n_epochs": 2, "save_last": True}, {}),
        ({"save_weights_only": True, "filename": "w-{epoch}"}, {}),
        ({"filename": "same", "save_top_k": -1}, {}),
        ({"filename": "same", "save_top_k": -1, "enable_version_counter": False}, {}),
        ({"save_on_train_epoch_end": False, "monitor": "val_loss", "save_top_k": 1, "save_last": "link"}, {}),
        ({"monitor": "val_loss", "save_top_k": -1, "filename": "sub/{epoch}"}, {}),
        ({"save_top_k": -1}, {"limit_val_batches": 0}),
    ],
)
@pytest.mark.quick
def test_names_and_bookkeeping_are_those_of_model_checkpoint(tmp_path, arguments, settings):
    """The same run with ModelCheckpoint and with ours leaves the same names behind, and believes the same."""
    pl = package("lightning.pytorch")
    runs = {}
    for kind in ("stock", "ours"):
        folder = tmp_path / kind
        pl.seed_everything(1, verbose=False)
        if kind == "stock":
            callback = pl.callbacks.ModelCheckpoint(dirpath=folder, **arguments)
        else:
            callback = SafeCheckpointCallback(dirpath=folder, config=QUICK, **arguments)
        trainer(pl, [callback], tmp_path, **settings).fit(module_class(pl)())
        known = {
            key: value for key, value in callback.state_dict().items() if key != "safe_ckpt.saved"
        }  # not in stock's
        state = json.dumps(known, default=str, sort_keys=True).replace(str(folder), "")
        files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.ckpt") if ".safe_ckpt" not in p.parts)
        links = sorted((p.name, os.readlink(p)) for p in folder.glob("*.ckpt") if p.is_symlink())
        contents = {f: torch.load(folder / f, weights_only=False) for f in files}
        runs[kind] = (state, callback.state_key, files, links, {f: c["global_step"] for f, c in contents.items()})
    assert runs["ours"] == runs["stock"]


def test_the_state_in_the_file_is_that_of_the_moment(tmp_path):
    """What is in the checkpoint equals what a synchronous torch.save would have put there."""
    pl = package("lightning.pytorch")

    class Copy(pl.Callback):
        copies = {}

        def on_train_epoch_end(self, trainer, pl_module):
            self.copies[trainer.global_step] = copy.deepcopy(pl_module.state_dict())

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            # Mutates parameters through .data, as some callbacks do, right after the save.
            for parameter in pl_module.parameters():
                parameter.data.add_(1e-3)

    fit(tmp_path, save_top_k=-1, callbacks=[Copy()], filename="{step}")
    assert names(tmp_path) == ["step=3.ckpt", "step=6.ckpt", "step=9.ckpt"]
    for step, expected in Copy.copies.items():
        found = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"]
        assert all(found[key].equal(expected[key]) for key in expected)


@pytest.mark.quick
def test_last_and_top_k_of_one_step_are_one_file(tmp_path):
    """One snapshot, one write: last.ckpt is a second name, and one of both may go without harm to the other."""
    fit(tmp_path, save_last=True)
    best, last = tmp_path / "epoch=2-step=9.ckpt", tmp_path / "last.ckpt"
    assert best.stat().st_ino == last.stat().st_ino
    best.unlink()
    verify_files(last, read_manifest(last))


@pytest.mark.quick
def test_swapped_weights_of_a_manual_optimization_are_what_is_saved(tmp_path):
    """A module that swaps earlier weights in around the save gets those weights saved, as ModelCheckpoint has it."""
    pl = package("lightning.pytorch")

    class Manual(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)
            self.automatic_optimization = False
            self.saved_models = {}
            self.before = {}

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            loss = self.layer(batch[0]).pow(2).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.saved_models = {batch_idx: {k: v.detach().clone() for k, v in self.layer.state_dict().items()}}
            self.before[self.trainer.global_step + 1] = self.saved_models[batch_idx]
            optimizer.step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(12, 4)), batch_size=4)

    module = Manual()
    fit(tmp_path, module=module, every_n_train_steps=1, save_top_k=-1, save_last=True, filename="{step}",
        settings={"max_epochs": 1})  # fmt: skip
    for step in (1, 2, 3):
        found = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"]
        assert found["layer.weight"].equal(module.before[step]["weight"])


@pytest.mark.quick
def test_two_callbacks_share_one_directory(tmp_path):
    """A best-of and a periodic callback in one directory: one pipeline, both sets of files, the attributes of both."""
    second = SafeCheckpointCallback(
        dirpath=tmp_path, every_n_train_steps=4, save_top_k=-1, filename="p{step}", config=QUICK
    )
    _, first, _ = fit(tmp_path, monitor="val_loss", save_top_k=1, filename="best", callbacks=[second])
    assert names(tmp_path) == ["best.ckpt", "pstep=4.ckpt", "pstep=8.ckpt"]
    assert first.best_model_path.endswith("best.ckpt")
    assert second.best_model_path.endswith("pstep=8.ckpt")


def test_callbacks_that_disagree_are_refused(tmp_path):
    """Two configurations in one Trainer cannot both hold."""
    second = SafeCheckpointCallback(dirpath=tmp_path, every_n_epochs=2, config=CheckpointConfig())
    with pytest.raises(ConfigError, match="same config"):
        fit(tmp_path, callbacks=[second])


def test_an_old_file_goes_only_after_its_successor_is_committed(tmp_path):
    """save_top_k=1 with a slow writer: the old file goes only after the new one is committed."""
    pl = package("lightning.pytorch")
    seen, over = [], threading.Event()

    def entries(folder):
        try:
            return os.listdir(folder)
        except FileNotFoundError:  # made for each save, and gone when it is empty
            return []

    def watch():
        folder, pending = tmp_path / "exp", tmp_path / "exp/.safe_ckpt/pending"
        while not list(folder.glob("*.ckpt")):
            time.sleep(0.0005)
        while not over.is_set():
            seen.append((bool(entries(pending)), any(name.endswith(".ckpt") for name in os.listdir(folder))))

    slow = CheckpointConfig(writer=WriterConfig(direct_io="off", chunk_bytes=4096, flush_every_bytes=4096))
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        module = module_class(pl)(width=20_000)
        fit(tmp_path / "exp", module=module, config=slow, settings={"max_epochs": 5})
    finally:
        over.set()
        watcher.join()
    assert sum(saving for saving, _ in seen) > 100  # it looked while saves were under way
    assert all(there for _, there in seen)
    assert names(tmp_path / "exp") == ["epoch=4-step=15.ckpt"]


@needs_root
@pytest.mark.parametrize("async_save", [True, False])
def test_a_failed_save_leaves_every_attribute_as_it_was(tmp_path, async_save):
    """The disk is full at the third save: best, last and top-k name what exists, "last" loads, and the error is typed."""
    pl = package("lightning.pytorch")
    with small_disk(tmp_path / "disk", "6m") as disk:
        seen = {}

        class Fill(pl.Callback):
            def on_train_epoch_start(self, trainer, pl_module):
                if trainer.current_epoch == 2:
                    callback._saver.wait()
                    seen["state"] = json.dumps(callback.state_dict(), default=str, sort_keys=True)
                    seen["names"] = names(disk)
                    (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - 9000))

        callback = SafeCheckpointCallback(
            dirpath=disk, monitor="val_loss", save_top_k=3, save_last=True, config=QUICK, async_save=async_save
        )
        module = module_class(pl)(width=8000)
        pl.seed_everything(1, verbose=False)
        made = trainer(pl, [Fill(), callback], tmp_path, max_epochs=4)
        with pytest.raises(NotEnoughSpaceError):
            made.fit(module)
        (disk / "filler").unlink()
        assert json.dumps(callback.state_dict(), default=str, sort_keys=True) == seen["state"]
        assert [n for n in names(disk) if n != "filler"] == seen["names"]
        for path in (*callback.best_k_models, callback.best_model_path, callback.last_model_path):
            verify_files(tmp_path / path, read_manifest(tmp_path / path))
        made.validate(module, ckpt_path="last", verbose=False)
        assert list((disk / ".safe_ckpt/pending").rglob("*")) == []


@needs_root
def test_after_a_failed_save_warn_trains_on_and_saves_again(tmp_path):
    """on_failure="warn": one save fails, training goes on, the next save is there and believed."""
    pl = package("lightning.pytorch")
    with small_disk(tmp_path / "disk", "3m") as disk:

        class Fill(pl.Callback):
            def on_train_epoch_start(self, trainer, pl_module):
                if trainer.current_epoch == 1:
                    (disk / "filler").write_bytes(bytes(2_500_000))
                if trainer.current_epoch == 2:
                    callback._saver.wait()
                    (disk / "filler").unlink()

        config = CheckpointConfig(timeouts=QUICK.timeouts, on_failure="warn")
        callback = SafeCheckpointCallback(dirpath=disk, save_top_k=-1, config=config)
        pl.seed_everything(1, verbose=False)
        trainer(pl, [Fill(), callback], tmp_path).fit(module_class(pl)(width=5000))
        assert names(disk) == ["epoch=0-step=3.ckpt", "epoch=2-step=9.ckpt"]
        assert callback.best_model_path.endswith("epoch=2-step=9.ckpt")


def test_loggers_hear_of_what_exists(tmp_path):
    """after_save_checkpoint is called on the main thread, once per checkpoint, after the file is there."""
    pl = package("lightning.pytorch")

    class Log(pl.loggers.CSVLogger):
        heard = []

        def after_save_checkpoint(self, checkpoint_callback):
            self.heard.append(
                (
                    os.path.exists(checkpoint_callback.best_model_path),
                    os.path.basename(checkpoint_callback.best_model_path),
                )
            )

    log = Log(tmp_path / "logs")
    fit(tmp_path / "ckpt", settings={"logger": log}, save_top_k=-1)
    assert [exists for exists, _ in log.heard] == [True] * 3
    assert log.heard[-1][1] == "epoch=2-step=9.ckpt"


@pytest.mark.quick
def test_the_users_own_save_is_done_when_it_returns(tmp_path):
    """trainer.save_checkpoint during fit and after it: the file is there, verified, in or outside of the directory."""
    pl = package("lightning.pytorch")

    class Own(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 4:
                for path in (tmp_path / "own.ckpt", tmp_path / "else/where/own.ckpt", tmp_path / "weights.ckpt"):
                    trainer.save_checkpoint(path, weights_only=path.name == "weights.ckpt")
                    verify_files(path, read_manifest(path))

    made, _, module = fit(tmp_path / "exp", callbacks=[Own()])
    assert "optimizer_states" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert torch.load(tmp_path / "own.ckpt", weights_only=True)["global_step"] == 4
    made.save_checkpoint(tmp_path / "final.ckpt")
    verify_files(tmp_path / "final.ckpt", read_manifest(tmp_path / "final.ckpt"))
    assert not list(tmp_path.glob(".*tmp"))
    loaded = type(module).load_from_checkpoint(tmp_path / "final.ckpt")
    assert fingerprint(loaded) == fingerprint(module)


@pytest.mark.quick
def test_an_explicit_save_that_fails_raises_also_under_warn(tmp_path):
    """on_failure="warn" is for the periodic saves: trainer.save_checkpoint still raises."""
    pl = package("lightning.pytorch")

    class Own(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            with pytest.raises(DirectoryError):
                trainer.save_checkpoint(tmp_path / "file/own.ckpt")

    (tmp_path / "file").touch()
    config = CheckpointConfig(on_failure="warn", max_consecutive_failures=100)
    fit(tmp_path / "exp", config=config, callbacks=[Own()])
    assert names(tmp_path / "exp") == ["epoch=2-step=9.ckpt"]


def test_a_remote_default_directory_is_refused(tmp_path, monkeypatch):
    """Also where the Trainer's default_root_dir is what decides."""
    pl = package("lightning.pytorch")
    monkeypatch.chdir(tmp_path)
    made = trainer(pl, [SafeCheckpointCallback(config=QUICK)], "memory://x/y")
    with pytest.raises(ConfigError, match="dirpath: memory:// is not supported"):
        made.fit(module_class(pl)())
    assert os.listdir(tmp_path) == []


def test_the_learning_rate_finder_restores_and_removes_its_checkpoint(tmp_path):
    """The tuner saves, restores and removes its own checkpoint through the same I/O."""
    pl = package("lightning.pytorch")
    module = module_class(pl)()
    module.lr = 0.1
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=module.lr)
    from lightning.pytorch.callbacks import LearningRateFinder

    before = fingerprint(module)
    finder = LearningRateFinder(num_training_steps=5, min_lr=1e-4)
    fit(tmp_path / "exp", module=module, callbacks=[finder], settings={"max_epochs": 1})
    assert before != fingerprint(module)
    assert not list(tmp_path.rglob(".lr_find*"))


def test_arbitrary_objects_are_saved_as_they_are_at_the_call(tmp_path):
    """Hyperparameters, numpy arrays and custom objects are saved as they are when save is called."""
    pl = package("lightning.pytorch")
    module = module_class(pl)()
    box = {"array": numpy.zeros(3), "set": {1}}

    def on_save_checkpoint(checkpoint):
        checkpoint["box"] = box

    module.on_save_checkpoint = on_save_checkpoint
    module.on_train_epoch_start = lambda: (box["array"].__iadd__(1), box["set"].add(99))
    fit(tmp_path, module=module, save_top_k=-1, filename="{epoch}")
    arrays = [torch.load(tmp_path / f"epoch={e}.ckpt", weights_only=False)["box"]["array"].tolist() for e in range(3)]
    assert arrays == [[1.0] * 3, [2.0] * 3, [3.0] * 3]


@pytest.mark.quick
@pytest.mark.parametrize(("is_free", "after"), [(False, False), (True, False), (False, True)])
def test_a_save_says_what_a_resume_will_refuse(tmp_path, caplog, is_free, after):
    """Lightning 2.6 resumes with ``weights_only=True`` unless ``fit`` says otherwise: an object is named when it is saved.

    Where ``fit`` says so nothing is refused, and nothing is said. A save after ``fit`` is as one within.
    """
    pl = package("lightning.pytorch")
    if "weights_only" not in inspect.signature(pl.Trainer.fit).parameters:
        pytest.skip("this release reads whatever there is")

    class Scored(pl.Callback):
        def state_dict(self):
            return {"best": numpy.float64(0.5)}  # as what has summed up a metric has

    def train(epochs):
        ours = SafeCheckpointCallback(dirpath=tmp_path, config=QUICK, resume="auto", save_top_k=0 if after else 1)
        made = trainer(pl, [ours, Scored()], tmp_path, max_epochs=epochs)
        made.fit(module_class(pl)(), **({"weights_only": False} if is_free else {}))
        return made

    pickles._data_alone.clear()  # it says so once for each name
    with caplog.at_level(logging.WARNING, "safe_ckpt"):
        made = train(2)
        if after:
            made.save_checkpoint(tmp_path / "after.ckpt")
    said = [text for text in caplog.messages if "weights_only=False" in text]
    if is_free:
        assert not said
        assert train(3).global_step == 9
    else:
        assert "numpy._core.multiarray.scalar" in said[0]
        assert len(said) == 1
        with pytest.raises(pickle.UnpicklingError):
            train(3)


def test_settings_that_contradict_lightning_are_refused_at_once(tmp_path):
    """Retention beside save_top_k, a remote directory, another CheckpointIO, a sharded strategy: clear errors."""
    pl = package("lightning.pytorch")
    with pytest.raises(ConfigError, match="save_top_k"):
        SafeCheckpointCallback(dirpath=tmp_path, config=CheckpointConfig(retention=Retention(keep_last=1)))
    with pytest.raises(ConfigError, match="not supported"):
        SafeCheckpointCallback(dirpath="memory://bucket/x")
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    with pytest.raises(ConfigError, match="AsyncCheckpointIO"):
        fit(tmp_path, settings={"plugins": [AsyncCheckpointIO()]})

    class Sharded(pl.strategies.SingleDeviceStrategy):
        def save_checkpoint(self, checkpoint, filepath, storage_options=None):
            pass

    with pytest.raises(ConfigError, match="Sharded"):
        fit(tmp_path, settings={"strategy": Sharded(device=torch.device("cpu"))})


def test_a_listing_that_fails_takes_no_directory_away(tmp_path, monkeypatch):
    """When a second kind of file cannot be listed, the directory stays held; a first listing that fails holds nothing."""
    directories, lock = FileSaver(QUICK, tuple), tmp_path / ".safe_ckpt/lock"

    def fails(*_):
        raise OSError(errno.EIO, "no answer")

    with monkeypatch.context() as broken:
        broken.setattr("safe_ckpt.lightning.directories.list_files", fails)
        with pytest.raises(SafeCheckpointError):
            directories.hold(tmp_path, ".ckpt")
    assert tmp_path not in directories.homes
    assert not lock.exists()
    directories.hold(tmp_path, ".ckpt")
    with monkeypatch.context() as broken:
        broken.setattr("safe_ckpt.lightning.directories.list_files", fails)
        with pytest.raises(SafeCheckpointError):
            directories.hold(tmp_path, ".pt")
    assert tmp_path in directories.homes
    assert lock.exists()
    directories.hold(tmp_path, ".pt")
    directories.close()
    assert not lock.exists()


def test_a_directory_in_use_is_refused(tmp_path):
    """Another live job trains there: fit raises before it trains."""
    from safe_ckpt import Checkpointer

    with Checkpointer(tmp_path / "exp"), pytest.raises(DirectoryInUseError):
        fit(tmp_path / "exp")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DirectoryError):
        fit(tmp_path / "file/exp")


def test_a_damaged_file_is_not_loaded(tmp_path):
    """An explicit ckpt_path whose bytes are wrong is an error, not wrong weights."""
    from support import flip_bit

    made, callback, module = fit(tmp_path)
    flip_bit(tmp_path / "epoch=2-step=9.ckpt", 3000)
    with pytest.raises(CorruptCheckpointError):
        made.validate(module, ckpt_path="best", verbose=False)


@pytest.mark.parametrize("way", ["validate", "fit"])
@pytest.mark.quick
def test_a_file_that_was_resumed_from_is_verified_when_it_is_loaded_again(tmp_path, way):
    """That it was whole when the run began says nothing of now: damage since then is an error, not wrong weights."""
    from support import flip_bit

    fit(tmp_path, save_top_k=-1, settings={"max_epochs": 1})
    made, _, module = fit(tmp_path, resume="auto", save_top_k=-1, settings={"max_epochs": 2})
    path = tmp_path / "epoch=0-step=3.ckpt"
    assert made.ckpt_path == str(path)
    flip_bit(path, 3000)
    with pytest.raises(CorruptCheckpointError):
        getattr(made, way)(module, ckpt_path=path)


def test_fast_dev_run_touches_nothing(tmp_path):
    """A trial run makes no directory and no process."""
    fit(tmp_path / "exp", settings={"fast_dev_run": True})
    assert not (tmp_path / "exp").exists()


@pytest.mark.quick
def test_fit_can_be_called_again(tmp_path):
    """A second fit of the same Trainer and callback opens the pipeline anew."""
    made, callback, module = fit(tmp_path, save_top_k=-1, filename="{step}")
    made.fit_loop.max_epochs = 4
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not empty.*")
        made.fit(module)
    assert names(tmp_path) == ["step=12.ckpt", "step=3.ckpt", "step=6.ckpt", "step=9.ckpt"]
    assert writers_of(os.getpid()) == []


def test_a_live_callback_and_loader_can_be_pickled(tmp_path):
    """Nothing live is pickled: strategies that spawn can take both."""
    made, callback, _ = fit(tmp_path, save_last=True)
    copy_of = pickle.loads(pickle.dumps(callback))
    assert copy_of.best_model_path == callback.best_model_path
    loader = pickle.loads(pickle.dumps(resumable(torch.utils.data.DataLoader(list(range(4))))))
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]
    assert resumable(loader) is loader
    with pytest.raises(TypeError, match="DataLoader"):
        resumable([1, 2])


@pytest.mark.quick
def test_a_fit_that_ends_without_one_save_says_so(tmp_path, caplog):
    """Manual optimization past Lightning's counters, an interval that never came: one warning. Saves switched off: none."""
    pl = package("lightning.pytorch")
    base = module_class(pl)

    class ByHand(base):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers().optimizer
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def said(name, model, **given):
        caplog.clear()
        callback = SafeCheckpointCallback(tmp_path / name, **given)
        trainer(pl, [callback], tmp_path, max_epochs=1).fit(model)
        return [record.getMessage() for record in caplog.records if "saved nothing" in record.getMessage()]

    (found,) = said("by hand", ByHand())
    assert "trained on 3 batches" in found
    assert "self.optimizers()" in found
    (found,) = said("seldom", base(), every_n_train_steps=100)
    assert "every_n_train_steps=100; global_step 3" in found
    assert not said("off", base(), save_top_k=0)
    assert not said("usual", base())


@pytest.mark.quick
def test_what_a_hook_removes_and_saves_again_stays(tmp_path):
    """In one hook: the file of that name is the new one, and is not deleted after its commit."""

    class Anew(SafeCheckpointCallback):
        def _save_last_checkpoint(self, trainer, monitor_candidates):
            self._remove_checkpoint(trainer, str(tmp_path / "last.ckpt"))
            super()._save_last_checkpoint(trainer, monitor_candidates)

    callback = Anew(tmp_path, save_last=True, config=QUICK)
    trainer(package("lightning.pytorch"), [callback], tmp_path).fit(module_class(package("lightning.pytorch"))())
    assert names(tmp_path) == ["epoch=2-step=9.ckpt", "last.ckpt"]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 9
