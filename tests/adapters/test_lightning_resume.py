"""Resuming a Trainer: bit for bit, from any kind of save, with either Lightning package."""

import contextlib
import importlib
import logging
import os
import pathlib
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning_runs import PACKAGES, Stop, fingerprint, module_class, package, stop_at, trainer
from torchdata.stateful_dataloader import StatefulDataLoader

from safe_ckpt import CheckpointConfig
from safe_ckpt.adapters import one_shot
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.home import candidates as catalog
from safe_ckpt.errors import ConfigError, NoValidCheckpointError
from safe_ckpt.layouts.top_level import read_layout
from safe_ckpt.lightning import SafeCheckpointCallback, resumable

KINDS = {
    "epoch": ({"save_top_k": -1}, {}),
    "epoch_max_steps": ({"save_top_k": -1}, {"max_steps": 9, "max_epochs": -1}),
    "epoch_no_val": ({"save_top_k": -1}, {"limit_val_batches": 0}),
    "top_k": ({"monitor": "val_loss", "save_top_k": 2, "save_last": True}, {}),
    "validation_end": ({"monitor": "val_loss", "save_on_train_epoch_end": False, "save_last": "link"}, {}),
    "last_batch": ({"every_n_train_steps": 3, "save_top_k": -1}, {}),
    "last_batch_no_val": ({"every_n_train_steps": 3, "save_top_k": -1}, {"limit_val_batches": 0}),
    "last_batch_max_steps": ({"every_n_train_steps": 3, "save_top_k": -1}, {"max_steps": 9, "max_epochs": -1}),
}
MID_EPOCH = {
    "steps": ({"every_n_train_steps": 2, "save_top_k": -1}, {}),
    "every_step": ({"train_time_interval": timedelta(0), "save_last": True}, {}),
    "validation_within": ({"monitor": "val_loss", "save_top_k": -1}, {"val_check_interval": 1}),
    "accumulated": ({"every_n_train_steps": 1, "save_top_k": -1}, {"accumulate_grad_batches": 2, "max_epochs": 4}),
}


def run(folder, callback, settings, *, seed, loader=None, stop=None, name="lightning.pytorch"):
    pl = package(name)
    pl.seed_everything(seed, verbose=False)
    module = module_class(pl)(loader=loader)
    checkpoints = SafeCheckpointCallback(dirpath=folder, filename="{epoch}-{step}", resume="auto", **callback)
    callbacks = [checkpoints, *([stop_at(pl, stop)] if stop is not None else [])]
    with contextlib.suppress(Stop):
        trainer(pl, callbacks, folder, **settings).fit(module)
    return fingerprint(module), checkpoints, sorted(path.name for path in folder.glob("*.ckpt"))


def compare(tmp_path, callback, settings, stops, **more):
    reference, _, files = run(tmp_path / "reference", callback, settings, seed=1, **more)
    for stop in stops:
        folder = tmp_path / f"stop{stop}"
        run(folder, callback, settings, seed=1, stop=stop, **more)
        found, checkpoints, found_files = run(folder, callback, settings, seed=77, **more)
        assert checkpoints._came_from is not None
        assert found == reference, f"stopped at step {stop}, resumed from {checkpoints._came_from}"
        assert found_files == files


@pytest.mark.parametrize("kind", KINDS)
def test_epoch_boundaries_continue_bit_for_bit_with_a_stock_loader(tmp_path, kind):
    """Saved at the end of an epoch, after validation, or after its last batch: the run goes on as if never stopped."""
    callback, settings = KINDS[kind]
    compare(tmp_path, callback, settings, stops=(4, 6, 8))


@pytest.mark.parametrize("kind", MID_EPOCH)
def test_mid_epoch_continues_bit_for_bit_with_a_resumable_loader(tmp_path, kind):
    """Saved anywhere in an epoch: resumable() makes data order and randomness the same, whatever else is random."""
    callback, settings = MID_EPOCH[kind]
    compare(tmp_path, callback, settings, stops=(4, 5, 7), loader=resumable)


def test_mid_epoch_continues_bit_for_bit_with_worker_processes(tmp_path):
    """resumable() with loader workers."""

    def workers(loader):
        return resumable(torch.utils.data.DataLoader(loader.dataset, batch_size=4, shuffle=True, num_workers=2))

    compare(tmp_path, *MID_EPOCH["steps"], stops=(5,), loader=workers)


def test_mid_epoch_continues_bit_for_bit_with_a_stateful_loader(tmp_path):
    """torchdata's StatefulDataLoader is taken as it is."""

    def stateful(loader):
        return StatefulDataLoader(loader.dataset, batch_size=4, shuffle=True)

    compare(tmp_path, *MID_EPOCH["steps"], stops=(5, 7), loader=stateful)


@pytest.mark.parametrize("name", PACKAGES)
def test_trainers_of_both_packages_take_the_same_callback(tmp_path, name):
    """lightning.pytorch and pytorch_lightning Trainers take the same callback."""
    callback, settings = KINDS["top_k"]
    reference, _, _ = run(tmp_path / "a", callback, settings, seed=1, name=name)
    run(tmp_path / "b", callback, settings, seed=1, stop=5, name=name)
    found, checkpoints, _ = run(tmp_path / "b", callback, settings, seed=2, name=name)
    assert found == reference
    assert str(checkpoints._came_from).endswith("epoch=0-step=3.ckpt")


@pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable.*")
def test_a_stock_loader_in_mid_epoch_gets_one_warning(tmp_path, caplog):
    """Where exactness is impossible it is said before training, once, with the loader and the remedy."""
    callback, settings = MID_EPOCH["steps"]
    for seed in (1, 2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "safe_ckpt"):
            run(tmp_path, callback, settings, seed=seed, stop=5)
        (said,) = [record.getMessage() for record in caplog.records if "resumable(loader)" in record.getMessage()]
        assert "DataLoader over TensorDataset" in said


def test_a_second_fit_does_not_resume(tmp_path):
    """Only the first fit of a Trainer looks for something to resume."""
    pl = package("lightning.pytorch")
    run(tmp_path, {}, {"max_epochs": 1}, seed=1)
    callback = SafeCheckpointCallback(dirpath=tmp_path, resume="auto")
    made = trainer(pl, [callback], tmp_path, max_epochs=2)
    made.fit(module_class(pl)())
    assert made.ckpt_path is not None
    made.fit_loop.max_epochs = 3
    made.fit(module_class(pl)())
    assert made.ckpt_path is None


def fit_twice(folder, *, seed, stop=None, between=lambda module: None):
    """Two epochs, something in between, and in a second fit a third epoch."""
    pl = package("lightning.pytorch")
    pl.seed_everything(seed, verbose=False)
    module = module_class(pl)(loader=resumable)
    saves = SafeCheckpointCallback(
        dirpath=folder, every_n_train_steps=1, save_top_k=-1, filename="{step}", resume="auto"
    )
    made = trainer(pl, [saves, *([stop_at(pl, stop)] if stop is not None else [])], folder, max_epochs=2)
    with contextlib.suppress(Stop):
        made.fit(module)
        between(module)
        made.fit_loop.max_epochs = 3
        made.fit(module)
    return fingerprint(module), made.global_step


def test_a_second_fit_that_was_killed_goes_on_with_its_own_state(tmp_path):
    """Started again, the first fit has nothing to do; the second one has the moments, the rate and the numbers of the second.

    What the script does between the two is done again, and is in what the second one has saved.
    """

    def draw(module):
        torch.rand(3)

    expected = fit_twice(tmp_path / "whole", seed=1, between=draw)
    for stop in (4, 7, 8):
        fit_twice(tmp_path / f"{stop}", seed=1, stop=stop, between=draw)
        assert fit_twice(tmp_path / f"{stop}", seed=77, between=draw) == expected, stop


def test_a_second_fit_that_had_saved_nothing_begins_with_what_the_script_has_made(tmp_path):
    """It is not set back to the end of the first fit: what the script changed in between counts."""
    pl = package("lightning.pytorch")

    def double(module):
        pl.seed_everything(5, verbose=False)
        with torch.no_grad():
            module.net[0].weight.mul_(2)

    expected = fit_twice(tmp_path / "whole", seed=1, between=double)
    fit_twice(tmp_path / "stopped", seed=1, stop=6, between=double)
    assert fit_twice(tmp_path / "stopped", seed=77, between=double) == expected


def test_an_explicit_path_wins(tmp_path):
    """fit(ckpt_path=...) is obeyed also with resume="auto"."""
    pl = package("lightning.pytorch")
    run(tmp_path, {"save_top_k": -1}, {}, seed=1)
    made = trainer(pl, [SafeCheckpointCallback(dirpath=tmp_path, resume="auto", save_top_k=-1)], tmp_path, max_epochs=4)
    made.fit(module_class(pl)(), ckpt_path=tmp_path / "epoch=0-step=3.ckpt")
    assert str(made.ckpt_path).endswith("epoch=0-step=3.ckpt")


def test_a_finished_run_stays_finished(tmp_path):
    """Started again after its end, the run restores the last checkpoint and trains nothing."""
    reference, _, files = run(tmp_path, {"save_top_k": -1}, {}, seed=1)
    found, _, found_files = run(tmp_path, {"save_top_k": -1}, {}, seed=2)
    assert found == reference
    assert found_files == files


def test_a_damaged_newest_file_is_quarantined_and_the_older_one_taken(tmp_path):
    """A flipped bit in the newest file: the older one is resumed from, the damaged one is in quarantine."""
    from support import flip_bit

    run(tmp_path, {"save_top_k": -1}, {"max_epochs": 2}, seed=1)
    flip_bit(tmp_path / "epoch=1-step=6.ckpt", 3000)
    _, checkpoints, _ = run(tmp_path, {"save_top_k": -1}, {"max_epochs": 2}, seed=1)
    assert str(checkpoints._came_from).endswith("epoch=0-step=3.ckpt")
    assert (tmp_path / ".safe_ckpt/quarantine/epoch=1-step=6.ckpt").exists()


def test_no_undamaged_checkpoint_is_an_error(tmp_path):
    """No silent fresh start over checkpoints that cannot be read."""
    run(tmp_path, {}, {"max_epochs": 1}, seed=1)
    (tmp_path / "epoch=0-step=3.ckpt").write_bytes(b"PK\3\4")
    with pytest.raises(NoValidCheckpointError):
        run(tmp_path, {}, {}, seed=1)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_stock_run_is_taken_over_and_given_back(tmp_path, name):
    """A run that ModelCheckpoint began goes on with ours, unverified and with a warning, and the other way round."""
    pl = package(name)
    stock = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, monitor="val_loss", save_top_k=2, filename="{epoch}-{step}")
    trainer(pl, [stock], tmp_path, max_epochs=2).fit(module_class(pl)())
    ours = SafeCheckpointCallback(
        dirpath=tmp_path, monitor="val_loss", save_top_k=2, filename="{epoch}-{step}", resume="auto"
    )
    made = trainer(pl, [ours], tmp_path, max_epochs=3)
    made.fit(module_class(pl)())
    assert made.ckpt_path.endswith("epoch=1-step=6.ckpt")
    assert len(ours.best_k_models) == 2
    assert made.global_step == 9
    again = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, monitor="val_loss", save_top_k=2, filename="{epoch}-{step}")
    made = trainer(pl, [again], tmp_path, max_epochs=4)
    with pytest.warns(UserWarning, match="not empty"):
        made.fit(module_class(pl)(), ckpt_path=ours.best_model_path)
    assert again.best_k_models
    assert made.global_step == 12


def test_resume_auto_without_dirpath_is_refused(tmp_path):
    """Without dirpath every run would look into a new place and start afresh without a word: refused."""
    with pytest.raises(ConfigError, match="dirpath"):
        SafeCheckpointCallback(resume="auto")
    with pytest.raises(ConfigError, match="resume"):
        SafeCheckpointCallback(dirpath=tmp_path, resume="yes")


def test_restarts_leave_no_extra_files(tmp_path):
    """save_top_k=1 over five interrupted starts: one file, not one per start."""
    for stop in (4, 7, 10, 13):
        run(tmp_path, {}, {"max_epochs": 5}, seed=1, stop=stop)
    _, _, files = run(tmp_path, {}, {"max_epochs": 5}, seed=1)
    assert files == ["epoch=4-step=15.ckpt"]


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".safe_ckpt")


def resume_once(folder, *callbacks, kind=SafeCheckpointCallback, settings=None, **arguments):
    """Fit with resume="auto". Returns the name of what was resumed from, the Trainer and the callback."""
    pl = package("lightning.pytorch")
    pl.seed_everything(1, verbose=False)
    callback = kind(dirpath=folder, filename="{step}", resume="auto", **arguments)
    made = trainer(pl, [callback, *callbacks], folder, **(settings or {}))
    with contextlib.suppress(Stop):
        made.fit(module_class(pl)())
    return made.ckpt_path and made.ckpt_path.rpartition("/")[2], made, callback


@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided.*")
def test_weights_alone_are_never_resumed_from(tmp_path):
    """The newest file holds only weights, ours or a stock one: an older one with the training's state is taken."""
    pl = package("lightning.pytorch")
    weights = SafeCheckpointCallback(
        dirpath=tmp_path, filename="w{step}", save_weights_only=True, every_n_train_steps=2
    )
    resume_once(tmp_path, weights, stop_at(pl, 5))
    assert names(tmp_path) == ["step=3.ckpt", "wstep=4.ckpt"]
    torch.save({"state_dict": {}, "global_step": 9}, tmp_path / "stock.ckpt")
    found, made, _ = resume_once(tmp_path, settings={"max_epochs": 2})
    assert found == "step=3.ckpt"
    made.save_checkpoint(tmp_path / "export.ckpt", weights_only=True)
    found, *_ = resume_once(tmp_path)
    assert found == "step=6.ckpt"
    assert not list((tmp_path / ".safe_ckpt/quarantine").rglob("*"))
    with pytest.raises(ConfigError, match="save_weights_only"):
        SafeCheckpointCallback(dirpath=tmp_path, save_weights_only=True, resume="auto")


def test_an_experiment_within_the_directory_is_left_alone(tmp_path):
    """runs/exp/finetune has an order of its own: restarting runs/exp does not go on from there."""
    resume_once(tmp_path, settings={"max_epochs": 1})
    resume_once(tmp_path / "finetune", settings={"max_epochs": 3})
    found, made, _ = resume_once(tmp_path, settings={"max_epochs": 2})
    assert found == "step=3.ckpt"
    assert made.global_step == 6


def test_another_file_extension_has_the_same_order(tmp_path):
    """FILE_EXTENSION is ModelCheckpoint's own knob: restarts count on, and the newest is taken."""

    class Pt(SafeCheckpointCallback):
        FILE_EXTENSION = ".pt"

    for epochs, expected in ((2, None), (3, "step=6.pt"), (4, "step=9.pt")):
        found, *_ = resume_once(tmp_path, kind=Pt, save_top_k=-1, settings={"max_epochs": epochs})
        assert found == expected
    sequences = [read_manifest(tmp_path / f"step={step}.pt").sequence for step in (3, 6, 9, 12)]
    assert sequences == sorted(set(sequences))


def test_a_save_after_fit_is_the_newest(tmp_path):
    """trainer.save_checkpoint(dirpath/...) after the end of fit is what the next run goes on from."""
    _, made, _ = resume_once(tmp_path, every_n_train_steps=2, settings={"max_epochs": 1})
    made.save_checkpoint(tmp_path / "final.ckpt")
    found, *_ = resume_once(tmp_path, every_n_train_steps=2, settings={"max_epochs": 2})
    assert found == "final.ckpt"


def test_files_elsewhere_are_in_one_order_over_all_runs(tmp_path, monkeypatch):
    """Files in another folder, saved during fit and after it: the newest is what the next run, another process, saves there."""
    pl = package("lightning.pytorch")
    manual = tmp_path / "manual"

    class Elsewhere(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(manual / f"{trainer.global_step}.ckpt")

    for epochs in (1, 2):
        monkeypatch.setattr(one_shot, "_given", {})
        checkpoints = SafeCheckpointCallback(dirpath=tmp_path / "ckpts", resume="auto")
        made = trainer(pl, [checkpoints, Elsewhere()], tmp_path, max_epochs=epochs)
        made.fit(module_class(pl)())
        if epochs == 1:
            made.save_checkpoint(manual / "3-after.ckpt")
    found = catalog.by_commit(catalog.list_files(manual, ".ckpt"))
    assert [candidate.path.name for candidate in found] == ["6.ckpt", "3-after.ckpt", "3.ckpt"]


def test_every_callback_makes_its_own_saves_after_a_resume(tmp_path):
    """Resumed from the other callback's file of this very step, the first one still saves its own."""

    def go(folder, *more):
        pl = package("lightning.pytorch")
        pl.seed_everything(1, verbose=False)
        best = SafeCheckpointCallback(
            dirpath=folder, monitor="val_loss", save_top_k=-1, filename="best{step}", resume="auto"
        )
        steps = SafeCheckpointCallback(dirpath=folder, every_n_train_steps=3, filename="{step}", resume="auto")
        with contextlib.suppress(Stop):
            trainer(pl, [best, steps, *more], folder, limit_val_batches=1).fit(module_class(pl)(loader=resumable))

    pl = package("lightning.pytorch")

    class StopBeforeValidation(pl.Callback):
        def on_validation_start(self, trainer, pl_module):
            if trainer.global_step == 6:
                raise Stop

    go(tmp_path / "straight")
    go(tmp_path / "broken", StopBeforeValidation())
    assert names(tmp_path / "broken") == ["beststep=3.ckpt", "step=6.ckpt"]
    go(tmp_path / "broken")
    assert names(tmp_path / "broken") == names(tmp_path / "straight")


def test_two_directories_to_resume_from_are_refused(tmp_path):
    """Their orders cannot be compared; nothing is guessed."""
    other = SafeCheckpointCallback(dirpath=tmp_path / "b", resume="auto", every_n_epochs=2)
    with pytest.raises(ConfigError, match="one directory at a time"):
        resume_once(tmp_path / "a", other)


def test_the_file_resumed_from_is_rotated_whoever_saved_it(tmp_path):
    """Two auto callbacks in one directory: restarts leave no file behind."""
    for epochs in (1, 2, 3, 4):
        other = SafeCheckpointCallback(
            dirpath=tmp_path, resume="auto", every_n_train_steps=2, filename="other", enable_version_counter=False
        )
        resume_once(tmp_path, other, settings={"max_epochs": epochs})
    assert names(tmp_path) == ["other.ckpt", "step=12.ckpt"]


def test_a_second_fit_keeps_its_links(tmp_path):
    """Resumed, trained on, fitted again without an improvement: last.ckpt names a file that is there."""
    pl = package("lightning.pytorch")
    resume_once(tmp_path, save_last="link", monitor="step", mode="max", settings={"max_epochs": 1})
    _, made, callback = resume_once(tmp_path, save_last="link", monitor="step", mode="max", settings={"max_epochs": 2})
    made.fit_loop.max_epochs = 3
    callback.best_k_models = dict.fromkeys(callback.best_k_models, torch.tensor(1e9))
    callback.kth_value = torch.tensor(1e9)
    made.fit(module_class(pl)())
    assert (tmp_path / "last.ckpt").exists()


@pytest.mark.parametrize("junk", ["text", "legacy", "folder"])
def test_foreign_files_and_folders_are_neither_moved_nor_taken(tmp_path, junk):
    """A text file, a file in torch's old format, a folder with that name: passed over, or tried last, and left there."""
    resume_once(tmp_path, settings={"max_epochs": 1})
    if junk == "text":
        (tmp_path / "junk.ckpt").write_text("hello")
    elif junk == "legacy":
        torch.save({"a": 1}, tmp_path / "junk.ckpt", _use_new_zipfile_serialization=False)
    else:
        (tmp_path / "junk.ckpt").mkdir()
    found, *_ = resume_once(tmp_path, settings={"max_epochs": 2})
    assert found == "step=3.ckpt"
    assert "junk.ckpt" in names(tmp_path)
    assert not list((tmp_path / ".safe_ckpt/quarantine").rglob("*"))


def test_stock_files_with_foreign_classes_inside_are_tried_in_order(tmp_path):
    """A Path in the hyperparameters: the step is read without loading, or running, anything, and the newest is taken."""
    pl = package("lightning.pytorch")
    stock = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_top_k=-1)
    module = module_class(pl)()
    module.save_hyperparameters({"root": pathlib.Path("x")})
    trainer(pl, [stock], tmp_path, max_epochs=4).fit(module)
    made = trainer(pl, [SafeCheckpointCallback(dirpath=tmp_path, resume="auto")], tmp_path, max_epochs=4)
    made.fit(module_class(pl)(), weights_only=False)
    assert made.ckpt_path.endswith("step=12.ckpt")


def test_reading_the_step_of_a_stock_file_runs_no_code(tmp_path):
    """A pickle that would execute code is looked at without doing so."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save(
        {"global_step": 7, "loops": {}, "lr_schedulers": [], "state_dict": {}, "evil": Evil()}, tmp_path / "a.ckpt"
    )
    seen = read_layout(tmp_path / "a.ckpt")
    assert (seen.step, seen.problem) == (7, "")
    torch.save(
        {"global_step": 7, "loops": {}, "lr_schedulers": [], "state_dict": {}, "path": pathlib.Path("x")},
        tmp_path / "b.ckpt",
    )
    seen = read_layout(tmp_path / "b.ckpt")
    assert (seen.step, seen.problem) == (7, "")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("name", "step"),
    [
        pytest.param(name, step, marks=pytest.mark.thorough if name != PACKAGES[0] and step != 5 else [])
        for step in (4, 5, 6)
        for name in PACKAGES
    ],
)
def test_a_signal_ends_fit_and_the_next_run_goes_on_exactly(tmp_path, name, step):
    """SIGTERM in mid-epoch and at the end of one: saved, fit returns by itself, the handler of before runs, same weights."""
    pl = package(name)
    seen = []

    class Signal(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == step - 1:
                signal.raise_signal(signal.SIGTERM)

    def go(folder, *callbacks, seed=1):
        pl.seed_everything(seed, verbose=False)
        module = module_class(pl)(loader=resumable)
        checkpoints = SafeCheckpointCallback(
            dirpath=folder, monitor="val_loss", save_last=True, resume="auto",
            config=CheckpointConfig(save_on_signals=("SIGTERM",)),
        )  # fmt: skip
        made = trainer(pl, [checkpoints, *callbacks], folder, min_epochs=2)
        made.fit(module)
        return fingerprint(module), made

    reference, _ = go(tmp_path / "straight")
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    try:
        _, made = go(tmp_path / "broken", Signal())
        assert made.global_step == step
        assert not made.received_sigterm
        assert seen == [1]
        signal.raise_signal(signal.SIGTERM)
        assert seen == [1, 1]  # everything is as it was
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "stopped.ckpt" in names(tmp_path / "broken")
    found, made = go(tmp_path / "broken", seed=2)
    assert made.ckpt_path.endswith("stopped.ckpt")
    assert found == reference


class Failure(Exception):
    """What a hook of the user's raises."""


@pytest.mark.parametrize("kind", ["lr_find", "batch sizes", "finder", "failed setup", "new Trainer"])
def test_a_trainer_that_has_not_trained_resumes(tmp_path, kind):
    """Whatever came before: a finder, a fit that failed in a hook, another Trainer with the same callback."""
    pl, step = package("lightning.pytorch"), 6 if kind == "finder" else 5
    tuner = importlib.import_module("lightning.pytorch.tuner")

    class Module(module_class(pl)):
        def __init__(self):
            super().__init__(loader=resumable)
            self.lr, self.batch_size, self.failures_left = 0.1, 4, 2

        def setup(self, stage):  # the last one: checkpoint callbacks come before it
            if kind == "failed setup" and self.failures_left:
                self.failures_left -= 1
                raise Failure

    def run(folder, stop=None, *, resumed=False, seed=1):
        pl.seed_everything(seed, verbose=False)
        module = Module()
        saves = SafeCheckpointCallback(
            dirpath=folder, every_n_train_steps=1, save_top_k=-1, filename="{step}", resume="auto"
        )
        callbacks = [saves, *([stop_at(pl, stop)] if stop is not None else [])]
        if kind == "finder" and resumed:
            callbacks.append(pl.callbacks.LearningRateFinder(num_training_steps=3))
        made = trainer(pl, callbacks, tmp_path / "root", max_steps=9, max_epochs=-1)
        if resumed and kind == "lr_find":
            tuner.Tuner(made).lr_find(module, num_training=3)
        if resumed and kind == "batch sizes":
            tuner.Tuner(made).scale_batch_size(module, steps_per_trial=1, max_trials=1, init_val=4)
        while True:
            with contextlib.suppress(Stop):
                try:
                    made.fit(module)
                except Failure:
                    continue
            return module, saves, made

    expected = fingerprint(run(tmp_path / "straight")[0])
    _, saves, _ = run(tmp_path / "resumed", step)
    if kind == "new Trainer":
        pl.seed_everything(77, verbose=False)
        module = Module()
        made = trainer(pl, [saves], tmp_path / "root", max_steps=9, max_epochs=-1)
        made.fit(module)
    else:
        module, saves, made = run(tmp_path / "resumed", resumed=True, seed=77)
    assert Path(made.ckpt_path).name == f"step={step}.ckpt"
    assert made.global_step == 9
    assert fingerprint(module) == expected


@pytest.mark.parametrize("max_steps", [4, 6])
def test_a_run_that_max_steps_ended_has_its_epoch_when_it_is_started_again(tmp_path, max_steps):
    """``trainer.current_epoch`` is what it was at the end, within an epoch and at its last batch; nothing is trained."""
    settings = {"max_steps": max_steps, "max_epochs": -1}
    pl = package("lightning.pytorch")

    def ended():
        made = trainer(
            pl, [SafeCheckpointCallback(tmp_path, every_n_train_steps=1, resume="auto")], tmp_path, **settings
        )
        made.fit(module_class(pl)(loader=resumable))
        return made.current_epoch, made.global_step

    assert ended() == ended() == ended() == (2, max_steps)
