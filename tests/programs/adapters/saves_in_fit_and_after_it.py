"""Trains two ranks in FOLDER and saves itself, in fit, after it, and to where nothing can lie: each writes what it found."""

import sys
from pathlib import Path

from lightning_program import CONFIG, pl
from lightning_runs import module_class, note_start, trainer

from safe_ckpt.lightning import SafeCheckpointCallback

folder, said = Path(sys.argv[1]), []


class Own(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(folder / "own.ckpt")
        said.append((folder / "own.ckpt").exists())


if __name__ == "__main__":
    callback = SafeCheckpointCallback(dirpath=folder / "exp", config=CONFIG)
    note_start(folder)
    made = trainer(pl, [Own(), callback], folder, strategy="ddp", devices=2, max_epochs=1)
    made.fit(module_class(pl)())
    made.save_checkpoint(folder / "final.ckpt")
    said.append((folder / "final.ckpt").exists())
    (folder / "file").touch()
    try:
        made.save_checkpoint(folder / "file/x.ckpt")
    except OSError as error:
        said.append(type(error).__name__)
    (folder / f"rank{made.global_rank}").write_text(str(said))
