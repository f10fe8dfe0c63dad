"""Resuming a run that ended at the end of an epoch or in the middle of one, whatever ended it."""

import contextlib
import functools
import itertools
import random
import signal
import warnings
from pathlib import Path

import numpy
import pytest
import torch
from lightning_runs import Stop, fingerprint, module_class, package, stop_at, trainer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from safe_ckpt import CheckpointConfig
from safe_ckpt.lightning import SafeCheckpointCallback, resumable

NAME = "lightning.pytorch"
EPOCHS, BATCHES, LIMIT = 3, 6, 4
CAUSES = ("max_steps", "should_stop", "max_time", "early_stopping", "limit_train_batches", "exception", "signal")
PLACES = ("end", "middle")
ORDERS = ("sequential", "shuffle", "distributed")
WAYS = ("auto", "ckpt_path", "auto of stock", "ckpt_path of stock", "stock of ours")
ALL = list(itertools.product(CAUSES, PLACES, ORDERS, WAYS))
# Every cause at both places; every order and every way beside each other.
SAMPLE = {(*pair, ORDERS[n % 3], WAYS[n % 5]) for n, pair in enumerate(itertools.product(CAUSES, PLACES))}


def loader(order):
    data = TensorDataset(torch.arange(2.0 * BATCHES).reshape(-1, 1))
    if order == "distributed":
        return resumable(DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0)))
    return resumable(DataLoader(data, batch_size=2, shuffle=order == "shuffle"))


def module_of(order, *, random_hooks):
    pl = package(NAME)

    class Module(pl.LightningModule):
        """Notes what it is trained on. With ``random_hooks`` whatever surrounds the training is random, too."""

        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(1, 1)
            self.seen = []

        def training_step(self, batch, batch_idx):
            self.seen.append((self.current_epoch, batch_idx, self.global_step, batch[0].flatten().int().tolist()))
            self.log("done", float(self.global_step + 1))
            noise = numpy.random.rand() + random.random() + torch.rand(()) if random_hooks else 0
            return self.net(batch[0] + noise).pow(2).mean()

        def validation_step(self, batch, batch_idx):
            torch.rand(1)

        def on_train_epoch_end(self):
            if random_hooks:
                torch.rand(1)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]

        def train_dataloader(self):
            return loader(order)

        def val_dataloader(self):
            return DataLoader(TensorDataset(torch.ones(2, 1)))

    return Module()


def ender(cause, step, *, save_to=None):
    """What ends a run after ``step`` steps: settings of the Trainer, and callbacks.

    With ``save_to`` the run saves there and ends where ours would save at a signal.
    """
    pl = package(NAME)

    class End(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            trainer.should_stop |= trainer.global_step == step

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == step - 1 and cause == "max_time":
                next(c for c in trainer.callbacks if isinstance(c, pl.callbacks.Timer))._duration = 0.0
            elif trainer.global_step == step - 1 and cause == "signal":
                signal.raise_signal(signal.SIGTERM)

    class EarlyStopping(pl.callbacks.EarlyStopping):
        def on_train_batch_end(self, trainer, *args):
            self._run_early_stopping_check(trainer)

        def on_train_epoch_end(self, *args):
            pass

    if cause == "max_steps":
        return {"max_steps": step, "max_epochs": -1}, []
    if cause == "max_time":
        End.on_train_batch_end = pl.Callback.on_train_batch_end
        return {"max_time": {"hours": 1}}, [End()]
    if cause == "early_stopping":
        stopping = EarlyStopping("done", mode="max", stopping_threshold=step - 0.5, check_on_train_epoch_end=False)
        return {}, [stopping]
    if cause == "exception":
        return {}, [stop_at(pl, step)]
    if cause == "signal" and save_to is not None:
        return {}, [save_and_stop(pl, step, save_to)]
    if cause == "signal":
        End.on_train_batch_end = pl.Callback.on_train_batch_end
    return {}, [End()]


def save_and_stop(pl, step, path):
    class SaveAndStop(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == step:
                trainer.save_checkpoint(path)
                raise Stop

    return SaveAndStop()


def fit(folder, kind, order, *, settings, callbacks=(), seed=1, path=None, random_hooks=False, **arguments):
    pl = package(NAME)
    pl.seed_everything(seed, verbose=False)
    module = module_of(order, random_hooks=random_hooks)
    if kind is SafeCheckpointCallback:
        arguments["config"] = CheckpointConfig(save_on_signals=("SIGTERM",))
    saving = kind(dirpath=folder, filename="{step}", save_on_exception=True, **arguments)
    more = {"max_epochs": EPOCHS, "limit_val_batches": int(random_hooks), "use_distributed_sampler": False, **settings}
    made = trainer(pl, [saving, *callbacks], folder, **more)
    ends = (Stop, pl.utilities.exceptions.SIGTERMException)
    with contextlib.suppress(*ends), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(module, ckpt_path=path)
    return module, made


@functools.cache
def straight(order, limited, random_hooks, tmp_path):
    """The run that nothing ends: what it saw, and its weights."""
    settings = {"limit_train_batches": LIMIT} if limited else {}
    stock = package(NAME).callbacks.ModelCheckpoint
    module, made = fit(tmp_path, stock, order, settings=settings, random_hooks=random_hooks)
    return module.seen, fingerprint(module), made.current_epoch


@pytest.fixture(scope="module")
def straight_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("straight")


def newest(folder):
    stopped = Path(folder) / "stopped.ckpt"
    return stopped if stopped.exists() else max(Path(folder).glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


def go(folder, cause, place, order, first, second, *, path, random_hooks):
    """End a run, and go on with it. Returns what both parts saw, the module and the Trainer."""
    limited = {"limit_train_batches": LIMIT} if cause == "limit_train_batches" else {}
    batches = LIMIT if limited else BATCHES
    # An exception comes while the last batch is in hand, which is the middle of an epoch as well.
    step = batches if place == "end" else batches - (1 if cause == "exception" else 2)
    alike = path and second is not SafeCheckpointCallback and first is second
    settings, callbacks = ender(cause, step, save_to=folder / "stopped.ckpt" if alike else None)
    before, _ = fit(
        folder, first, order, settings={**limited, **settings}, callbacks=callbacks, random_hooks=random_hooks
    )
    settings = {"max_steps": EPOCHS * batches, "max_epochs": -1} if cause == "max_steps" else {}
    arguments = {} if path else {"resume": "auto"}
    module, made = fit(
        folder, second, order, settings={**limited, **settings}, seed=77, random_hooks=random_hooks,
        path=newest(folder) if path else None, **arguments,
    )  # fmt: skip
    return before.seen, module, made


@pytest.mark.parametrize(
    ("cause", "place", "order", "way"),
    [pytest.param(*case, marks=[] if case in SAMPLE else pytest.mark.thorough) for case in ALL],
)
def test_a_run_goes_on_as_if_it_had_not_ended(tmp_path, straight_folder, cause, place, order, way):
    """Epoch, batch, step, samples and weights are those of a run that nothing ended; stock goes on from ours as from its own.

    Where nothing of stock takes part, hooks, validation and steps are random, also the validation that a stop adds.
    """
    stock = package(NAME).callbacks.ModelCheckpoint
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        if way == "stock of ours":
            runs = [
                go(tmp_path / kind.__name__, cause, place, order, kind, stock, path=True, random_hooks=False)
                for kind in (SafeCheckpointCallback, stock)
            ]
            (seen, ours, _), (_, theirs, _) = runs
            assert ours.seen == theirs.seen
            assert fingerprint(ours) == fingerprint(theirs)
            return
        first = stock if way.endswith("of stock") else SafeCheckpointCallback
        seen, module, made = go(
            tmp_path, cause, place, order, first, SafeCheckpointCallback,
            path=way.startswith("ckpt_path"), random_hooks=first is not stock,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGTERM, before)
    expected, weights, epoch = straight(order, cause == "limit_train_batches", first is not stock, straight_folder)
    assert seen + module.seen == expected
    assert made.current_epoch == epoch
    assert fingerprint(module) == weights


@pytest.mark.parametrize("every", [2, 3, pytest.param("validation", marks=pytest.mark.quick)])
def test_reduce_lr_on_plateau_steps_at_the_end_of_a_resumed_epoch(tmp_path, every):
    """ReduceLROnPlateau steps once in an epoch that was resumed in its middle, after its last batch, or at its validation."""
    when = (
        {"every_n_epochs": 1, "save_on_train_epoch_end": False}
        if every == "validation"
        else {"every_n_train_steps": every}
    )
    pl = package(NAME)

    class Module(module_class(pl)):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, threshold=1e9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    def go(folder, *callbacks):
        pl.seed_everything(1, verbose=False)
        module = Module(loader=resumable)
        saving = SafeCheckpointCallback(dirpath=folder, save_top_k=-1, resume="auto", **when)
        made = trainer(pl, [saving, *callbacks], folder)
        with contextlib.suppress(Stop):
            made.fit(module)
        return fingerprint(module), made.optimizers[0].param_groups[0]["lr"]

    reference = go(tmp_path / "straight")
    go(tmp_path / "broken", stop_at(pl, 5))
    assert go(tmp_path / "broken") == reference
