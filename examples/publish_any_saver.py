"""A loop with a saver of its own, torch.save and DCP, made atomic. Kill it at any moment and start it again.

python examples/publish_any_saver.py runs/publish                                # one process
torchrun --nproc-per-node 2 examples/publish_any_saver.py runs/publish-ranks     # several
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits

import safe_ckpt
from safe_ckpt import CheckpointConfig, Retention

STEPS = int(os.environ.get("STEPS", "40"))
CONFIG = CheckpointConfig(retention=Retention(keep_last=2))


def main(directory: str) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    # The newest one that is whole, the same on all ranks; None on a fresh run.
    newest = safe_ckpt.newest(directory)
    begun = 0
    if newest is not None:
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=newest.path / "model")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(torch.load(newest.path / f"optimizer-{rank}.pt"))
        begun = newest.step
    print(f"rank {rank} begins behind step {begun}")

    for step in range(begun + 1, STEPS + 1):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            # Every rank enters. Outside of this block nobody sees a part of it.
            with safe_ckpt.publishing(directory, step, config=CONFIG) as folder:
                dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "model")
                torch.save(optimizer.state_dict(), folder / f"optimizer-{rank}.pt")
            if rank == 0:
                print(f"step {step}: loss {loss.item():.3f}, published")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
