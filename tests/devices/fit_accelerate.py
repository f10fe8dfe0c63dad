"""A script of Accelerate on the late accelerator."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch.utils.data import DataLoader

from devices.draw import STEPS, FitPlan
from devices.fit_parts import BATCH, Here, Net, Rows, collate, loaded, optimizer_of, weights_and_moments
from safe_ckpt.accelerate import register
from safe_ckpt.errors import NoValidCheckpointError

warnings.filterwarnings("ignore")
ALSO_SAVED: frozenset[int] = frozenset()


class _At:
    """Where the script is."""

    def __init__(self) -> None:
        self.epoch = self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def _accelerator(here: Here) -> Accelerator:
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(here.device)  # Accelerate's own way to a device that it does not know
    if several := here.plan.ranks > 1:
        # It knows no group for such a device, so the script makes one, and has it taken for one of CPUs, which may be any.
        dist.init_process_group("cpu:gloo,late:late")
    project = ProjectConfiguration(str(here.folder), automatic_checkpoint_naming=True)
    loading = DataLoaderConfiguration(use_stateful_dataloader=True)
    return Accelerator(cpu=several, project_config=project, dataloader_config=loading)


def run(here: Here) -> None:
    """Train to the end, from the newest checkpoint."""
    plan, at = here.plan, _At()
    accelerator = _accelerator(here)
    if not here.reference:
        register(accelerator, here.config)
    net = Net(plan, here.rows).to(here.device)  # before the optimizer: parameters of such a device are other objects
    optimizer, scheduler = optimizer_of(plan, net)
    data = DataLoader(Rows(plan.seed), BATCH // plan.ranks, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(net, optimizer, data)
    accelerator.register_for_checkpointing(at, scheduler)
    here.committed = lambda steps: (here.folder / f"checkpoints/checkpoint_{steps // plan.every - 1}").exists()
    with here.behaving():
        if not here.reference:
            with contextlib.suppress(NoValidCheckpointError):
                accelerator.load_state()
        here.begins(at.steps)
        _train(here, accelerator, at, model, (optimizer, scheduler), loader)
        accelerator.end_training()
        here.ends(at.steps, here.seen(net, optimizer.optimizer, scheduler))


def _train(here: Here, accelerator: Accelerator, at: _At, model: Any, stepping: tuple[Any, Any], loader: Any) -> None:
    optimizer, scheduler = stepping
    while at.steps < STEPS:
        for batch in loader:
            here.meets("next", at.steps)
            loss = model(**batch)["loss"]
            here.meets("forward", at.steps)
            accelerator.backward(loss)
            here.meets("stepping", at.steps)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            at.steps += 1
            net = accelerator.unwrap_model(model)
            if here.plan.acts:
                net.act()
            here.stepped(at.steps, lambda net=net: here.seen(net, optimizer.optimizer, scheduler))
            if not here.reference and at.steps % here.plan.every == 0:
                here.saves()
                accelerator.save_state(metrics={"loss": loss} if here.plan.logs else {})
            if at.steps == STEPS:
                return
        at.epoch += 1


def saved(folder: Path, plan: FitPlan) -> dict[int, dict[str, torch.Tensor]]:
    """What is in the checkpoints, by the number of steps, of the first rank."""
    found = [_content(path) for path in folder.glob("checkpoints/checkpoint_*")]
    return dict(found)


def _content(path: Path) -> tuple[int, dict[str, torch.Tensor]]:
    found = weights_and_moments(path, "optimizer.bin")
    found["lr"] = torch.tensor(loaded(path / "custom_checkpoint_1.pkl")["_last_lr"])
    return loaded(path / "custom_checkpoint_0.pkl")["steps"], found
