"""FSDP2 on any number of ranks: a run that four ranks saved continues on two, or on one.

torchrun --nproc-per-node 4 examples/fsdp2_reshard.py runs/fsdp2
torchrun --nproc-per-node 2 examples/fsdp2_reshard.py runs/fsdp2            # continues from there
torchrun --nproc-per-node 1 examples/fsdp2_reshard.py runs/fsdp2 --export   # also exports whole weights for Hugging Face
"""

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from safe_ckpt import CheckpointConfig, Checkpointer, Retention, iter_full_tensors

EPOCHS = int(os.environ.get("EPOCHS", "4"))


def main(directory: str, export: bool) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # The optimizer needs its module: its state is saved under the names of the parameters.
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    with Checkpointer(directory, CheckpointConfig(retention=Retention(keep_last=2))) as ckpt:
        info = ckpt.resume(state)
        if rank == 0:
            told = "fresh run" if info is None else f"resumed {info.path.name} of {info.world_size} ranks on {world}"
            print(told, flush=True)
        for epoch in range(state["epoch"], EPOCHS):
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
            for batch in order.split(128)[:-1]:
                mine = batch[rank::world]
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
                optimizer.step()
            state["epoch"] = epoch + 1
            ckpt.save(epoch + 1, state)  # every rank saves its own parts; replicated tensors are saved once
        if export:
            handle = ckpt.export(model, os.path.join(directory, "..", "fsdp2-weights"))
            if rank == 0:
                print(f"exported to {handle.result().path.name}/model.safetensors", flush=True)

    digest = hashlib.sha256()
    for _, tensor in iter_full_tensors(model):  # one whole tensor at a time, on rank 0
        if tensor is not None:
            digest.update(tensor.numpy().tobytes())
    if rank == 0:
        print(f"finished {EPOCHS} epochs on {world} ranks, weights {digest.hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 and not sys.argv[1].startswith("--") else "runs/fsdp2"
    main(folder, "--export" in sys.argv)
