"""Trains two ranks an epoch in FOLDER, with KIND "file" or "sharded" of checkpoints, resumes, and says what that verified."""

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_program import CONFIG, pl
from lightning_runs import module_class, trainer
from torch.distributed.fsdp import fully_shard

import safe_ckpt.core.formats.verify as verifying
from safe_ckpt.lightning import SafeCheckpointCallback

folder, kind = Path(sys.argv[1]), sys.argv[2]
read, stock = [], verifying.digest_of


def digest_of(file, *args, **more):
    read.append(str(file.relative_to(folder)))
    return stock(file, *args, **more)


class Sharded(module_class(pl)):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 64)

    def configure_model(self):
        if not hasattr(self.net.weight, "placements"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def fit(epochs):
    module, strategy = module_class(pl)(), "ddp"
    if kind == "sharded":
        module, strategy = Sharded(), ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    ours = SafeCheckpointCallback(dirpath=folder, config=CONFIG, resume="auto", filename="{epoch}")
    made = trainer(pl, [ours], folder, strategy=strategy, devices=2, max_epochs=epochs)
    made.fit(module)
    return made


if __name__ == "__main__":
    fit(1)
    verifying.digest_of = digest_of
    made = fit(2)
    os.write(1, "".join(f"READ {name} {made.global_step}\n" for name in read).encode())
