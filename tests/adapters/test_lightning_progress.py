"""A monitored run that is stopped again and again makes the saves of one that is not."""

import contextlib

import pytest
import torch
from lightning_runs import PACKAGES, QUICK, Stop, fingerprint, names, package, stop_at, trainer
from torch.utils.data import DataLoader, TensorDataset

from safe_ckpt.lightning import SafeCheckpointCallback, resumable


def fit(pl, folder, *callbacks, stop_in_validation_at=None, **settings):
    """One start. Returns the module, the step at which it began, and the Trainer."""

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.seen = torch.nn.Linear(1, 1), []

        def training_step(self, batch, batch_idx):
            self.seen.append(self.global_step)
            return self.net(batch[0]).pow(2).mean()

        def validation_step(self, batch, batch_idx):
            if self.global_step == stop_in_validation_at:
                raise Stop
            self.log("score", self.net(batch[0]).pow(2).mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-4)

        def train_dataloader(self):
            return resumable(DataLoader(TensorDataset(torch.arange(32.0).reshape(-1, 1)), batch_size=2, shuffle=True))

        def val_dataloader(self):
            return DataLoader(TensorDataset(torch.ones(2, 1)), batch_size=2)

    pl.seed_everything(1, verbose=False)
    module = Module()
    made = trainer(pl, [*callbacks], folder, **settings)
    with contextlib.suppress(Stop):
        made.fit(module)
    return module, module.seen[0], made


@pytest.mark.parametrize("last", [None, True])
def test_a_monitored_run_goes_forward_between_two_validations(tmp_path, last):
    """``monitor`` of a validation and ``every_n_train_steps``: resumed before a validation, every second step is saved."""
    pl = package(PACKAGES[bool(last)])

    def start(folder, *stop):
        more = {"save_top_k": -1, "save_last": last, "every_n_train_steps": 2, "config": QUICK, "resume": "auto"}
        saving = SafeCheckpointCallback(folder, "{step}-{score:.6f}", "score", **more)
        stops = [stop_at(pl, step) for step in stop]
        return fit(pl, folder, saving, *stops, max_epochs=1, val_check_interval=6)

    whole, _, made = start(tmp_path / "whole")
    for stop in (7, 9, 11):
        start(tmp_path / "stopped", stop)
    again, began, resumed = start(tmp_path / "stopped")
    assert began == 10
    assert names(tmp_path / "stopped") == names(tmp_path / "whole")
    assert fingerprint(again) == fingerprint(whole)
    best = [one.checkpoint_callback.best_model_path.rpartition("/")[2] for one in (made, resumed)]
    assert best[0] == best[1]


def test_a_save_that_waits_for_a_validation_is_made_after_a_resume(tmp_path):
    """Lightning puts a save off until the metric is there. The run ends in that validation: the resumed one makes the save."""
    pl = package(PACKAGES[0])
    if not hasattr(pl.callbacks.ModelCheckpoint(), "_defer_save_until_validation"):
        pytest.skip("this release puts no save off")

    def start(folder, **more):
        saving = {"save_top_k": -1, "every_n_train_steps": 6, "config": QUICK}
        best = SafeCheckpointCallback(folder / "best", "{step}-{score:.6f}", "score", **saving)
        ends = {"save_on_exception": True, "every_n_epochs": 9, "config": QUICK, "resume": "auto"}
        fit(
            pl, folder, best, SafeCheckpointCallback(folder / "end", **ends), max_epochs=1, val_check_interval=6, **more
        )
        return names(folder / "best")

    whole = start(tmp_path / "whole")
    assert any(name.startswith("step=6-") for name in whole)
    assert start(tmp_path / "stopped", stop_in_validation_at=6) == []
    assert start(tmp_path / "stopped") == whole


@pytest.mark.parametrize("patience", [1, 50])
@pytest.mark.quick
def test_a_run_that_early_stopping_ended_says_that_it_goes_on(tmp_path, caplog, patience):
    """Started again it trains until EarlyStopping looks once more; one that was stopped otherwise has nothing to say."""
    pl = package(PACKAGES[0])
    for _ in range(2):
        stopping = pl.callbacks.EarlyStopping("score", 1e9, patience, mode="max")  # nothing is better by so much
        saving = SafeCheckpointCallback(tmp_path, "{step}", "score", config=QUICK, resume="auto", save_top_k=-1)
        stops = [stop_at(pl, 7)] if patience == 50 else []
        caplog.clear()
        fit(pl, tmp_path, saving, stopping, *stops, max_epochs=1, val_check_interval=2)
    assert ("EarlyStopping ended the run" in caplog.text) == (patience == 1)
