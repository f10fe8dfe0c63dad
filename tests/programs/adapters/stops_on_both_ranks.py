"""Trains two ranks in FOLDER, where SIGTERM saves and stops; with HOW "kick" rank 1 sends it to itself. Prints how it ends."""

import os
import signal
import sys
import time
from dataclasses import replace

from lightning_program import CONFIG, pl
from lightning_runs import fingerprint, module_class, trainer

from safe_ckpt.lightning import SafeCheckpointCallback, resumable

folder, how = sys.argv[1:]


class Kick(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if how == "kick":
            if trainer.global_step == 4 and trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.15)  # the run is not over before both have agreed on a step


if __name__ == "__main__":
    pl.seed_everything(1, verbose=False)
    module = module_class(pl)(width=100, loader=resumable)
    config = replace(CONFIG, save_on_signals=("SIGTERM",))
    callback = SafeCheckpointCallback(
        dirpath=folder, config=config, resume="auto", filename="{epoch}-{step}", save_last=True
    )
    made = trainer(pl, [callback, Kick()], folder, strategy="ddp", devices=2, max_epochs=20)
    made.fit(module)
    print("RANK", made.global_rank, fingerprint(module), made.global_step, flush=True)
