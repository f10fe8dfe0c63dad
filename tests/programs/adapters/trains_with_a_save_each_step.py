"""Trains two ranks in FOLDER on from its newest checkpoint: also takes SEED WIDTH STRATEGY EPOCHS. Prints how it ends."""

import sys

from lightning_program import CONFIG, pl
from lightning_runs import fingerprint, module_class, trainer

from safe_ckpt.lightning import SafeCheckpointCallback, resumable

if __name__ == "__main__":
    folder, seed, width, strategy, epochs = sys.argv[1:]
    pl.seed_everything(int(seed), verbose=False)
    module = module_class(pl)(width=int(width), loader=resumable)
    callback = SafeCheckpointCallback(
        dirpath=folder,
        config=CONFIG,
        resume="auto",
        filename="{epoch}-{step}",
        every_n_train_steps=1,
        save_last=True,
    )
    made = trainer(pl, [callback], folder, strategy=strategy, devices=2, max_epochs=int(epochs))
    made.fit(module)
    print("RANK", made.global_rank, fingerprint(module), made.global_step, flush=True)
