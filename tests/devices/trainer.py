"""What a program trains: the same on the accelerator and, as its twin, on the CPU."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from devices.draw import Plan
from safe_ckpt import PerRank, RngState

_LARGE = 1 << 18  # numbers: more than fits into a snapshot of max_host_bytes, at its least


class Trainer:
    """A model in two halves, its optimizer, and tensors beside them.

    Args:
        plan: the program.
        devices: of the halves.
        seed: of the first weights.
    """

    def __init__(self, plan: Plan, devices: tuple[torch.device, torch.device], seed: int) -> None:
        torch.manual_seed(seed)  # weights are drawn on the CPU
        self._devices = devices
        front = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU())
        back = nn.Sequential(nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 4))
        self.model = nn.ModuleList([front.to(devices[0]), back.to(devices[1])])
        options: dict[str, Any] = {"lr": 1e-2} if plan.optimizer == "AdamW" else {"lr": 1e-2, "momentum": 0.9}
        self.optimizer = getattr(torch.optim, plan.optimizer)(self.model.parameters(), foreach=True, **options)
        self._batches = torch.Generator().manual_seed(plan.seed)
        host = torch.device("cpu")
        first, second = (
            device if plan.beside in ("both", name) else host
            for device, name in zip(devices, ("first", "second"), strict=True)
        )
        self._fresh, self._follows = first, plan.beside in ("both", "second")
        self.beside: dict[str, Any] = {
            "bytes": torch.arange(3, dtype=torch.uint8).to(first),  # what follows in the file has an odd place
            "mean": torch.zeros(12, 16).to(second),
            "half": torch.ones(5, dtype=torch.bfloat16).to(first),
            "turned": torch.arange(12.0).reshape(3, 4).to(second).t(),
            "number": torch.tensor(0).to(first),
            "large": torch.zeros(_LARGE if plan.streams_to_writer else 700).to(second),
        }
        self._reads = plan.reads
        self._made = itertools.count(1)

    @property
    def state(self) -> dict[str, Any]:
        """To be saved."""
        rng = PerRank(RngState())
        return {"model": self.model, "optimizer": self.optimizer, "beside": self.beside, "rng": rng}

    def step(self) -> None:
        """Train one step, and change what is beside the model in place."""
        first, second = self._devices
        x = torch.randn(8, 6, generator=self._batches)
        y = torch.randint(0, 4, (8,), generator=self._batches)
        if first.type != "cpu":
            x = x.pin_memory()
        front, back = self.model
        out = back(front(x.to(first, non_blocking=True)).to(second))
        loss = nn.functional.cross_entropy(out, y.to(second))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.touch()
        torch.rand(1, device=first)
        if self._reads:
            loss.item()

    def touch(self) -> None:
        """Change in place what no optimizer steps."""
        with torch.no_grad():
            if self._follows:
                self.beside["mean"].lerp_(self.model[1][0].weight, 0.25)
            self.beside["bytes"].add_(1)
            self.beside["half"].mul_(1.5)
            self.beside["turned"].add_(0.5)
            self.beside["number"].add_(1)
            self.beside["large"].add_(0.125)

    def make_fresh(self) -> None:
        """Put a tensor into the state that is not there for long."""
        number = next(self._made)
        self.beside["fresh"] = torch.full((64,), float(number), device=self._fresh)
        self.beside["fresh"].add_(0.5)

    def free(self) -> None:
        """Free what was made, and let others take its memory and write to it."""
        self.beside["fresh"] = None
        for number in range(3):
            torch.full((64,), -1.0 - number, device=self._fresh)

    def replace(self) -> None:
        """Give a parameter other memory, with other numbers."""
        weight = self.model[0][0].weight
        if weight.device.type != "cpu":  # it was made on another stream, perhaps: what is queued here has it still
            weight.data.record_stream(torch.accelerator.current_stream(weight.device))
        weight.data = weight.data * 2
        torch.full(weight.shape, -7.0, device=self._devices[0])

    def seen(self) -> dict[str, torch.Tensor | None]:
        """All that is saved but generators, on the CPU, by name."""
        state = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{number}.{key}": value for key, value in values.items()}
        state |= {f"beside.{key}": value for key, value in self.beside.items()}
        return {key: None if value is None else value.detach().cpu().clone() for key, value in state.items()}


def differing(one: dict[str, torch.Tensor | None], other: dict[str, torch.Tensor | None]) -> list[str]:
    """The names under which two states differ, in a bit."""
    return [name for name in sorted(one.keys() | other.keys()) if not _same(one.get(name), other.get(name))]


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and _bits(one).equal(_bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
