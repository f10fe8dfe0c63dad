"""What programs that train with Lightning's ModelParallelStrategy have in common."""

import hashlib

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_program import CONFIG, pl
from lightning_runs import module_class, trainer
from torch.distributed.fsdp import fully_shard

from safe_ckpt.lightning import SafeCheckpointCallback, resumable


class Module(module_class(pl)):
    def __init__(self, **more):
        super().__init__(**more)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 2))

    def configure_model(self):
        if hasattr(self.net[0].weight, "placements"):  # called again for every stage
            return
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.net[0], mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def whole(module):
    state = module.state_dict()
    return {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for name, v in state.items()}


def print_of(module):
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in whole(module).values())).hexdigest()[:16]


def fit(folder, kind, epochs, *, ckpt_path=None, callback=True, make=Module):
    """Train on two ranks in FOLDER, which has "sharded" checkpoints or "full" ones. Returns the Trainer and the module."""
    pl.seed_everything(1, verbose=False)
    module = make(loader=resumable)
    ours = SafeCheckpointCallback(
        dirpath=folder,
        config=CONFIG,
        resume=None if ckpt_path else "auto",
        save_last=True,
        filename="{epoch}-{step}",
        every_n_train_steps=1,
        save_top_k=2,
        mode="max",
        monitor="step",
        export_to=folder / "weights",
    )
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=kind == "sharded"
    )
    settings = {"strategy": strategy, "devices": 2, "max_epochs": epochs, "enable_checkpointing": callback}
    made = trainer(pl, [ours] if callback else [], folder, **settings)
    made.fit(module, ckpt_path=ckpt_path)
    return made, module
