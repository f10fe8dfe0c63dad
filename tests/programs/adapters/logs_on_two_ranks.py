"""Trains two ranks in FOLDER in one go, then from places in mid-epoch, and compares. With ALONE one rank goes on from there."""

import sys
from pathlib import Path

import torch
from lightning_program import CONFIG, pl
from lightning_runs import trainer
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, SumMetric

from safe_ckpt.lightning import SafeCheckpointCallback, resumable


class Module(pl.LightningModule):
    """Logs synchronized, unsynchronized and as torchmetrics; its scheduler follows a mean over the ranks."""

    def __init__(self):
        super().__init__()
        self.net, self.score, self.own = torch.nn.Linear(1, 1), MeanMetric(), SumMetric()
        self.ends = []

    def training_step(self, batch, _):
        loss = self.net(batch[0]).pow(2).mean() + self.global_rank
        self.log("alone", loss, on_step=True, on_epoch=True)
        self.log("all", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.score(loss.detach())
        self.log("score", self.score, on_step=False, on_epoch=True)
        self.own.update(batch[0].sum())
        return loss

    def on_train_epoch_end(self):
        self.log("own", self.own.compute())
        self.own.reset()
        known = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.ends.append((known, self.optimizers().param_groups[0]["lr"]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        follows = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
        return [optimizer], [{"scheduler": follows, "monitor": "all"}]

    def train_dataloader(self):
        return resumable(DataLoader(TensorDataset(torch.arange(16.0).reshape(-1, 1)), batch_size=2, shuffle=True))


def fit(folder, path=None, devices=2):
    pl.seed_everything(1, verbose=False)
    torch.manual_seed(1 if path is None else 77)
    module = Module()
    saving = SafeCheckpointCallback(folder, filename="{step}", config=CONFIG, every_n_train_steps=1, save_top_k=-1)
    made = trainer(pl, [saving], folder, strategy="ddp", devices=devices, max_epochs=3)
    made.fit(module, ckpt_path=path)
    return module


if __name__ == "__main__":
    runs = Path(sys.argv[1])
    if sys.argv[2:]:
        print("RANK", len(fit(runs / "alone", runs / "straight/step=4.ckpt", devices=1).ends))
        sys.exit()
    straight = fit(runs / "straight")
    for step in (2, 4, 7):  # within an epoch, and after the last batch of one
        found = fit(runs / str(step), runs / "straight" / f"step={step}.ckpt")
        if found.ends != straight.ends[(step - 1) // 4 :]:
            sys.exit(f"rank {found.global_rank}, from step {step}: {found.ends}, not {straight.ends}")
