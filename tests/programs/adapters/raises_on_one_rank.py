"""Trains two ranks in FOLDER, of which rank 1 raises; an exception asks for a save."""

import sys
from pathlib import Path

from lightning_program import CONFIG, pl
from lightning_runs import module_class, note_start, trainer

from safe_ckpt.lightning import SafeCheckpointCallback


class Boom(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 5 and trainer.global_rank == 1:
            raise KeyError("mine")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    callback = SafeCheckpointCallback(dirpath=folder, config=CONFIG, save_on_exception=True, save_top_k=-1)
    note_start(folder)
    other = pl.callbacks.OnExceptionCheckpoint(folder / "other")
    made = trainer(pl, [Boom(), other, callback], folder, strategy="ddp", devices=2, max_epochs=8)
    made.fit(module_class(pl)())
