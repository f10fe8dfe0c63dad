"""A Lightning run. Kill it at any moment and start it again: it continues, bit for bit.

python examples/lightning_digits.py runs/digits            # one process
DEVICES=2 python examples/lightning_digits.py runs/digits  # two DDP ranks on the CPU
"""

import hashlib
import os
import sys

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from safe_ckpt.lightning import SafeCheckpointCallback, resumable


class Digits(pl.LightningModule):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(width, 10)
        )

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(directory: str) -> None:
    pl.seed_everything(0, verbose=False)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train, val = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])
    checkpoints = SafeCheckpointCallback(
        dirpath=directory,
        monitor="val_acc",
        mode="max",
        save_top_k=2,
        save_last=True,
        resume="auto",  # fit() finds the newest valid checkpoint
    )
    devices = int(os.environ.get("DEVICES", "1"))
    trainer = pl.Trainer(
        max_epochs=int(os.environ.get("EPOCHS", "5")),
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits()
    # resumable() makes restarts exact in the middle of an epoch too.
    trainer.fit(model, resumable(DataLoader(train, batch_size=64, shuffle=True)), DataLoader(val, batch_size=256))
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]
    trainer.print(f"finished epoch {trainer.current_epoch}, best {checkpoints.best_model_path}, weights {weights}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/lightning_digits")
