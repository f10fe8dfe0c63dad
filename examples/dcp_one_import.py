"""A loop that saves with torch.distributed.checkpoint, with one import changed. Kill it at any moment and start it again.

python examples/dcp_one_import.py runs/dcp                                             # one process
torchrun --nproc-per-node 2 examples/dcp_one_import.py runs/dcp-ranks                  # FSDP2 on two
torchrun --nproc-per-node 3 examples/dcp_one_import.py runs/dcp-ranks                  # continues from there
"""

import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import safe_ckpt.dcp as dcp  # instead of: import torch.distributed.checkpoint as dcp
from safe_ckpt import Retention

STEPS = int(os.environ.get("STEPS", "40"))


class App:
    """Model and optimizer as one Stateful, as in the tutorial of torch.distributed.checkpoint."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def main(directory: str) -> None:
    several = "RANK" in os.environ
    if several:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    if several:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    dcp.configure(retention=Retention(keep_last=2))  # the one new line: without it all of them stay
    state = {"app": App(model, optimizer), "step": 0}
    dcp.resume(state, checkpoint_id=directory)  # the newest that is whole; nothing on a fresh run
    if rank == 0:
        print(f"begins behind step {state['step']}")

    for step in range(state["step"] + 1, STEPS + 1):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[rank::world]), labels[rank::world])
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            state["step"] = step
            upload = dcp.async_save(state, checkpoint_id=f"{directory}/step-{step}")
            if step == STEPS:
                upload.result()
    if rank == 0:
        print(f"at step {state['step']}: {sorted(name for name in os.listdir(directory) if name != '.safe_ckpt')}")
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
