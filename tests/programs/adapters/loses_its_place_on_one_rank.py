"""Trains two ranks in FOLDER with a loader that on rank 1 raises where it is asked for its place: prints what they raise."""

import sys

import torch
from lightning_program import CONFIG, pl
from lightning_runs import module_class, note_start, trainer

from safe_ckpt.lightning import SafeCheckpointCallback


class Loader(torch.utils.data.DataLoader):
    def state_dict(self):
        if made.global_rank == 1:
            raise KeyError("mine")
        return {}

    def load_state_dict(self, state):
        pass


class Module(module_class(pl)):
    def train_dataloader(self):
        return Loader(super().train_dataloader().dataset, batch_size=4)


if __name__ == "__main__":
    folder = sys.argv[1]
    callback = SafeCheckpointCallback(dirpath=folder, config=CONFIG)
    note_start(folder)
    made = trainer(pl, [callback], folder, strategy="ddp", devices=2)
    try:
        made.fit(Module())
    except Exception as error:
        print("RANK", made.global_rank, type(error).__name__, "mine" in str(error), flush=True)
