"""Saves after three steps with Lightning into FOLDER/sub, says so and lives on."""

import os
import sys
import time

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from safe_ckpt.lightning import SafeCheckpointCallback


class Waits(Callback):
    def on_train_batch_start(self, trainer, module, batch, number):
        if number == 3:
            while not os.path.exists(sys.argv[1] + "/sub/step=3.ckpt"):  # which is written in the background
                time.sleep(0.05)
            print("saved", flush=True)
            sys.stdin.read()


folder = sys.argv[1]
keeper = SafeCheckpointCallback(folder, filename="sub/{step}", every_n_train_steps=1, save_top_k=-1)
Trainer(
    max_steps=5,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    limit_val_batches=0,
    callbacks=[keeper, Waits()],
).fit(BoringModel())
