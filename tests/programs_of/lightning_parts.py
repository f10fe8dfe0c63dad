"""What the programs of Lightning are made of: a module, loaders, a witness of hooks, and what stops a start."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torchmetrics
from lightning import pytorch as pl
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from programs_of.start import Here
from safe_ckpt.lightning import resumable
from safe_ckpt.tools.audit import recorder


class Planned(Exception):
    """What a program was told to raise."""


class Stop:
    """Breaks off a start by an exception or a signal, where SIGKILL is ``here``'s.

    Attributes:
        what: see ``lightning_._stops``; empty for none.
        done: whether it has.
    """

    def __init__(self, here: Here) -> None:
        self._here, told = here, here.more.get("stop", {})
        self.what, self._number, self._met, self.done = told.get("what", ""), told.get("number", 0), 0, False

    def __deepcopy__(self, _: Any) -> Stop:
        return self  # of a module that is averaged

    def meets(self, *kinds: str) -> None:
        """One more moment at which these may happen."""
        if self.what not in kinds:
            return
        self._met += 1
        if self._met != self._number:
            return
        self.done = True
        self._here.note("met", self.what)
        if self.what == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.what == "interrupted":
            raise KeyboardInterrupt
        else:
            raise Planned(self.what)


class Log(DummyLogger):
    """Takes what is logged; the audit notes it."""


class Module(pl.LightningModule):
    """Everything random takes part."""

    def __init__(self, one: SimpleNamespace, stop: Stop) -> None:
        super().__init__()
        self.one, self.stop = one, stop
        norm = [torch.nn.BatchNorm1d(4)] if one.norm else []
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 4), *norm, torch.nn.Tanh(), torch.nn.Dropout(0.3))
        self.head = torch.nn.Linear(4, 1)
        self.automatic_optimization = not one.manual
        self.measured = torchmetrics.MeanMetric() if one.metric else None

    def _loss(self, batch: Any) -> Any:
        x = torch.cat([one for one in batch if one is not None]) if isinstance(batch, list | tuple) else batch
        if self.one.noise and self.training:
            x = x * (1 + 0.1 * numpy.random.rand() + 0.1 * random.random()) + 0.01 * torch.randn_like(x)
        return self.head(self.net(x)).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        self.stop.meets("raises", "interrupted", "SIGTERM")
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        if self.measured is not None:
            self.measured.update(loss.detach(), weight=batch_idx + 1)
            self.log("measured", self.measured, on_step=False, on_epoch=True)
        if self.automatic_optimization:
            return loss
        return self._by_hand(loss)

    def _by_hand(self, loss: Any) -> None:
        optimizers = self.optimizers()
        for one in optimizers if isinstance(optimizers, list) else [optimizers]:
            one.zero_grad()
        self.manual_backward(loss)
        for one in optimizers if isinstance(optimizers, list) else [optimizers]:
            one.step()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Leaves the second epoch early."""
        self._draw()
        return -1 if self.one.early and batch_idx == self.one.early and self.current_epoch == 1 else None

    def _draw(self) -> None:
        if self.one.hooks_draw:
            torch.rand(1), numpy.random.rand(), random.random()

    def on_train_epoch_start(self) -> None:
        """Draws, as other hooks do."""
        self._draw()

    def on_train_epoch_end(self) -> None:
        """Draws."""
        self._draw()

    def on_validation_epoch_end(self) -> None:
        """Draws."""
        self._draw()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        """Draws."""
        self._draw()

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self._loss(batch))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.stop.meets("raises in validation")
        self.log("val_loss", self._loss(batch) + 0.01 * torch.rand(()))

    def configure_optimizers(self) -> Any:
        kind = getattr(torch.optim, self.one.optimizer)
        if self.one.manual == 2:
            return [kind(self.net.parameters(), lr=0.05), kind(self.head.parameters(), lr=0.02)]
        optimizer = kind(self.parameters(), lr=0.05)
        if not self.one.schedule or self.one.manual:
            return optimizer
        if self.one.schedule.startswith("plateau"):
            made = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7, threshold=0.5)
        else:
            made = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": made,
                "interval": "step" if self.one.schedule == "step of steps" else "epoch",
                "frequency": self.one.every_schedule,
                "monitor": "train_loss" if self.one.schedule == "plateau of train" else self.one.loss,
                "strict": False,
            },
        }


class Data(pl.LightningDataModule):
    """Is asked for its loaders again and again."""

    def __init__(self, one: SimpleNamespace, stock: bool) -> None:
        super().__init__()
        self._given = one, stock

    def train_dataloader(self) -> Any:
        """New ones."""
        return loaders(*self._given)[0]

    def val_dataloader(self) -> Any:
        """New ones."""
        return loaders(*self._given)[1] or []


def loaders(one: SimpleNamespace, stock: bool) -> tuple[Any, Any]:
    """For ``fit``. Those of ``stock`` know their place, too: Lightning asks for no more."""
    data = torch.arange(3.0 * one.rows).reshape(-1, 3) / 20
    more: dict[str, Any] = {"shuffle": one.shuffle, "num_workers": one.workers}

    def made(rows: Any) -> Any:
        return StatefulDataLoader(rows, 3, **more) if stock else resumable(DataLoader(rows, 3, **more))

    train = made(data)
    if one.loader != "one":
        train = CombinedLoader([train, made(data[:9] + 1)], one.loader)
    parts = {"one": [data[:5]], "two": [data[:5], data[2:4]], "empty": [data[:0]], "none": []}[one.validation]
    found = [DataLoader(part, 2) for part in parts]
    return train, found[0] if len(found) == 1 else found or None


def callbacks(one: SimpleNamespace) -> list[Any]:
    """Beside ours."""
    name = "train_loss" if one.validation in ("empty", "none") else one.loss
    make: dict[str, Any] = {
        "": list,
        "counts": lambda: [Counts()],
        "stops early": lambda: [pl.callbacks.EarlyStopping(name, patience=1, strict=False)],
        "schedules accumulation": lambda: [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})],
        "averages": lambda: [pl.callbacks.StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=2)],
    }
    return make[one.callback]()  # type: ignore[no-any-return]


class Counts(pl.Callback):
    """Has a state, and draws from a generator with it."""

    seen = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Tells it as a metric."""
        self.seen += 1
        pl_module.log("seen", float(self.seen))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Draws."""
        torch.rand(1)

    def state_dict(self) -> dict[str, int]:
        """As Lightning says."""
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """As Lightning says."""
        self.seen = state["seen"]


class Witness(pl.Callback):
    """Tells of every hook, in their order; a start may be killed at each."""

    def __init__(self, here: Here, stop: Stop) -> None:
        self._here, self._stop = here, stop

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._here.note("begun", trainer.global_step)
        self.sees("on_train_start", trainer, "")

    def sees(self, hook: str, trainer: Any, more: str) -> None:
        if self._stop.done:  # a run that goes on has none of what follows
            return
        text = f"{hook} {more} epoch {trainer.current_epoch} metrics {numbers(trainer.callback_metrics)}"
        self._here.event(trainer.global_step, text)
        self._here.meets("hook")
        if hook == "on_train_batch_start":
            self._here.meets("batch")


def _hook(name: str) -> Any:
    def told(self: Witness, trainer: Any, pl_module: Any, *args: Any, **more: Any) -> None:
        numbers_of = [one for one in (*args, *more.values()) if isinstance(one, int)]
        self.sees(name, trainer, str(numbers_of))

    return told


for _name in (
    "on_fit_start", "on_fit_end", "on_train_end", "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start",
    "on_train_batch_end", "on_validation_start", "on_validation_end", "on_validation_epoch_start",
    "on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end", "on_before_zero_grad",
    "on_before_optimizer_step", "on_before_backward", "on_after_backward", "on_sanity_check_start", "on_sanity_check_end",
):  # fmt: skip
    setattr(Witness, _name, _hook(_name))


def numbers(metrics: Any) -> dict[str, float]:
    """As JSON has them."""
    return {name: float(value) for name, value in sorted(metrics.items())}


def digest(state: Any) -> str:
    """Of all tensors and numbers within."""
    return ",".join(
        f"{name}={recorder.digest(value, 1 << 20) if isinstance(value, torch.Tensor) else value}"
        for name, value in _flat(state, "")
    )


def _flat(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _flat(one, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _flat(one, f"{name}.{number}")
    else:
        yield name, value


def digest_of_file(file: Path) -> str:
    """Of what is in it, as far as that is the user's."""
    found = torch.load(file, weights_only=False)
    return digest(
        {name: found.get(name) for name in ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers")}
    )
