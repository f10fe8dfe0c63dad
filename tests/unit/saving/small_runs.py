"""A Checkpointer with short deadlines, and a small training state."""

import time

import torch

from kit.inside import engine_of
from safe_ckpt import (
    CheckpointConfig,
    PerRank,
    RngState,
    Timeouts,
)

QUICK = Timeouts(lengthy_s=60, barrier_s=20, writer_stall_s=5, fsync_stall_s=20, peer_stall_s=5, shutdown_s=10)


def config(**more):
    return CheckpointConfig(timeouts=QUICK, **more)


def steps(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".safe_ckpt")


def uploads_of(ckpt):
    """What uploads its checkpoints."""
    return next(one.mirror for one in engine_of(ckpt).extensions if one.name == "mirror")


def wait_for_mirror(ckpt):
    """Until all is uploaded that waits."""
    mirror, end = uploads_of(ckpt), time.monotonic() + 30
    while mirror._known() and time.monotonic() < end:
        time.sleep(0.01)


def trained():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    model[2].bias = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": PerRank(RngState())}
