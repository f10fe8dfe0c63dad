"""A Checkpointer with short deadlines, and a small training state."""

import torch

from kit.inside import engine_of
from kit.limits import QUICK
from kit.patience import wait_until
from safe_ckpt import (
    CheckpointConfig,
    PerRank,
    RngState,
)


def config(**more):
    return CheckpointConfig(timeouts=QUICK, **more)


def steps(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".safe_ckpt")


def uploads_of(ckpt):
    """What uploads its checkpoints."""
    return next(one.mirror for one in engine_of(ckpt).extensions if one.name == "mirror")


def wait_for_mirror(ckpt):
    """Until all is uploaded that waits."""
    mirror = uploads_of(ckpt)
    wait_until(lambda: not mirror._known(), 30, "the last upload")


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
