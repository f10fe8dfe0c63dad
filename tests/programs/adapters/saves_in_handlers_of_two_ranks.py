"""Trains two ranks in FOLDER; both get SIGUSR1 while they wait in different places, and save in its handler."""

import os
import signal
import sys
import time
from pathlib import Path

from lightning_program import CONFIG, pl
from lightning_runs import module_class, note_start, trainer

from safe_ckpt.lightning import SafeCheckpointCallback

folder = Path(sys.argv[1])


class Uneven(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 3 and trainer.global_rank == 0:
            time.sleep(0.5)  # rank 1 waits in the gradients' all-reduce meanwhile
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(int((folder / "pid1").read_text()), signal.SIGUSR1)

    def on_fit_start(self, trainer, pl_module):
        if trainer.global_rank == 1:
            (folder / "pid1").write_text(str(os.getpid()))
        trainer.strategy.barrier()


if __name__ == "__main__":
    callback = SafeCheckpointCallback(dirpath=folder / "exp", config=CONFIG)
    note_start(folder)
    made = trainer(pl, [Uneven(), callback], folder, strategy="ddp", devices=2)
    signal.signal(signal.SIGUSR1, lambda *_: made.save_checkpoint(folder / "hpc_ckpt_1.ckpt"))
    made.fit(module_class(pl)())
    print("RANK", made.global_rank, made.global_step)
