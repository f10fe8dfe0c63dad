"""Trains with Lightning's FSDPStrategy in FOLDER, with KIND "sharded" or "full" of checkpoints, up to EPOCHS, on DEVICES.

KIND "stock": without our callback, from ``last.ckpt``. Lightning starts that strategy on GPUs only: here it is a subclass.
"""

import dataclasses
import hashlib
import os
import sys
from pathlib import Path

from lightning_program import CONFIG, pl

# isort: split
import torch
from fsdp1_runs import everything, hold_whole_tensors
from lightning.pytorch.strategies import FSDPStrategy
from lightning_runs import module_class, trainer
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from safe_ckpt.lightning import SafeCheckpointCallback, resumable


class OnCpus(FSDPStrategy):
    def _setup_model(self, model):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


class Module(module_class(pl)):
    def __init__(self, **more):
        super().__init__(**more)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 2))


def print_of(made):
    tensors = [one.detach() for one in made.strategy.model.parameters()]
    for one in made.strategy.model.parameters():
        tensors += [value for _, value in sorted(made.optimizers[0].state.get(one, {}).items())]
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in tensors)).hexdigest()[:16]


def print_of_whole(made):
    tensors = everything(made.strategy.model, made.optimizers[0])
    return hashlib.sha256(b"".join(one.numpy().tobytes() for _, one in sorted(tensors.items()))).hexdigest()[:16]


def fit(folder, kind, epochs, devices):
    pl.seed_everything(1, verbose=False)
    hold_whole_tensors()
    ours = SafeCheckpointCallback(
        dirpath=folder,
        config=dataclasses.replace(CONFIG, snapshot="overlapped" if kind == "sharded" else "auto"),
        resume="auto",
        save_last=True,
        filename="{epoch}-{step}",
        every_n_train_steps=1,
        save_top_k=2,
        mode="max",
        monitor="step",
    )
    form = "full" if kind == "full" else "sharded"
    strategy = OnCpus(state_dict_type=form, auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}))
    settings = {"strategy": strategy, "devices": devices, "max_epochs": epochs, "enable_checkpointing": kind != "stock"}
    made = trainer(pl, [ours] if kind != "stock" else [], folder, **settings)
    module = Module(loader=resumable)
    made.fit(module, ckpt_path=folder / "last.ckpt" if kind == "stock" else None)
    return made


if __name__ == "__main__":
    folder, kind, epochs, *devices = sys.argv[1:]
    made = fit(Path(folder), kind, int(epochs), int(*devices or [2]))
    said = f"RANK {made.global_rank} {print_of(made)} {made.global_step} {print_of_whole(made)}\n"
    os.write(1, said.encode())  # in one piece
