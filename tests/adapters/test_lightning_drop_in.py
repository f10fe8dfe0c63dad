"""In the place of ModelCheckpoint: copies of a Trainer, subclasses, exceptions at the very end, and what is left behind."""

import contextlib
import copy
import io
import logging
import os
import threading
from pathlib import Path

import lightning_runs
import pytest
import torch
from lightning_runs import PACKAGES, Stop, module_class, package, stop_at, trainer

from safe_ckpt import CheckpointConfig, Mirror
from safe_ckpt.adapters.patch import StandIn
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.formats.verify import verify_files
from safe_ckpt.errors import ConfigError
from safe_ckpt.lightning import SafeCheckpointCallback, resumable
from safe_ckpt.lightning.saver import TrainerSaver
from support import writers_of

pl = package("lightning.pytorch")


class Module(module_class(pl)):
    """One that can be pickled: it has a name."""


class Copies(pl.Callback):
    """Copies and pickles the Trainer in every hook."""

    def __init__(self):
        self.made = {}

    def __getstate__(self):
        return {"made": {}}


def _copying(name):
    def hook(self, trainer, pl_module, *args, **kwargs):
        torch.save(trainer, io.BytesIO())
        copy.deepcopy(trainer.callbacks)
        self.made[name] = copy.deepcopy(trainer)

    return hook


HOOKS = [
    *("setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end"),
    *("on_validation_start", "on_validation_end", "on_train_epoch_end", "on_train_end", "on_fit_end", "teardown"),
]
for _name in HOOKS:
    setattr(Copies, _name, _copying(_name))


def stand_ins_of(trainer):
    owners = (trainer, trainer.strategy, trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer._checkpoint_connector)
    return [value for owner in owners for value in vars(owner).values() if isinstance(value, StandIn)]


def test_a_trainer_is_copied_and_pickled_at_any_moment(tmp_path):
    """Before fit, in every hook of one that was resumed, and after it; a copy has nothing of ours that runs, and can fit."""
    for epochs in (1, 2):
        copies = Copies()
        callback = SafeCheckpointCallback(dirpath=tmp_path / "a", filename="{step}", resume="auto")
        made = trainer(pl, [copies, callback], tmp_path, max_epochs=epochs)
        before = copy.deepcopy(made)
        made.fit(Module(loader=resumable))
    assert made.ckpt_path is not None
    assert set(copies.made) == set(HOOKS)
    for copied in (before, *copies.made.values(), copy.deepcopy(made)):
        assert stand_ins_of(copied) == []
        assert getattr(copied.strategy.checkpoint_io, "saver", None) is None
        assert copied.callbacks[-1]._saver is None
    copied = copy.deepcopy(made)
    copied.fit_loop.max_epochs = 3
    copied.fit(copied.lightning_module)
    assert (copied.global_step, made.global_step) == (9, 6)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).global_step == 6


@pytest.mark.parametrize("name", PACKAGES)
def test_save_checkpoint_of_a_subclass_is_called(tmp_path, name):
    """By the callback and by the user, as often and with the same arguments as by ModelCheckpoint; with async_save=False the
    file is there when ``super()`` has returned. A Trainer without our callback has nothing of ours.
    """
    pl = package(name)

    class Own(pl.Trainer):
        def save_checkpoint(self, filepath, weights_only=None, storage_options=None):
            super().save_checkpoint(filepath, weights_only)
            self.calls.append((os.path.basename(filepath), weights_only, os.path.exists(filepath)))

    class User(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 2:
                trainer.save_checkpoint(trainer.folder / "user.ckpt")

    calls = {}
    kinds = {"stock": pl.callbacks.ModelCheckpoint, "ours": SafeCheckpointCallback, "waiting": SafeCheckpointCallback}
    for kind, made_by in kinds.items():
        more = {"async_save": False} if kind == "waiting" else {}
        folder = tmp_path / kind
        saving = made_by(dirpath=folder, monitor="val_loss", save_top_k=2, save_last=True, filename="{step}", **more)
        pl.seed_everything(1, verbose=False)
        made = Own(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=3,
            num_sanity_val_steps=0, callbacks=[User(), saving], default_root_dir=folder,
        )  # fmt: skip
        made.calls, made.folder = [], folder
        made.fit(module_class(pl)())
        made.save_checkpoint(folder / "after.ckpt", weights_only=True)
        calls[kind] = made.calls
        assert (folder / ".safe_ckpt").exists() == (kind != "stock")
        assert len(saving.best_k_models) == 2
    assert calls["waiting"] == calls["stock"]
    assert [call[:2] for call in calls["ours"]] == [call[:2] for call in calls["stock"]]


def test_a_subclass_finds_its_committed_file_after_super_save(tmp_path):
    """A subclass finds the file after ``super()._save_checkpoint``, with async_save=False; it is committed by then."""
    seen = []

    class Reading(SafeCheckpointCallback):
        def _save_checkpoint(self, trainer, filepath):
            super()._save_checkpoint(trainer, filepath)
            verify_files(Path(filepath), read_manifest(Path(filepath)))
            seen.append(torch.load(filepath, weights_only=True)["global_step"])

    callback = Reading(dirpath=tmp_path, save_last=True, async_save=False)
    trainer(pl, [callback], tmp_path, max_epochs=2).fit(Module())
    assert seen == [3, 3, 6, 6]
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["epoch=1-step=6.ckpt", "last.ckpt"]


class Boom(pl.Callback):
    def on_fit_end(self, trainer, pl_module):
        raise ValueError("boom")


@pytest.mark.quick
def test_an_exception_at_the_end_of_fit_is_saved_or_named(tmp_path, caplog):
    """Raised when all is given back already, it is saved at all the same; if that fails the log names the exception."""
    arguments = {"filename": "{step}", "save_on_exception": True, "every_n_train_steps": 4}
    callback = SafeCheckpointCallback(dirpath=tmp_path / "a", **arguments)
    with pytest.raises(ValueError, match="boom"):
        trainer(pl, [callback, Boom()], tmp_path).fit(Module(loader=resumable))
    assert torch.load(tmp_path / "a/step=9.ckpt", weights_only=True)["safe_ckpt"]["ranks"][0]["mid_epoch"] is False
    assert callback._last_checkpoint_saved.endswith("step=9.ckpt")
    assert writers_of(os.getpid()) == []

    module = Module()
    module.on_save_checkpoint = lambda checkpoint: 1 // (9 - checkpoint["global_step"])
    callback = SafeCheckpointCallback(dirpath=tmp_path / "b", **arguments)
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="boom"):
        trainer(pl, [callback, Boom()], tmp_path).fit(module)
    assert "ValueError was raised, and no checkpoint could be saved at it" in caplog.text


class Stubborn(pl.Callback):
    """Puts something into what is taken back at the end that does not let itself be taken back."""

    def on_train_start(self, trainer, pl_module):
        (saver,) = TrainerSaver.living()
        saver.undo.also(lambda: 1 // 0)


def test_an_object_that_cannot_be_put_back_does_not_keep_the_directory(tmp_path):
    """Its error is raised, what was saved is there, and the next run takes the directory."""
    for epochs in (1, 2):
        callback = SafeCheckpointCallback(dirpath=tmp_path / "a", resume="auto")
        stubborn = [Stubborn()] if epochs == 1 else []
        with contextlib.suppress(ZeroDivisionError):
            trainer(pl, [callback, *stubborn], tmp_path, max_epochs=epochs).fit(Module())
        assert of_ours(threading.enumerate()) == []
    assert (tmp_path / "a/epoch=1-step=6.ckpt").exists()


def of_ours(threads):
    return [thread.name for thread in threads if thread.name.startswith("safe_ckpt")]


@pytest.mark.parametrize(
    ("arguments", "end"),
    [({}, stop_at(pl, 1)), ({"save_top_k": 0}, None), ({"save_on_exception": True}, stop_at(pl, 0))],
)
def test_without_a_save_nothing_is_left_behind(tmp_path, arguments, end):
    """fit that fails before any save, and save_top_k=0: no directory, no thread, no process."""
    callback = SafeCheckpointCallback(dirpath=tmp_path / "runs/exp", **arguments)
    with contextlib.suppress(Stop):
        trainer(pl, [callback, *([end] if end else [])], tmp_path).fit(Module())
    assert os.listdir(tmp_path) == []
    assert of_ours(threading.enumerate()) == []
    assert writers_of(os.getpid()) == []


def test_after_a_clean_end_only_the_record_is_left(tmp_path):
    """Beside the checkpoints there is events.jsonl in the hidden folder, or nothing where no events are recorded."""
    for record, left in ((True, ["events.jsonl"]), (False, None)):
        folder = tmp_path / str(record)
        callback = SafeCheckpointCallback(dirpath=folder, config=CheckpointConfig(record_events=record))
        trainer(pl, [callback], tmp_path, max_epochs=1).fit(Module())
        hidden = folder / ".safe_ckpt"
        assert (os.listdir(hidden) if hidden.exists() else None) == left
        assert (folder / "epoch=0-step=3.ckpt").exists()
        assert of_ours(threading.enumerate()) == []


def test_callbacks_hear_once_of_each_committed_checkpoint(tmp_path, caplog):
    """on_checkpoint_committed comes once for each checkpoint, on the thread that trains, also behind one that raises; after
    wait() what is best is there.
    """

    class Hearing(pl.Callback):
        heard = []

        def on_checkpoint_committed(self, trainer, pl_module, info):
            self.heard.append((info.name, info.path.exists(), threading.current_thread() is threading.main_thread()))
            assert pl_module is trainer.lightning_module

        def on_train_epoch_start(self, trainer, pl_module):
            trainer.checkpoint_callback.wait()
            assert trainer.current_epoch == 0 or os.path.exists(trainer.checkpoint_callback.best_model_path)

    class Raising(pl.Callback):
        def on_checkpoint_committed(self, trainer, pl_module, info):
            raise RuntimeError("the model registry is away")

    callback = SafeCheckpointCallback(dirpath=tmp_path, filename="{step}", save_top_k=-1)
    trainer(pl, [callback, Raising(), Hearing()], tmp_path).fit(Module())
    assert caplog.text.count("RuntimeError: the model registry is away") == 3
    assert Hearing.heard == [(f"step={step}.ckpt", True, True) for step in (3, 6, 9)]
    callback.wait()


def test_another_io_that_only_reads_goes_on_reading(tmp_path):
    """A CheckpointIO that writes in its own way is refused with the reason; one that only reads is asked to read."""
    torch_io = pl.plugins.io.TorchCheckpointIO

    class Writing(torch_io):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            super().save_checkpoint(checkpoint, path)

    class Reading(torch_io):
        read = 0

        def load_checkpoint(self, *args, **kwargs):
            self.read += 1
            return super().load_checkpoint(*args, **kwargs)

    callback = SafeCheckpointCallback(dirpath=tmp_path)
    with pytest.raises(ConfigError, match="Writing writes or removes files in a way of its own"):
        trainer(pl, [callback], tmp_path, plugins=[Writing()]).fit(Module())
    reading = Reading()
    began, ended = [], []

    class Weights(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            began.append(lightning_runs.fingerprint(pl_module))

    for epochs in (1, 2):
        callback, module = SafeCheckpointCallback(dirpath=tmp_path, resume="auto"), Module()
        trainer(pl, [callback, Weights()], tmp_path, max_epochs=epochs, plugins=[reading]).fit(module)
        ended.append(lightning_runs.fingerprint(module))
    assert reading.read == 1
    assert began[1] == ended[0] != ended[1]
    assert lightning_runs.fingerprint(Module.load_from_checkpoint(callback.best_model_path)) == ended[1]


def test_a_directory_on_each_host_is_refused_by_name(tmp_path):
    """Lightning's files are whole states of one rank: ``mirror.near: per-host`` says who can have it, and what to give here."""
    near = CheckpointConfig(mirror=Mirror(url=str(tmp_path / "far"), near="per-host"))
    callback = SafeCheckpointCallback(dirpath=tmp_path / "near", config=near)
    with pytest.raises(ConfigError, match=r'mirror\.near: "per-host" is for.*give "shared"'):
        trainer(pl, [callback], tmp_path).fit(Module())
