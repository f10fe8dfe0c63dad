"""A small LightningModule in which everything random takes part, for either Lightning package."""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import random
import time
from pathlib import Path

import numpy
import torch
from torch.utils.data import DataLoader, TensorDataset

from kit import limits
from safe_ckpt import CheckpointConfig

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def package(name):
    logging.getLogger(name).setLevel(logging.ERROR)
    return importlib.import_module(name)


def module_class(pl):
    class Module(pl.LightningModule):
        """Dropout, numpy and Python randomness in the step, randomness in the hooks around epochs."""

        def __init__(self, width=4, loader=None):
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2)
            )
            self.drop = torch.nn.Dropout(0.5)
            self.seen = []
            self._loader = loader

        def training_step(self, batch, batch_idx):
            x = batch[0] * (1 + numpy.random.rand() + random.random())
            self.seen.append(batch[0][:, 0].int().tolist())
            loss = self.drop(self.net(x)).pow(2).mean()
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.net(batch[0]).pow(2).mean() + torch.rand(1))

        def on_train_epoch_start(self):
            torch.rand(1)

        def on_train_epoch_end(self):
            torch.rand(1)

        def on_validation_start(self):
            torch.rand(1)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]

        def train_dataloader(self):
            data = TensorDataset(torch.arange(12.0).repeat(4, 1).T)
            loader = DataLoader(data, batch_size=4, shuffle=True)
            return self._loader(loader) if self._loader else loader

        def val_dataloader(self):
            return DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=4)

    return Module


def trainer(pl, callbacks, folder, **more):
    settings = {
        "max_epochs": 3,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
        "callbacks": callbacks,
        **more,
    }
    return pl.Trainer(**settings)


def note_start(folder):
    """All is imported: what came before depends on the machine."""
    Path(folder).mkdir(exist_ok=True)
    (Path(folder) / f"started{os.environ.get('LOCAL_RANK', '0')}").write_text(str(time.monotonic()))


def seconds_since_start(folder):
    return time.monotonic() - max(float(file.read_text()) for file in Path(folder).glob("started*"))


def fingerprint(module):
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


class Stop(Exception):
    """What a test raises to end a run."""


def stop_at(pl, step):
    class StopAt(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == step:
                raise Stop

    return StopAt()


QUICK = CheckpointConfig(timeouts=limits.QUICK)


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".safe_ckpt")


def fit(folder, *, callbacks=(), name="lightning.pytorch", settings=None, module=None, seed=1, path=None, **arguments):
    from safe_ckpt.lightning import SafeCheckpointCallback

    pl = package(name)
    pl.seed_everything(seed, verbose=False)
    arguments.setdefault("config", QUICK)
    callback = SafeCheckpointCallback(dirpath=folder, **arguments)
    made = trainer(pl, [callback, *callbacks], folder, **(settings or {}))
    module = module or module_class(pl)()
    made.fit(module, ckpt_path=path)
    return made, callback, module
