"""Trains without end in FOLDER and keeps all that it saves; says when its fourth epoch begins."""

import sys
from pathlib import Path

from lightning_program import pl
from lightning_runs import fit, module_class


class Say(pl.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 3:
            print("training", flush=True)


module = module_class(pl)(width=3000)
fit(Path(sys.argv[1]), save_top_k=-1, callbacks=[Say()], module=module, settings={"max_epochs": 100_000})
