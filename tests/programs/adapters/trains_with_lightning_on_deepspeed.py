"""Trains two ranks on DeepSpeed in FOLDER, with OFFLOAD, up to EPOCHS; writes the weights to files with END, and is killed."""

# ruff: noqa: E402
import os
import signal
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
import deepspeed
import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy

from safe_ckpt import CheckpointConfig, Timeouts
from safe_ckpt.lightning import SafeCheckpointCallback, resumable

folder, offload, epochs, end = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]


class OnCpu(DeepSpeedStrategy):
    def setup_environment(self):
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self):
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self):
        return torch.device("cpu", 0)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(1024, 1024, bias=False), torch.nn.ReLU(), torch.nn.Linear(1024, 16)
        )

    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        own = torch.Generator().manual_seed(5)
        inputs, labels = torch.randn(32, 1024, generator=own), torch.randint(0, 16, (32,), generator=own)
        data = torch.utils.data.TensorDataset(inputs, labels)
        return resumable(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))


pl.seed_everything(1, verbose=False)
zero = {"stage": 3 if offload == "nvme" else 2}
if offload == "nvme":
    zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(folder / f"swap{os.getppid()}")}
config = {
    "zero_optimization": zero,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10**9,
}
callback = SafeCheckpointCallback(
    dirpath=folder / "exp",
    resume="auto",
    filename="{epoch}",
    every_n_epochs=1,
    save_top_k=2,
    monitor="step",
    mode="max",
    save_last="link",
    config=CheckpointConfig(timeouts=Timeouts(barrier_s=30, shutdown_s=10)),
)
made = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=OnCpu(config=config),
    max_epochs=epochs,
    logger=False,
    callbacks=[callback],
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=folder,
)
module = Module()
made.fit(module)
parameters = list(module.parameters())
if offload == "nvme":
    with deepspeed.zero.GatheredParameters(parameters):
        whole = [parameter.detach().clone() for parameter in parameters]
else:
    whole = [parameter.detach().clone() for parameter in parameters]
torch.save(whole, folder / f"weights{made.global_rank}-{end}.pt")
print("RANK", made.global_rank, made.global_step, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
