"""Random modules, optimizers and schedulers. The same choices with other values are those of a program's next start."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from programs_of.draw import Draw


class Extra(nn.Module):
    """Has an extra state beside its parameter, and a buffer that is not persistent."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.count = count
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        """As torch says."""
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """As torch says."""
        self.count = state["count"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (n, 3)."""
        return x * self.weight


class Objects:
    """Makes objects with a state.

    Args:
        draw: says what they are.
        values: which numbers.
    """

    def __init__(self, draw: Draw, values: int) -> None:
        self._draw, self._values = draw, values

    def module(self, name: str) -> nn.Module:
        """Something of which a vector of three goes in and comes out."""
        draw = self._draw
        torch.manual_seed(draw.random(f"{name}/weights {self._values}").randrange(1 << 30))
        kinds = [
            lambda: nn.Linear(3, 3),
            lambda: nn.Linear(3, 3, bias=False),
            lambda: nn.BatchNorm1d(3),
            lambda: nn.LayerNorm(3),
            lambda: Extra(self._values),
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
            lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
            lambda: nn.Dropout(0.1),
            lambda: nn.Sequential(nn.Linear(3, 5), nn.PReLU(), nn.Linear(5, 3)),
        ]
        layers = draw.number(f"{name}/layers", 1, 4)
        parts: list[nn.Module] = [draw.among(f"{name}/layer {n}", *kinds)() for n in range(layers)]
        if draw.flag(f"{name}/tied", of=4) and type(parts[0]) is nn.Linear:
            again = nn.Linear(3, 3)
            again.weight = parts[0].weight
            parts.append(again)
        if draw.flag(f"{name}/twice", of=6):
            parts.append(parts[0])
        module = nn.Sequential(*parts)
        module.to(draw.among(f"{name}/dtype", torch.float32, torch.float32, torch.float64, torch.bfloat16))
        first = next(module.parameters(), None)
        if first is not None and draw.flag(f"{name}/frozen", of=4):
            first.requires_grad_(False)
        return module

    def optimizer(self, name: str) -> torch.optim.Optimizer:
        """After some steps, where its values are those of the run; before any, where they are those of a fresh start."""
        draw = self._draw
        module = self.module(name)
        of = [one for one in module.parameters() if one.requires_grad] or [nn.Parameter(torch.ones(3))]
        split = draw.flag(f"{name}/groups", of=3) and len(of) > 1
        groups: Any = [{"params": of[:1], "lr": 0.05}, {"params": of[1:], "mine": "text"}] if split else of
        kind, more = draw.among(
            f"{name}/optimizer",
            (torch.optim.SGD, {}),
            (torch.optim.SGD, {"momentum": 0.9}),
            (torch.optim.AdamW, {}),
            (torch.optim.Adam, {"amsgrad": True}),
            (torch.optim.Adagrad, {}),
            (torch.optim.NAdam, {}),
            (torch.optim.RMSprop, {"centered": True}),
            (torch.optim.Adadelta, {}),
            (torch.optim.Rprop, {}),
            (torch.optim.ASGD, {}),
            (torch.optim.AdamW, {"foreach": True}),
            (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
        )
        if kind is torch.optim.AdamW and isinstance(more.get("lr"), torch.Tensor):
            more = {"lr": more["lr"].clone()}
        optimizer = kind(groups, **{"lr": 0.01, **more})
        steps = draw.number(f"{name}/steps", 0, 2)
        again = draw.among(f"{name}/steps at the start", 0, 0, 1)
        for number in range(steps if self._values == 0 else again):
            for n, one in enumerate(of):
                if (n, number) != (0, 0) or not draw.flag(f"{name}/one has no gradient", of=3):
                    one.grad = torch.full_like(one, 0.1 * (n + 1 + self._values))
            optimizer.step()
        return optimizer

    def scheduler(self, name: str) -> Any:
        """After some steps."""
        draw = self._draw
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        kinds = torch.optim.lr_scheduler
        made = draw.among(
            f"{name}/scheduler",
            lambda: kinds.StepLR(optimizer, 2),
            lambda: kinds.MultiStepLR(optimizer, [2, 3]),
            lambda: kinds.OneCycleLR(optimizer, 0.3, total_steps=20),
            lambda: kinds.ReduceLROnPlateau(optimizer, patience=1),
            lambda: kinds.LambdaLR(optimizer, lambda n: 0.9**n),
            lambda: kinds.CosineAnnealingWarmRestarts(optimizer, 3),
            lambda: kinds.SequentialLR(
                optimizer, [kinds.ConstantLR(optimizer, 0.5, 2), kinds.ExponentialLR(optimizer, 0.9)], [2]
            ),
            lambda: kinds.CyclicLR(optimizer, 0.01, 0.1, 2),
        )()
        for n in range(3 if self._values == 0 else 0):
            optimizer.step()
            made.step(*([float(n)] if isinstance(made, kinds.ReduceLROnPlateau) else []))
        return made
