"""Loops of plain torch with a Checkpointer: one rank."""

from __future__ import annotations

from pathlib import Path

import torch

from programs_of import processes
from programs_of.draw import Draw
from programs_of.runner import Verdict
from programs_of.start import Here
from safe_ckpt import Checkpointer, RngState
from safe_ckpt.data import resumable

_STEPS = 14


class Loops:
    """See the module."""

    def run(self, draw: Draw, folder: Path) -> Verdict:
        """Whole, killed once or twice, and started again."""
        kills = processes.kills_of(draw, "batch")
        _choose(draw)
        whole = processes.start("loops", draw, folder, "whole", out="whole")
        if whole.error:
            return Verdict(came_to="an error", wrong=f"error: {whole.error}", detail=whole.said[-2000:])
        wrong = []
        for number, kill in enumerate([*kills, None]):
            one = processes.start("loops", draw, folder, f"start-{number}", out="stopped", number=number, kill=kill)
            if one.error:
                return Verdict(came_to="an error", wrong=f"error: {one.error}", detail=one.said[-2000:])
            wrong += processes.differences(whole.lines, one.lines)
        return processes.verdict_of([*wrong, *processes.results_that_differ(whole, one)])


def _choose(draw: Draw):
    """The choices of both sides."""
    return {
        "optimizer": draw.among("optimizer", "SGD", "AdamW", "Adagrad", "RMSprop"),
        "every": draw.among("every", 2, 1, 3),
        "workers": draw.among("workers", 0, 2),
        "scheduler": draw.flag("scheduler"),
        "shuffle": draw.flag("shuffle"),
        "micro": draw.among("micro", 1, 2),
        "rows": draw.among("rows", 24, 20, 7),
    }


def start(draw: Draw, here: Here) -> None:
    """The program."""
    chosen = _choose(draw)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
    optimizer = getattr(torch.optim, chosen["optimizer"])(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer, "rng": RngState(), "at": {"epoch": 0}}
    if chosen["scheduler"]:
        state["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    data = torch.arange(3.0 * chosen["rows"]).reshape(-1, 3) / 50
    loader = resumable(torch.utils.data.DataLoader(data, 2, shuffle=chosen["shuffle"], num_workers=chosen["workers"]))
    state["loader"] = loader
    done = batches = 0
    with Checkpointer(here.out) as ckpt:
        if (found := ckpt.resume(state)) is not None:
            done, batches = found.step, found.step * chosen["micro"]
        while done < _STEPS:
            for batch in loader:
                here.meets("batch")
                batches += 1
                model(batch + 0.01 * torch.randn_like(batch)).pow(2).mean().backward()
                if batches % chosen["micro"]:
                    continue
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if "scheduler" in state:
                    state["scheduler"].step()
                if done % chosen["every"] == 0:
                    ckpt.save(done, state)
                if done == _STEPS:
                    break
            state["at"]["epoch"] += 1
    here.result("epochs", state["at"]["epoch"])
