"""Trains in FOLDER with all at the top of the program: prints that it ran once."""

import sys

from lightning_program import CONFIG, pl
from lightning_runs import module_class, trainer

from safe_ckpt.lightning import SafeCheckpointCallback

folder = sys.argv[1]
callback = SafeCheckpointCallback(dirpath=folder, config=CONFIG)
trainer(pl, [callback], folder).fit(module_class(pl)())
print("done once")
