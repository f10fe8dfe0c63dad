"""Trains two ranks in FOLDER, with a loss that differs between them in the files' names: each prints the names that it has."""

import os
import sys

from lightning_program import CONFIG, pl
from lightning_runs import module_class, trainer

from safe_ckpt.lightning import SafeCheckpointCallback


class Module(module_class(pl)):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0 + self.global_rank - 0.1 * self.current_epoch, sync_dist=False)


if __name__ == "__main__":
    folder = sys.argv[1]
    callback = SafeCheckpointCallback(
        dirpath=folder, config=CONFIG, monitor="val_loss", save_top_k=2, filename="{epoch}-{val_loss:.2f}"
    )
    made = trainer(pl, [callback], folder, strategy="ddp", devices=2)
    made.fit(Module())
    print("RANK", made.global_rank, sorted(map(os.path.basename, callback.best_k_models)))
