"""What runs of frameworks have in common: the module, its data, and what is noted of a run, so that two can be compared."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from devices.draw import FitPlan
from kit.device.module import Late
from kit.limits import QUICK
from kit.patience import wait_until
from safe_ckpt import CheckpointConfig, WriterConfig

ROWS, BATCH = 12, 4
_LARGE = 1 << 18
_COMMIT_S = 30


class Net(nn.Module):
    """A module with noise, which is drawn on its device, and buffers, which change in each forward pass.

    Args:
        plan: of the run.
        told: is told which rows a forward pass is for.
    """

    mean: torch.Tensor
    passes: torch.Tensor

    def __init__(self, plan: FitPlan, told: Callable[[list[int]], None]) -> None:
        super().__init__()
        self._told = told
        self.front = nn.Sequential(
            nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.3 if plan.drops else 0.0)
        )
        self.back = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(_LARGE if plan.large else 3))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("passes", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor, rows: list[int]) -> dict[str, torch.Tensor]:
        """The loss, and what it is of."""
        self._told(rows)
        x = x + 0.1 * torch.rand(x.shape, device=x.device)
        hidden = self.front(x)
        out = self.back(hidden) * self.scale.mean()
        self.passes.add_(1)
        self.mean.lerp_(hidden.detach().mean(0), 0.25)
        return {"loss": nn.functional.cross_entropy(out, labels), "logits": out}

    def act(self) -> None:
        """Change a buffer when a step is done."""
        self.mean.mul_(1.5)


def optimizer_of(plan: FitPlan, net: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """The optimizer, and its schedule, which is one of steps."""
    options: dict[str, Any] = {"lr": 1e-2} if plan.optimizer == "AdamW" else {"lr": 1e-2, "momentum": 0.9}
    optimizer = getattr(torch.optim, plan.optimizer)(net.parameters(), foreach=True, **options)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """The data, with the number of each row."""

    def __init__(self, seed: int) -> None:
        chance = torch.Generator().manual_seed(seed)
        self._x = torch.randn(ROWS, 6, generator=chance)
        self._labels = torch.randint(0, 4, (ROWS,), generator=chance)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"x": self._x[row], "labels": self._labels[row], "rows": row}


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch. The numbers stay on the host."""
    tensors = {name: torch.stack([row[name] for row in rows]) for name in ("x", "labels")}
    return {**tensors, "rows": [row["rows"] for row in rows]}


class Planned(Exception):
    """A run is broken off by it."""


class Here:
    """One start of a run, in a process of its own.

    Args:
        plan: of the run.
        folder: of checkpoints.
        notes: what is told of this start goes to files with this beginning.
        late: the accelerator.
        rank: of this process.
        stop: where it kills itself; None for nowhere.
        reference: whether it is the run that saves nothing, and waits for its device after each step.
    """

    def __init__(
        self,
        plan: FitPlan,
        folder: Path,
        notes: str,
        late: Late,
        rank: int,
        stop: tuple[int, str] | None,
        *,
        reference: bool,
    ) -> None:
        self.plan, self.folder, self.rank, self.reference = plan, folder, rank, reference
        self.device = torch.device("late", (plan.device + rank) % late.device_count())
        self._late, self._notes, self._stop = late, notes, stop
        self._states: dict[int, dict[str, torch.Tensor]] = {}
        self._told = os.open(f"{notes}.told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.committed: Callable[[int], bool] = lambda _: True

    @property
    def config(self) -> CheckpointConfig:
        """The settings of its saves."""
        writer = WriterConfig(inline_bytes=0) if self.plan.through_writer else WriterConfig()
        return CheckpointConfig(snapshot=self.plan.snapshot, writer=writer, timeouts=QUICK)

    @contextmanager
    def behaving(self) -> Iterator[None]:
        """As the plan says, until training is over."""
        plan = self.plan
        torch.accelerator.set_device_index(self.device.index)
        if not self.reference:
            self._late.behave(
                seed=plan.seed * 2 + self.rank,
                chance_percent=plan.chance_percent,
                pageable_is_late=plan.pageable_is_late,
                refuses_registration=plan.refuses_registration,
                wait_us=plan.wait_us,
            )
        if not plan.on_stream:
            yield
            return
        stream = torch.Stream(device=self.device)
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream:
            yield

    def begins(self, step: int) -> None:
        """Training begins, or goes on, after so many steps."""
        self._tell("begins", step)

    def rows(self, rows: list[int]) -> None:
        """A forward pass is for these."""
        self._tell("rows", rows)

    def meets(self, where: str, steps: int) -> None:
        """So many steps are done: it may be the place where this process is killed."""
        if self._stop is None or self._stop[0] != steps:
            return
        if self._stop[1] == "raises" and where == "next":
            self._tell("killed", steps)
            raise Planned
        if self._stop[1] == "committed" and where == "next":
            if steps % self.plan.every == 0:
                self._tell("waiting", self._late.waiting())
                wait_until(lambda: self.committed(steps), _COMMIT_S, "the save is committed")
        elif self._stop[1] != where:
            return
        self._tell("killed", steps)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def stepped(self, steps: int, state: Callable[[], dict[str, torch.Tensor]]) -> None:
        """So many steps are done, and ``state`` looks at what they came to."""
        if self.reference:
            self._states[steps] = state()

    def saves(self) -> None:
        """A save is about to begin."""
        self._tell("queued", self._late.waiting())

    def ends(self, steps: int, state: dict[str, torch.Tensor]) -> None:
        """Training is over."""
        self._states[steps] = state
        torch.save(self._states, f"{self._notes}.states")
        self._tell("ends", steps)

    def seen(self, net: nn.Module, optimizer: Any, scheduler: Any) -> dict[str, torch.Tensor]:
        """All that counts, on the CPU, by name."""
        found = {f"model.{name}": value for name, value in net.state_dict().items()}
        for number, values in optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{key}": value for key, value in values.items() if value is not None}
        found["lr"] = torch.tensor(scheduler.get_last_lr())
        found |= {f"late.{number}": state for number, state in enumerate(self._late.get_rng_state_all())}
        found["torch"] = torch.get_rng_state()
        return {name: torch.as_tensor(value).detach().cpu().clone() for name, value in found.items()}

    def _tell(self, *words: Any) -> None:
        os.write(self._told, f"{json.dumps(words)}\n".encode())  # it may be killed right behind this


def weights_and_moments(path: Path, optimizer_file: str) -> dict[str, torch.Tensor]:
    """What a checkpoint of Accelerate's or the Trainer's has of the model and its optimizer."""
    found = {f"model.{name}": value for name, value in load_file(path / "model.safetensors").items()}
    for number, values in loaded(path / optimizer_file)["state"].items():
        found |= {
            f"optimizer.{number}.{key}": torch.as_tensor(value) for key, value in values.items() if value is not None
        }
    return found


def loaded(file: Path) -> Any:
    """What ``torch.save`` has written there."""
    return torch.load(file, map_location="cpu", weights_only=False)
