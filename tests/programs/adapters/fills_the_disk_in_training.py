"""Trains two ranks in FOLDER and fills its disk after a save: each rank writes its error to OUT."""

import os
import sys
from pathlib import Path

from lightning_program import CONFIG, pl
from lightning_runs import module_class, trainer

from safe_ckpt.lightning import SafeCheckpointCallback

folder, out = map(Path, sys.argv[1:])


class Fill(pl.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1 and trainer.is_global_zero:
            callback._saver.land()
            (folder / "filler").write_bytes(bytes(5_000_000))


if __name__ == "__main__":
    callback = SafeCheckpointCallback(dirpath=folder, config=CONFIG)
    made = trainer(pl, [Fill(), callback], folder, strategy="ddp", devices=2, max_epochs=4)
    try:
        made.fit(module_class(pl)(width=8000))
    except Exception as error:
        best = os.path.basename(callback.best_model_path)
        (out / f"rank{made.global_rank}").write_text(f"{type(error).__name__} {error} | {best}")
