"""What the corpus holds of Lightning: one file saved within an epoch, and a directory that two ranks sharded."""

from __future__ import annotations

import os

import torch
from lightning_runs import QUICK, package, trainer
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from corpus.filled import fill, same
from safe_ckpt.lightning import SafeCheckpointCallback, resumable

STEP = 2


def parts(sharded):
    """A module that notes its batches, and a callback that sets all numbers before a save and compares them after a resume."""
    pl = package("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Linear(16, 2))
            self.seen = []

        def configure_model(self):
            if sharded and not hasattr(self.net[0].weight, "placements"):  # called again for every stage
                for part in (self.net[0], self.net):
                    fully_shard(part, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, batch_idx):
            self.seen.append(batch[0][:, 0].int().tolist())
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

        def train_dataloader(self):
            data = TensorDataset(torch.arange(12.0 * (1 + sharded)).repeat(4, 1).T)
            return resumable(DataLoader(data, batch_size=4, shuffle=True))

    class Numbers(pl.Callback):
        looked = False

        def on_train_batch_end(self, trainer, module, *_):
            if trainer.global_step == STEP:
                fill(STEP, module.net, trainer.optimizers[0])

        def on_train_start(self, trainer, module):
            if trainer.global_step:
                assert trainer.global_step == STEP
                same(STEP, module.net, trainer.optimizers[0])
                self.looked = True

    return pl, Module(), Numbers()


def fit(folder, *, sharded=False, **settings):
    """Train from where the folder's newest checkpoint is. Returns the batches, and whether there was one."""
    pl, module, numbers = parts(sharded)
    pl.seed_everything(5, verbose=False)
    ours = SafeCheckpointCallback(
        dirpath=folder, config=QUICK, resume="auto", filename="{epoch}-{step}", every_n_train_steps=STEP
    )
    if sharded:
        from lightning.pytorch.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=True)
        settings |= {"strategy": strategy, "devices": 2}
    trainer(pl, [numbers, ours], folder, **settings).fit(module)
    return module.seen, numbers.looked


def save(folder):
    fit(folder, max_epochs=1, max_steps=STEP)


def resume(folder):
    seen, looked = fit(folder, max_epochs=1)
    assert looked
    return seen


def save_sharded(rank, folder):
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")
    fit(folder, sharded=True, max_epochs=1, max_steps=STEP)


def resume_sharded(rank, folder):
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")
    seen, looked = fit(folder, sharded=True, max_epochs=1)
    assert looked
    return seen
