"""A plain training loop. Kill it at any moment and start it again: it continues, bit for bit.

python examples/plain_torch.py runs/plain                    # one process
torchrun --nproc-per-node 2 examples/plain_torch.py runs/ddp  # several
"""

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, Retention, RngState
from safe_ckpt.data import resumable

EPOCHS = int(os.environ.get("EPOCHS", "5"))


def main(directory: str) -> None:
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    sampler = DistributedSampler(data) if distributed else None
    loader = resumable(DataLoader(data, batch_size=64, shuffle=sampler is None, sampler=sampler))
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 10)
    )
    model = DistributedDataParallel(net) if distributed else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # Everything that training needs. PerRank wraps values that differ between ranks.
    state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": PerRank(RngState()), "epoch": 0}
    config = CheckpointConfig(retention=Retention(keep_last=2, keep_best=1, metric="loss", mode="min"))

    with Checkpointer(directory, config) as ckpt:  # on every rank
        info = ckpt.resume(state)  # restores the newest valid checkpoint in place; None on a fresh run
        print("fresh run" if info is None else f"resumed from {info.path.name}", flush=True)
        step, total = info.step if info is not None else 0, 0.0
        for epoch in range(state["epoch"], EPOCHS):
            state["epoch"] = epoch
            if sampler is not None:
                sampler.set_epoch(epoch)
            for x, y in loader:  # after a resume: what is left of the epoch
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                step, total = step + 1, total + loss.item()
                if step % 10 == 0:
                    # Returns when the state is copied. The copy is written, checked and committed while training continues.
                    ckpt.save(step, state, metrics={"loss": total / 10})
                    total = 0.0
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()[:16]
    print(f"finished {EPOCHS} epochs, weights {weights}", flush=True)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/plain_torch")
