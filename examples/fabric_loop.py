"""A Fabric loop as in language model training: accumulation, a schedule, validation, the best checkpoint. Kill it; it goes on.

python examples/fabric_loop.py runs/fabric                # one process
DEVICES=2 python examples/fabric_loop.py runs/fabric-ddp   # two, which Fabric starts
"""

import hashlib
import math
import os
import sys

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, Retention, RngState
from safe_ckpt.data import resumable

DEVICES = int(os.environ.get("DEVICES", "1"))
STEPS = int(os.environ.get("STEPS", "40"))
TOTAL = 40  # of the schedule
ACCUMULATE = 2
CONFIG = CheckpointConfig(retention=Retention(keep_last=2, keep_best=1, metric="val_loss", mode="min"))


def digits(first: int, last: int) -> TensorDataset:
    both = load_digits()
    return TensorDataset(
        torch.tensor(both.data[first:last], dtype=torch.float32) / 16, torch.tensor(both.target[first:last])
    )


@torch.no_grad()
def validate(fabric: Fabric, model: torch.nn.Module, loader: DataLoader) -> float:
    model.eval()
    losses = [torch.nn.functional.cross_entropy(model(x), y) for x, y in map(fabric.to_device, loader)]
    model.train()
    return float(fabric.all_reduce(torch.stack(losses).mean(), reduce_op="mean"))


def main(directory: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=DEVICES, strategy="ddp" if DEVICES > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    data = digits(0, 1500)
    sampler = DistributedSampler(data, num_replicas=fabric.world_size, rank=fabric.global_rank)
    train = resumable(DataLoader(data, batch_size=32, sampler=sampler))
    val = DataLoader(digits(1500, 1797), batch_size=99)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / TOTAL))

    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "train": train,
        "rng": PerRank(RngState()),  # dropout differs between ranks
        "epoch": 0,
        "micro": 0,  # batches so far
        "step": 0,  # of the optimizer
    }
    with Checkpointer(directory, CONFIG) as ckpt:  # after launch(), on every rank
        info = ckpt.resume(state)
        fabric.print("fresh run" if info is None else f"resumed from {info.name}")
        while state["step"] < STEPS:
            sampler.set_epoch(state["epoch"])
            for batch in train:  # after a resume: what is left of the epoch
                state["micro"] += 1
                accumulating = state["micro"] % ACCUMULATE != 0
                with fabric.no_backward_sync(model, enabled=accumulating):
                    x, y = fabric.to_device(batch)
                    fabric.backward(torch.nn.functional.cross_entropy(model(x), y) / ACCUMULATE)
                if accumulating:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                state["step"] += 1
                if state["step"] % 10 == 0:
                    loss = validate(fabric, model, val)
                    ckpt.save(state["step"], state, metrics={"val_loss": loss})
                    fabric.print(f"step {state['step']}: val_loss {loss:.3f}")
                if state["step"] == STEPS:
                    break
            else:
                state["epoch"] += 1
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    fabric.print(f"weights {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    main(sys.argv[1])
