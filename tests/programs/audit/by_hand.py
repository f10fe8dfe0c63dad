"""A loop of its own with torch.save by hand: alone, with DDP or with FSDP2. OMIT names what its resume leaves out."""

import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

SIZE, BATCH, EPOCH = 256, 8, 16  # examples, of a batch, batches of an epoch

options = argparse.ArgumentParser()
options.add_argument("--out")
options.add_argument("--kind", default="plain")
options = options.parse_args()
omitted = os.environ.get("OMIT", "").split(",")
rank = 0
if options.kind != "plain":
    dist.init_process_group("gloo")
    rank = dist.get_rank()


def part(value):
    """This rank's part of the DTensors in something."""
    return tree_map_only(DTensor, DTensor.to_local, value)


def whole(value, like):
    """A part as what it is a part of."""
    if isinstance(like, DTensor) and value is not None and value.ndim:
        return DTensor.from_local(value, like.device_mesh, like.placements)
    return value


torch.manual_seed(0)
body = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Tanh(), torch.nn.Linear(32, 32))
model = torch.nn.Sequential(body, torch.nn.Dropout(0.1), torch.nn.Linear(32, 2))
net = model
if options.kind == "ddp":
    net = DistributedDataParallel(model)
elif options.kind == "fsdp2":
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4, enabled=options.kind == "plain")
average = {name: one.detach().clone() for name, one in model.named_parameters()}
data = torch.randn(SIZE, 8)
labels = (data.sum(dim=1) > 0).long()
random.seed(rank)
np.random.seed(rank)
torch.manual_seed(rank)
workers = 1000 * int(torch.randint(1000, ()))  # as the seeds that a loader draws for its workers
step = epoch = position = micro = 0
best, steps_of_layer = 1e9, 12

path = os.path.join(options.out, f"rank-{rank}.pt")
if os.path.exists(path):
    saved = torch.load(path, weights_only=False)
    if "all" in omitted:
        omitted = [name for name in saved if name not in ("model", "keys", "buffer")]
    state = saved["model"]
    if "buffer" in omitted:
        state = {**state, "0.1.running_mean": model.state_dict()["0.1.running_mean"]}
    model.load_state_dict({name: whole(one, model.state_dict()[name]) for name, one in state.items()})
    parameters = dict(model.named_parameters())
    for one, like in zip(saved["optimizer"]["state"].values(), parameters.values(), strict=False):
        one.update({key: whole(value, like) for key, value in one.items()})
    if "optimizer" not in omitted:
        for one in saved["optimizer"]["state"].values():
            for key in {"exp_avg", "exp_avg_sq", "step"} & set(omitted):
                one[key] = torch.zeros_like(one[key])
        optimizer.load_state_dict(saved["optimizer"])
    else:  # whoever forgets it has the scheduler set the learning rate
        optimizer.param_groups[0].update(
            {key: one for key, one in saved["optimizer"]["param_groups"][0].items() if key != "params"}
        )
    if "scheduler" not in omitted:
        scheduler.load_state_dict(saved["scheduler"])
    if "scaler" not in omitted:
        scaler.load_state_dict(saved["scaler"])
    if "average" not in omitted:
        average = {name: whole(one, parameters[name]) for name, one in saved["average"].items()}
    if "python" not in omitted:
        random.setstate(saved["python"])
    if "numpy" not in omitted:
        np.random.set_state(saved["numpy"])
    if "torch" not in omitted and f"torch of rank {rank}" not in omitted:
        torch.set_rng_state(saved["torch"])
    workers = saved["workers"] if "workers" not in omitted else 1000 * random.randrange(1000)
    if "frozen" not in omitted:
        for name, one in model.named_parameters():
            one.requires_grad_(saved["frozen"][name])
    if "accumulation" not in omitted:
        micro = saved["micro"]
        for name, one in model.named_parameters():
            one.grad = whole(saved["gradients"][name], one)
    step = saved["step"] if "step" not in omitted else 0
    epoch = saved["epoch"] if "epoch" not in omitted else 0
    position = saved["position"] if "position" not in omitted else 0
    position += ("skipped" in omitted) - ("twice" in omitted)
    best = saved["best"] if "best" not in omitted else 1e9

while True:
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(100 * epoch + rank))
    while position < EPOCH:
        rows = order[position * BATCH : (position + 1) * BATCH]
        noise = torch.Generator().manual_seed(workers + EPOCH * epoch + position)
        batch = data[rows] + 0.1 * torch.randn(BATCH, 8, generator=noise)
        loss = torch.nn.functional.cross_entropy(net(batch), labels[rows], label_smoothing=float(np.random.rand()) / 10)
        loss = loss * (1 + 0.1 * random.random())
        position += 1
        scaler.scale(loss).backward()
        micro += 1
        if micro == 2:
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            micro = 0
            step += 1
            for name, one in model.named_parameters():
                average[name].mul_(0.9).add_(one.detach(), alpha=0.1)
            if step == 3 and options.kind == "plain":
                body[3].requires_grad_(False)
        best = min(best, loss.item())
        if (step % 10 == 0 and step and micro == 1) or (step % 10 == 5 and micro == 0):
            saved = {
                "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                "scaler": scaler.state_dict(), "average": average, "python": random.getstate(), "numpy": np.random.get_state(),
                "torch": torch.get_rng_state(), "workers": workers, "step": step, "epoch": epoch, "best": best,
                "frozen": {name: one.requires_grad for name, one in model.named_parameters()}, "micro": micro,
                "gradients": {name: one.grad for name, one in model.named_parameters()}, "position": position,
            }  # fmt: skip
            torch.save(part(saved), path + ".new")
            if rank != 0 or options.kind == "plain":
                os.replace(path + ".new", path)
            if options.kind != "plain":
                dist.barrier()
                if rank == 0:
                    os.replace(path + ".new", path)
                dist.barrier()
    position, epoch = 0, epoch + 1
