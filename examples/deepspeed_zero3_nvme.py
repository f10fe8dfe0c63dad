"""ZeRO-3 with the optimizer's states on NVMe. Kill it at any moment and start it again: it continues, bit for bit.

DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/deepspeed_zero3_nvme.py runs/deepspeed

Without libaio-dev DeepSpeed cannot offload to NVMe. Then the states stay in host memory.
"""

import hashlib
import os
import sys
import warnings

import torch

warnings.filterwarnings("ignore", category=FutureWarning)  # of DeepSpeed, about torch's newer names
import deepspeed
from deepspeed.ops.op_builder import AsyncIOBuilder
from sklearn.datasets import load_digits

from safe_ckpt import CheckpointConfig, Retention
from safe_ckpt.deepspeed import install

EPOCHS = int(os.environ.get("EPOCHS", "4"))


def settings(directory: str) -> dict:
    offload = {"device": "cpu"}
    if AsyncIOBuilder().is_compatible(verbose=False):
        offload = {"device": "nvme", "nvme_path": os.path.join(directory, "swap")}
    return {
        "train_micro_batch_size_per_gpu": 32,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "offload_optimizer": offload},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def digest(engine) -> str:
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        whole = b"".join(parameter.detach().numpy().tobytes() for parameter in parameters)
    return hashlib.sha256(whole).hexdigest()[:16]


def main(directory: str) -> None:
    deepspeed.init_distributed("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 1024, bias=False), torch.nn.ReLU(), torch.nn.Linear(1024, 1024, bias=False), torch.nn.ReLU()
    )
    model.append(torch.nn.Linear(1024, 16))
    made = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings(directory))
    engine = made[0]

    # In this block save_checkpoint and load_checkpoint are safe, with the same arguments and results.
    with install(engine, CheckpointConfig(retention=Retention(keep_last=2))):
        path, client = engine.load_checkpoint(directory)
        first = client["epoch"] if path is not None else 0
        if rank == 0:
            print(f"resumed after epoch {first}" if path is not None else "fresh run", flush=True)
        for epoch in range(first, EPOCHS):
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
            for batch in order.split(32 * world)[:-1]:
                mine = batch[rank::world]
                loss = torch.nn.functional.cross_entropy(engine(images[mine]), labels[mine])
                engine.backward(loss)
                engine.step()
            # Returns when the swap files are read and the rest is copied. Training continues during the write and the commit.
            engine.save_checkpoint(directory, client_state={"epoch": epoch + 1})

    weights = digest(engine)  # every rank must call this
    if rank == 0:
        print(f"finished {EPOCHS} epochs, weights {weights}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/deepspeed")
