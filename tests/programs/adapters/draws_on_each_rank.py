"""Trains two ranks in FOLDER to EPOCHS, with generators that differ: in the fourth epoch each writes to OUT what it draws."""

import sys
from pathlib import Path

import torch
from lightning_program import CONFIG, pl
from lightning_runs import module_class, trainer

from safe_ckpt.lightning import SafeCheckpointCallback

folder, out, epochs = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])


class Draw(pl.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            torch.manual_seed(trainer.global_rank)

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 3:
            (out / f"rank{trainer.global_rank}").write_text(str(torch.rand(1).item()))


if __name__ == "__main__":
    pl.seed_everything(1, verbose=False)
    callback = SafeCheckpointCallback(dirpath=folder, config=CONFIG, resume="auto", save_last=True)
    made = trainer(pl, [Draw(), callback], folder, strategy="ddp", devices=2, max_epochs=epochs)
    made.fit(module_class(pl)())
