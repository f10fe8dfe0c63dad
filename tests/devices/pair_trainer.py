"""What a program of two ranks trains; and, as its twin on the CPU, the same with both ranks' batches in one process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel

from devices.draw import PairPlan
from safe_ckpt import PerRank, RngState

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

RANKS = 2
_OPTIONS: dict[str, dict[str, Any]] = {"AdamW": {"lr": 1e-2}, "SGD": {"lr": 1e-2, "momentum": 0.9}}


def _halves(seed: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)  # weights are drawn on the CPU
    front = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU())
    return front, nn.Sequential(nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 5))


def _optimizer(plan: PairPlan, model: nn.Module) -> torch.optim.Optimizer:
    return getattr(torch.optim, plan.optimizer)(model.parameters(), foreach=True, **_OPTIONS[plan.optimizer])


class Batches:
    """The batches of every rank, in order."""

    def __init__(self, seed: int) -> None:
        self._drawn = torch.Generator().manual_seed(seed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Batches:
        """The same batches follow."""
        del memo
        made = Batches(0)
        made._drawn.set_state(self._drawn.get_state())
        return made

    def next(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """One for each rank."""
        chance = self._drawn
        return [
            (torch.randn(8, 6, generator=chance), torch.randint(0, 5, (8,), generator=chance)) for _ in range(RANKS)
        ]


@contextlib.contextmanager
def standing(device: torch.device) -> Iterator[None]:
    """Stand on a device meanwhile."""
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(device.index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


class PairTrainer:
    """One rank's model in two halves, on devices, its optimizer, and tensors beside them.

    Args:
        plan: the program.
        seed: of the first weights.
        rank: this one.
        mesh: of both ranks' devices.
    """

    def __init__(self, plan: PairPlan, seed: int, rank: int, mesh: DeviceMesh) -> None:
        self._plan, self._rank, self._mesh = plan, rank, mesh
        first = torch.device("late", plan.devices[0])
        self.devices = (first, first if plan.wrap == "fsdp" else torch.device("late", plan.devices[1]))
        self._second = torch.device("late", plan.devices[1])
        wrapped = []
        for half, device in zip(_halves(seed), self.devices, strict=True):
            with standing(device):
                half.to(device)
                wrapped.append(
                    fully_shard(half, mesh=mesh)
                    if plan.wrap == "fsdp"
                    else DistributedDataParallel(half, gradient_as_bucket_view=bool(seed % 2))
                )
        self.model = nn.ModuleList(wrapped)
        self.optimizer = _optimizer(plan, self.model)
        self._batches = Batches(plan.seed)
        self.beside: dict[str, Any] = {
            "mean": torch.zeros(12, 16).to(self._second),
            "bytes": torch.arange(3, dtype=torch.uint8).to(first),
            "count": torch.tensor(0).to(first),
        }
        self.own = {"number": torch.full((3,), float(rank)).to(self._second)}

    @property
    def state(self) -> dict[str, Any]:
        """To be saved."""
        own, rng = PerRank(self.own), PerRank(RngState())
        return {"model": self.model, "optimizer": self.optimizer, "beside": self.beside, "own": own, "rng": rng}

    def follow(self, twin: PairTwin) -> None:
        """Go on with the batches that the twin comes to next."""
        self._batches = copy.deepcopy(twin.batches)

    def step(self) -> None:
        """Train one step, and change what is beside the model in place."""
        first, second = self.devices
        x, y = self._batches.next()[self._rank]
        front, back = self.model
        with standing(first):
            inner = front(x.pin_memory().to(first, non_blocking=True))
            with standing(second):
                loss = nn.functional.cross_entropy(back(inner.to(second)), y.to(second))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.touch()
        torch.rand(1, device=first)
        if self._plan.lags == self._rank:
            loss.item()

    def touch(self) -> None:
        """Change in place what no optimizer steps, the same on both ranks but for what is a rank's own."""
        with torch.no_grad():
            self.beside["mean"].mul_(0.5).add_(1)
            self.beside["bytes"].add_(1)
            self.beside["count"].add_(1)
            self.own["number"].add_(1)

    def make_fresh(self, number: int) -> None:
        """Put a tensor into the state that is not there for long."""
        self.beside["fresh"] = torch.full((64,), float(number), device=self._second)
        self.beside["fresh"].add_(0.5)

    def free(self) -> None:
        """Free what was made, and let others take its memory and write to it."""
        self.beside["fresh"] = None
        for number in range(3):
            torch.full((64,), -1.0 - number, device=self._second)

    def partial(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A tensor of which each rank has a summand, queued just now; and its whole. The caller lets go of it at once."""
        base = torch.arange(6.0).reshape(2, 3)
        ours = torch.full((2, 3), float(number), device=self._second)
        for _ in range(3):
            ours.mul_(2)
        ours.add_((base * (self._rank + 1)).to(self._second))
        return DTensor.from_local(ours, self._mesh, [Partial()], run_check=False), base * 3 + 16.0 * number

    def seen(self) -> dict[str, torch.Tensor | None]:
        """This rank's part of all that is saved but generators, on the CPU, by name."""
        return _seen(self.model, self.optimizer, self.beside, self.own["number"])


class PairTwin:
    """Both ranks on the CPU: the gradients of both batches are computed one after the other, and their mean is taken."""

    def __init__(self, plan: PairPlan, seed: int, rank: int) -> None:
        self._plan, self._rank = plan, rank
        self.model = nn.ModuleList(_halves(seed))
        self.optimizer = _optimizer(plan, self.model)
        self.batches = Batches(plan.seed)
        self.beside: dict[str, Any] = {
            "mean": torch.zeros(12, 16),
            "bytes": torch.arange(3, dtype=torch.uint8),
            "count": torch.tensor(0),
        }
        self.own = {"number": torch.full((3,), float(rank))}

    def step(self) -> None:
        """As the trainer's, of both ranks."""
        sums: list[torch.Tensor] = []
        for x, y in self.batches.next():
            front, back = self.model
            nn.functional.cross_entropy(back(front(x)), y).backward()
            found = [one.grad / RANKS for one in self.model.parameters() if one.grad is not None]
            sums = [one + other for one, other in zip(sums, found, strict=True)] if sums else found
            self.optimizer.zero_grad()
        for parameter, gradient in zip(self.model.parameters(), sums, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.touch()

    touch = PairTrainer.touch

    def make_fresh(self, number: int) -> None:
        """As the trainer's."""
        self.beside["fresh"] = torch.full((64,), number + 0.5)

    def free(self) -> None:
        """As the trainer's."""
        self.beside["fresh"] = None

    def seen(self) -> dict[str, torch.Tensor | None]:
        """What the rank's trainer has, if all went well."""
        return _seen(self.model, self.optimizer, self.beside, self.own["number"], self._cut)

    def whole(self) -> dict[str, torch.Tensor]:
        """The weights."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def _cut(self, value: torch.Tensor) -> torch.Tensor:
        if self._plan.wrap != "fsdp" or value.dim() == 0:
            return value
        parts = value.chunk(RANKS)
        return parts[self._rank]


def plain(name: str) -> str:
    """A parameter's name without what DDP puts into it."""
    return name.replace("module.", "")


def _seen(
    model: nn.Module, optimizer: torch.optim.Optimizer, beside: dict[str, Any], own: torch.Tensor, cut: Any = None
) -> dict[str, torch.Tensor | None]:
    sharded = {f"model.{plain(name)}": value for name, value in model.state_dict().items()}
    for number, values in optimizer.state_dict()["state"].items():
        sharded |= {f"optimizer.{number}.{key}": value for key, value in values.items()}
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in sharded.items()}
    parts = {name: value if cut is None else cut(value) for name, value in local.items()}
    parts |= {"own": own, **{f"beside.{key}": value for key, value in beside.items()}}
    return {name: None if value is None else value.detach().cpu().clone() for name, value in parts.items()}
