"""The place in the data under a Trainer: whatever loaders it combines, and however they are read."""

import contextlib
import json
import logging
import random
from datetime import timedelta

import numpy
import pytest
import torch
from lightning_runs import PACKAGES, Stop, fingerprint, package, stop_at, trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from safe_ckpt import data
from safe_ckpt.lightning import SafeCheckpointCallback, resumable

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined"),
]


class Noisy(Dataset):
    """What is drawn for a sample makes part of it."""

    def __init__(self, size=13, offset=0):
        self.size, self.offset = size, offset

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor([self.offset + index, torch.rand(()).item(), random.random(), numpy.random.rand()])


class Stream(IterableDataset):
    """Knows where it is, in each worker; without a length."""

    def __init__(self, size=13):
        self.size, self.at = size, 0

    def __iter__(self):
        info = get_worker_info()
        step, first = (info.num_workers, info.id) if info else (1, 0)
        while first + step * self.at < self.size:
            self.at += 1
            yield torch.tensor([float(first + step * (self.at - 1)), torch.rand(()).item(), 0.0, 1.0])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Blind(Stream):
    """Has to be read again."""

    state_dict = property()
    load_state_dict = property()


class Sized(Blind):
    def __len__(self):
        return self.size


def module_of(pl, loaders):
    class Module(pl.LightningModule):
        """Writes down what it trains on."""

        def __init__(self):
            super().__init__()
            self.net, self.drop = torch.nn.Linear(4, 2), torch.nn.Dropout(0.3)
            self.seen = []

        def training_step(self, batch, batch_idx):
            parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else [batch]
            self.seen.append((self.global_step, [None if part is None else part.tolist() for part in parts]))
            return sum(self.drop(self.net(part)).pow(2).mean() for part in parts if part is not None)

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.net(batch).pow(2).mean() + torch.rand(1))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

        def train_dataloader(self):
            return loaders(pl)

        def val_dataloader(self):
            return DataLoader(Noisy(8), batch_size=4)

    return Module()


def one(dataset=Noisy, made=resumable, **more):
    return lambda pl: made(DataLoader(dataset(), **{"batch_size": 2, **more}))


def combined(mode, workers=1, *, streams=False):
    def loaders(pl):
        if streams:
            parts = {
                name: resumable(DataLoader(Stream(size), batch_size=2)) for name, size in (("long", 13), ("short", 5))
            }
            return pl.utilities.CombinedLoader(parts, mode)
        long = resumable(DataLoader(Noisy(13), batch_size=2, shuffle=True))
        short = resumable(DataLoader(Noisy(5, offset=100), batch_size=2, shuffle=True, num_workers=workers))
        return pl.utilities.CombinedLoader({"long": long, "short": short}, mode)

    return loaders


CASES = {
    "in order": (one(), {}),
    "shuffle": (one(shuffle=True), {}),
    "workers": (one(shuffle=True, num_workers=2), {}),
    "workers that stay": (one(shuffle=True, num_workers=2, persistent_workers=True), {}),
    "of safe_ckpt.data": (one(made=data.resumable, shuffle=True, num_workers=2), {}),
    "stream": (one(Stream), {}),
    "stream, workers": (one(Stream, num_workers=2), {}),
    "stream that is read again": (one(Blind), {}),
    "stream with a length": (one(Sized), {}),
    "longest": (combined("max_size_cycle"), {}),
    "shortest": (combined("min_size"), {}),
    "all of all": (combined("max_size"), {}),
    "all of all, without workers": (combined("max_size", 0), {}),
    "made anew": (one(shuffle=True), {"reload_dataloaders_every_n_epochs": 1}),
    "validation within": (one(shuffle=True), {"val_check_interval": 3}),
    "sanity check": (one(shuffle=True), {"num_sanity_val_steps": 1, "val_check_interval": 2}),
    "validation at the save": (one(shuffle=True), {"val_check_interval": 2}),
    "validation at the save, accumulated": (one(shuffle=True), {"val_check_interval": 2, "accumulate_grad_batches": 3}),
    "only sanity": (one(shuffle=True), {"num_sanity_val_steps": 1}),
    "limited": (one(shuffle=True), {"limit_train_batches": 5}),
    "accumulated": (one(shuffle=True), {"accumulate_grad_batches": 3}),
}


def run(folder, case, *, seed, stop=None, name="lightning.pytorch", callback=None):
    loaders, settings = CASES[case]
    pl = package(name)
    pl.seed_everything(seed, verbose=False)
    module = module_of(pl, loaders)
    callback = callback or SafeCheckpointCallback(
        dirpath=folder,
        filename="{epoch}-{step}",
        resume="auto",
        every_n_train_steps=1,
        save_top_k=2,
        monitor="step",
        mode="max",
    )
    callbacks = [callback, *([stop_at(pl, stop)] if stop is not None else [])]
    made = trainer(pl, callbacks, folder, **{"limit_val_batches": 1, **settings})
    with contextlib.suppress(Stop):
        made.fit(module)
    return fingerprint(module), module.seen, callback


RARE = (
    "workers that stay",
    "per sample",
    "stream, workers",
    "stream with a length",
    "shortest",
    "all of all",
    "validation at the save, accumulated",
    "only sanity",
    "limited",
    "all of all, without workers",  # that is a test of its own
)


def is_exact_from_each_epoch(tmp_path, case):
    weights, seen, _ = run(tmp_path / "whole", case, seed=1)
    steps = max(step for step, _ in seen) + 1
    for stop in sorted({2, steps // 2, steps - 2}):
        folder = tmp_path / str(stop)
        _, before, _ = run(folder, case, seed=1, stop=stop)
        found, after, callback = run(folder, case, seed=77)
        assert callback._came_from is not None
        first = min(step for step, _ in after)
        kept = [one for one in before if one[0] < first]
        assert json.dumps(kept + after) == json.dumps(seen), (case, stop)
        assert found == weights


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.thorough] if case in RARE else []) for case in CASES]
)
def test_the_samples_are_those_of_an_uninterrupted_run(tmp_path, case):
    """Stopped within each of the epochs and resumed: each step's samples, what was drawn for them, and the weights."""
    is_exact_from_each_epoch(tmp_path, case)


@pytest.mark.quick
def test_a_loader_that_is_at_its_end_before_another_gives_nothing_more_in_its_epoch(tmp_path):
    """``CombinedLoader("max_size")``, resumed behind the end of the short one: it begins again with the next epoch."""
    is_exact_from_each_epoch(tmp_path, "all of all, without workers")


def test_the_place_of_a_loader_that_is_at_its_end_before_another_is_plain_data(tmp_path):
    """It is saved as text and numbers, without what a batch would be given again by: that would be most of it."""
    run(tmp_path, "all of all", seed=1, stop=5)
    saved = torch.load(tmp_path / "epoch=0-step=5.ckpt", weights_only=True)["safe_ckpt"]["ranks"][0]["loaders"]
    long, short = (one["safe_ckpt.position"]["places"] for one in saved)
    assert (long[0]["batches"], short[0]["batches"]) == (5, 3)
    assert "undo" not in json.dumps([long, short])


BESIDE = {
    "longest": (combined("max_size_cycle"), {}),
    "shortest": (combined("min_size"), {}),
    "streams, shortest": (combined("min_size", streams=True), {}),
    "all of all": (combined("max_size"), {}),
    "streams, all of all": (combined("max_size", streams=True), {}),
}


@pytest.mark.parametrize("case", BESIDE)
def test_an_exception_gives_again_what_each_loader_had_a_part_in(tmp_path, monkeypatch, case):
    """Before any batch of an epoch: that batch comes again, of each loader that has a batch in it, and no other does."""
    monkeypatch.setitem(CASES, case, BESIDE[case])

    def saving(folder):
        return SafeCheckpointCallback(dirpath=folder, filename="{epoch}-{step}", resume="auto", save_on_exception=True)

    weights, seen, _ = run(tmp_path / "whole", case, seed=1, callback=saving(tmp_path / "whole"))
    last = (max(step for step, _ in seen) + 1) // 3 - 1
    # A stream that is left in an epoch goes on there in the next one: docs/data.md.
    for stop in sorted({2, 3, last, last + 1} if "streams" not in case else {2, min(3, last), last}):
        folder = tmp_path / str(stop)
        _, before, _ = run(folder, case, seed=1, stop=stop, callback=saving(folder))
        found, after, _ = run(folder, case, seed=77, callback=saving(folder))
        assert json.dumps(before + after) == json.dumps(seen), (case, stop)
        assert found == weights


@pytest.mark.parametrize("where", ["its data set", "a hook that moves it"])
def test_an_exception_while_a_batch_is_made_has_it_made_again_as_it_would_have_been(tmp_path, where):
    """With what was drawn for it before the exception, in its data set or in the hooks that move it."""
    pl = package(PACKAGES[0])

    def weights(folder, *, seed, raises):
        def fails_at(place):
            if raises and place == where and module.trainer.global_step == 9:
                raise Stop

        class Fails(Noisy):
            def __getitem__(self, index):
                made = super().__getitem__(index)
                fails_at("its data set")
                return made

        def on_before_batch_transfer(batch, dataloader_idx):
            batch = batch + torch.rand(())
            fails_at("a hook that moves it")
            return batch

        pl.seed_everything(seed, verbose=False)
        module = module_of(pl, one(Fails, shuffle=True))
        module.on_before_batch_transfer = on_before_batch_transfer
        callback = SafeCheckpointCallback(dirpath=folder, resume="auto", save_on_exception=True)
        with pytest.raises(Stop) if raises else contextlib.nullcontext():
            trainer(pl, [callback], folder, limit_val_batches=0).fit(module)
        return fingerprint(module)

    whole = weights(tmp_path / "whole", seed=1, raises=False)
    weights(tmp_path / "stopped", seed=1, raises=True)
    assert weights(tmp_path / "stopped", seed=77, raises=False) == whole


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("case", ["shuffle", "workers", "stream, workers"])
def test_lightnings_own_checkpoints_hold_the_place_too(tmp_path, case, name):
    """Saved by a stock ModelCheckpoint, resumed with ours: the loader's state has all that is needed."""
    weights, seen, _ = run(tmp_path / "whole", case, seed=1, name=name)
    stock = package(name).callbacks.ModelCheckpoint(
        tmp_path / "x", every_n_train_steps=4, save_top_k=-1, filename="{step}"
    )
    _, before, _ = run(tmp_path / "x", case, seed=1, stop=6, name=name, callback=stock)
    found, after, callback = run(tmp_path / "x", case, seed=77, name=name)
    assert callback._came_from.name == "step=4.ckpt"
    assert json.dumps([one for one in before if one[0] < 4] + after) == json.dumps(seen)
    assert found == weights


WITHIN = {
    "steps": ({"every_n_train_steps": 2}, {}, True),
    "time": ({"train_time_interval": timedelta(hours=1)}, {}, True),
    "time, without validation": ({"train_time_interval": timedelta(hours=1)}, {"limit_val_batches": 0}, True),
    "validation within": ({}, {"val_check_interval": 2}, True),
    "validation by time": ({}, {"val_check_interval": timedelta(hours=1)}, True),
    "exceptions": ({"save_on_exception": True}, {}, True),
    "ends of epochs": ({}, {}, False),
    "ends of epochs, validation within": ({"save_on_train_epoch_end": True}, {"val_check_interval": 2}, False),
}


def named_before_training(folder, caplog, *, path=None, settings=None, **saving):
    """Whether the warning named a loader that does not know its place, once for each time that it came."""
    pl, callback = package(PACKAGES[0]), SafeCheckpointCallback(dirpath=folder, **saving)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "safe_ckpt"):
        made = trainer(pl, [callback], folder, **{"limit_val_batches": 1, "max_steps": 1, **(settings or {})})
        made.fit(module_of(pl, lambda _: DataLoader(Noisy(), batch_size=2)), ckpt_path=path)
    said = [record.getMessage() for record in caplog.records if "cannot tell where it was" in record.getMessage()]
    return ["Noisy" in words for words in said]


@pytest.mark.parametrize("case", WITHIN)
@pytest.mark.quick
def test_a_loader_that_does_not_know_its_place_is_named_before_training(tmp_path, caplog, case):
    """Once, if any checkpoint is to be saved within an epoch; not where all are saved between epochs."""
    saving, settings, expected = WITHIN[case]
    if case == "validation by time" and not hasattr(package(PACKAGES[0]).trainer.setup, "_parse_time_interval_seconds"):
        pytest.skip("this release validates by batches alone")
    assert named_before_training(tmp_path, caplog, settings=settings, **saving) == ([True] if expected else [])


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* not empty.*")
@pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable.*")
@pytest.mark.quick
def test_a_resume_within_an_epoch_names_a_loader_that_does_not_know_its_place(tmp_path, caplog):
    """Also where this run saves at the ends of epochs alone; a resume between two epochs has nothing to say."""
    named_before_training(
        tmp_path, caplog, filename="{step}", save_top_k=-1, every_n_train_steps=1, settings={"max_steps": 7}
    )
    for step, expected in ((4, [True]), (7, [])):
        more = {"path": tmp_path / f"step={step}.ckpt", "settings": {"max_steps": 8}}
        assert named_before_training(tmp_path, caplog, **more) == expected


@pytest.mark.quick
def test_max_size_cycle_with_a_loader_of_no_length_is_named(tmp_path, caplog):
    """``max_size_cycle`` over several loaders of which one has no length."""
    pl = package(PACKAGES[0])
    streams = {"a": resumable(DataLoader(Stream(), batch_size=2)), "b": resumable(DataLoader(Noisy(), batch_size=2))}
    callback = SafeCheckpointCallback(dirpath=tmp_path, every_n_train_steps=2)
    with caplog.at_level(logging.WARNING, "safe_ckpt"):
        trainer(pl, [callback], tmp_path, limit_val_batches=0, max_steps=2).fit(
            module_of(pl, lambda pl: pl.utilities.CombinedLoader(streams, "max_size_cycle"))
        )
    assert ["max_size_cycle" in record.getMessage() for record in caplog.records] == [True]
