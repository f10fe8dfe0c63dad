"""Trains in FOLDER with a strategy that spawns two ranks: prints what the main process has then."""

import os
import sys

from lightning_program import CONFIG, pl
from lightning_runs import fingerprint, module_class, trainer

from safe_ckpt.lightning import SafeCheckpointCallback


class Module(module_class(pl)):
    """By this name the ranks find it."""


if __name__ == "__main__":
    folder = sys.argv[1]
    pl.seed_everything(1, verbose=False)
    module = Module()
    before = fingerprint(module)
    callback = SafeCheckpointCallback(dirpath=folder, config=CONFIG, monitor="val_loss", save_last=True)
    made = trainer(pl, [callback], folder, strategy="ddp_spawn", devices=2)
    made.fit(module)
    print("RANK 0", fingerprint(module), os.path.exists(callback.best_model_path), before != fingerprint(module))
