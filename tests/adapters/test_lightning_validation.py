"""The validation that follows a resume: whole, or none, and what is chosen by its metric."""

import contextlib
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning_runs import PACKAGES, QUICK, Stop, fingerprint, package, trainer
from torch.utils.data import DataLoader, TensorDataset

from safe_ckpt.lightning import SafeCheckpointCallback, resumable

CASES = {
    "several loaders": {"loaders": (2, 2)},
    "a part of each": {"loaders": (4,), "limit_val_batches": 0.5},
    "every two batches": {"loaders": (2,), "val_check_interval": 2},
    "half an epoch, max_steps": {"loaders": (2,), "val_check_interval": 0.5, "max_epochs": -1, "max_steps": 8},
    "across epochs": {"loaders": (2,), "val_check_interval": 3, "check_val_every_n_epoch": None},
    "every second epoch": {"loaders": (2,), "check_val_every_n_epoch": 2, "max_epochs": 3},
}

QUICK_OF_STOCK = ("several loaders",)


def numbers(count):
    return TensorDataset(torch.arange(2.0 * count).reshape(-1, 1))


def module_of(pl, loaders=(3,), *, at_validation=lambda _: None):
    class Module(pl.LightningModule):
        """Notes each batch with the learning rate, and each validation with its batches and its metric."""

        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(1, 1)
            self.seen, self.validated = [], []

        def training_step(self, batch, batch_idx):
            rate = self.optimizers().param_groups[0]["lr"]
            self.seen.append((self.current_epoch, batch_idx, batch[0].flatten().tolist(), rate))
            return self.net(batch[0]).pow(2).mean()

        def on_validation_start(self):
            self.validated = []

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            at_validation(self)
            self.validated.append(batch[0].flatten().tolist())
            self.log("score", batch[0].mean() + self.net(batch[0]).mean(), add_dataloader_idx=dataloader_idx > 0)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

        def train_dataloader(self):
            return resumable(DataLoader(numbers(4), batch_size=2, shuffle=True))

        def val_dataloader(self):
            return [DataLoader(numbers(count), batch_size=2) for count in loaders]

    return Module()


def note_validations(pl):
    class Note(pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            pl_module.seen.append((trainer.global_step, pl_module.validated, float(trainer.callback_metrics["score"])))

    return Note()


def save_everywhere(pl, folder):
    class SaveEverywhere(pl.Callback):
        """Saves where an exception, or a callback, would: before and after each batch, and all along a validation."""

        saved: list = []

        def save(self, trainer, pl_module, *args):
            path = folder / f"{len(self.saved)}.ckpt"
            trainer.save_checkpoint(path)
            self.saved.append((path, len(pl_module.seen)))

        on_train_batch_start = on_train_batch_end = save
        on_validation_start = on_validation_batch_end = on_validation_end = save

    return SaveEverywhere()


@pytest.mark.parametrize(
    ("case", "of_stock"),
    [
        pytest.param(case, of_stock, marks=[] if (case in QUICK_OF_STOCK or not of_stock) else pytest.mark.thorough)
        for case in CASES
        for of_stock in (False, True)
    ],
)
def test_a_validation_after_a_resume_is_whole_or_none(tmp_path, case, of_stock):
    """Whenever a checkpoint was saved, all that follows is as without the restart.

    Of stock's a validation may be missing, but none within a step of which it was saved.
    """
    pl = package("lightning.pytorch")
    more = {"max_epochs": 2, **CASES[case]}
    loaders = more.pop("loaders")
    saves = save_everywhere(pl, tmp_path)
    saves.saved, within = [], set()

    def fit(kind, module, seed, *callbacks, path=None):
        pl.seed_everything(seed, verbose=False)
        arguments = {} if kind is pl.callbacks.ModelCheckpoint else {"config": QUICK}
        saving = kind(dirpath=tmp_path / "own", save_top_k=0, **arguments)
        trainer(pl, [note_validations(pl), *callbacks, saving], tmp_path, **more).fit(module, ckpt_path=path)
        return module

    def at_validation(module):
        if module.trainer.callbacks[1] is saves:
            saves.save(module.trainer, module)
            within.add(saves.saved[-1][0])

    first = pl.callbacks.ModelCheckpoint if of_stock else SafeCheckpointCallback
    straight = fit(first, module_of(pl, loaders, at_validation=at_validation), 1, saves)
    assert any(len(event) == 3 for event in straight.seen)
    for path, already in saves.saved:
        module = fit(SafeCheckpointCallback, module_of(pl, loaders), 77, path=path)
        expected = straight.seen[already:]
        ended = module.trainer.max_steps in (event[0] for event in expected[:1] if len(event) == 3)
        if of_stock:  # it does not say what the generators were: the order of later epochs is another one
            of_run = [event for event in straight.seen if len(event) == 3]
            assert {str(event[1]) for event in module.seen if len(event) == 3} <= {str(event[1]) for event in of_run}
            left_out = [event[0] for event in expected if len(event) == 3]
            found = [event[0] for event in module.seen if len(event) == 3]
            assert found == left_out or (found == left_out[1:] and (ended or path not in within)), path
            continue
        assert module.seen == ([] if ended else expected), path
        assert fingerprint(module) == fingerprint(straight)


@pytest.mark.parametrize("loaders", [(), (0,)], ids=["no loader", "no rows"])
def test_a_validation_on_nothing_is_over(tmp_path, loaders):
    """What is saved after it has the generators of that moment, not of the one before the empty validation."""
    pl = package("lightning.pytorch")
    saves = save_everywhere(pl, tmp_path)
    saves.saved = []

    def fit(seed, *callbacks, path=None):
        pl.seed_everything(seed, verbose=False)
        module = module_of(pl, loaders)
        saving = SafeCheckpointCallback(dirpath=tmp_path / "own", save_top_k=0, config=QUICK)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer(pl, [*callbacks, saving], tmp_path, max_epochs=4).fit(module, ckpt_path=path)
        return module

    straight = fit(1, saves)
    assert len({str(event[2]) for event in straight.seen}) > 2
    for path, already in saves.saved[4::2]:
        module = fit(77, path=path)
        assert module.seen == straight.seen[already:], path
        assert fingerprint(module) == fingerprint(straight)


@pytest.mark.parametrize(("way", "name"), [("steps", PACKAGES[0]), ("time", PACKAGES[1]), ("exception", PACKAGES[0])])
def test_the_best_checkpoint_is_that_of_an_uninterrupted_run(tmp_path, way, name):
    """Saved at the last batch of an epoch, or at an exception within its validation, and ended there: nothing is misled."""
    pl = package(name)
    arguments = {
        "steps": {"every_n_train_steps": 4},
        "time": {"train_time_interval": timedelta(microseconds=1)},
        "exception": {"save_on_exception": True},
    }[way]

    def run(folder, *, stop=False, seed=1):
        def at_validation(module):
            if stop and module.trainer.global_step == 8 and len(module.validated) == 1:
                raise Stop

        pl.seed_everything(seed, verbose=False)
        module = module_of(pl, at_validation=at_validation)

        def configure_optimizers():
            optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
            follows = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": follows, "monitor": "score"}}

        module.configure_optimizers = configure_optimizers
        best = SafeCheckpointCallback(dirpath=folder, filename="{step}-{score:.6f}", monitor="score", config=QUICK)
        within = SafeCheckpointCallback(
            dirpath=folder, filename="within", enable_version_counter=False, config=QUICK, resume="auto", **arguments
        )
        stopping = pl.callbacks.EarlyStopping("score", patience=9)
        made = trainer(pl, [note_validations(pl), stopping, best, within], folder, max_epochs=4)
        with contextlib.suppress(Stop), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made.fit(module)
        found = (Path(best.best_model_path).name, float(best.best_model_score), stopping.state_dict(), made.optimizers)
        return [*map(str, found), fingerprint(module)], [event for event in module.seen if len(event) == 3]

    expected, scores = run(tmp_path / "straight")
    run(tmp_path / "resumed", stop=True)
    found, again = run(tmp_path / "resumed", seed=77)
    assert again == scores[-len(again) :]
    assert found == expected
    assert again[0][0] == 8


@pytest.mark.parametrize(("every", "validated"), [(2, 1), (3, 2)])
def test_loaders_are_loaded_again_in_the_epochs_of_an_uninterrupted_run(tmp_path, every, validated):
    """reload_dataloaders_every_n_epochs counts on over a resume from any epoch, for training and for validation."""
    pl = package("lightning.pytorch")
    saves = save_everywhere(pl, tmp_path)
    saves.saved = []

    def fit(*callbacks, path=None):
        pl.seed_everything(1, verbose=False)
        module, loads = module_of(pl), []

        def noting(kind, loader):
            def load():
                loads.append((kind, module.current_epoch))
                return loader()

            return load

        module.train_dataloader = noting("training", module.train_dataloader)
        module.val_dataloader = noting("validation", module.val_dataloader)
        saving = SafeCheckpointCallback(dirpath=tmp_path / "own", save_top_k=0, config=QUICK)
        more = {"max_epochs": 10, "limit_train_batches": 1, "check_val_every_n_epoch": validated}
        made = trainer(pl, [*callbacks, saving], tmp_path, reload_dataloaders_every_n_epochs=every, **more)
        made.fit(module, ckpt_path=path)
        return loads

    straight = fit(saves)
    for path, _ in saves.saved[::2]:
        counts = torch.load(path, weights_only=False)["loops"]["fit_loop"]["epoch_progress"]["current"]
        epoch = counts["ready"] - 1
        found = fit(path=path)
        at_first = [next(load for load in found if load[0] == kind) for kind in ("training", "validation")]
        later = [[load for load in loads if load[1] > epoch and load not in at_first] for loads in (found, straight)]
        assert later[0] == later[1], path


@pytest.mark.parametrize(("every", "validated"), [(2, 1), (3, 2)])
def test_loaders_are_those_of_the_epoch_in_which_they_were_loaded(tmp_path, every, validated):
    """reload_dataloaders_every_n_epochs: resumed in an epoch that loads none, the hooks are asked as of the one that did."""
    pl = package("lightning.pytorch")
    saves = save_everywhere(pl, tmp_path)
    saves.saved = []

    def fit(*callbacks, path=None):
        pl.seed_everything(1, verbose=False)
        module = module_of(pl)

        def load():
            return resumable(DataLoader(TensorDataset(torch.full((4, 1), float(module.current_epoch))), batch_size=2))

        module.train_dataloader = module.val_dataloader = load
        saving = SafeCheckpointCallback(dirpath=tmp_path / "own", save_top_k=0, config=QUICK)
        more = {"max_epochs": 5, "check_val_every_n_epoch": validated}
        made = trainer(
            pl, [note_validations(pl), *callbacks, saving], tmp_path, reload_dataloaders_every_n_epochs=every, **more
        )
        made.fit(module, ckpt_path=path)
        return module.seen

    straight = fit(saves)
    for path, already in saves.saved[2:-4:4]:
        assert fit(path=path) == straight[already:], path


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("reload", [*(pytest.param(one, marks=pytest.mark.thorough) for one in (0, 2)), 1])
def test_what_a_validation_logs_at_its_steps_goes_on_to_be_counted(tmp_path, reload):
    """The step that a logger is given behind a resume is that of the run that was not stopped, not 0 again.

    Where loaders are loaded again Lightning counts from 0 there: so it does after a resume, there alone.
    """
    pl = package("lightning.pytorch")

    class Told(pl.loggers.logger.DummyLogger):
        def __init__(self):
            super().__init__()
            self.steps = []

        def log_metrics(self, metrics, step=None):
            if "score_step" in metrics:
                self.steps.append((step, float(metrics["score_step"])))

    def fit(path=None):
        pl.seed_everything(1, verbose=False)
        module, told = module_of(pl, (6,)), Told()
        module.validation_step = lambda batch, batch_idx: module.log("score", module.net(batch[0]).mean(), on_step=True)
        to = tmp_path / ("first" if path is None else path.stem)
        saving = SafeCheckpointCallback(dirpath=to, save_top_k=-1, every_n_train_steps=1, config=QUICK)
        more = {"reload_dataloaders_every_n_epochs": reload, "val_check_interval": 0.5}
        made = trainer(pl, [saving], tmp_path, max_epochs=4, logger=told, log_every_n_steps=1, **more)
        made.fit(module, ckpt_path=path)
        return told.steps

    straight = fit()
    assert [step for step, _ in straight] == {0: [*range(48)], 1: [*range(12)] * 4, 2: [*range(24)] * 2}[reload]
    for path in sorted((tmp_path / "first").glob("*.ckpt")):
        assert (found := fit(path)) == straight[len(straight) - len(found) :], path
