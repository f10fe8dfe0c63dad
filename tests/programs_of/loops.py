"""Loops of plain torch with a Checkpointer: one rank, and every order of data that docs/data.md names."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils import data as torch_data

from programs_of import processes
from programs_of.chains import Chain
from programs_of.draw import Draw
from programs_of.runner import Verdict
from programs_of.start import Here
from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, Retention, RngState
from safe_ckpt.data import resumable
from safe_ckpt.testing import inline_saves

FIXED = (6, 7, 18)
"""Seeds that together cover much."""
_STEPS = 14
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "tensor lr": partial(torch.optim.AdamW, lr=torch.tensor(0.01), amsgrad=True),
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1, max_iter=3, history_size=3),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.01),
}
SCHEDULERS = {
    "": lambda _: None,
    "step": lambda one: lr_scheduler.StepLR(one, 2, 0.9),
    "plateau": lambda one: lr_scheduler.ReduceLROnPlateau(one, factor=0.5, patience=1),
    "sequence": lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.LinearLR(one), lr_scheduler.CosineAnnealingLR(one, 5)], [4]
    ),
    "chain": lambda one: lr_scheduler.ChainedScheduler(
        [lr_scheduler.MultiStepLR(one, [3, 6, 9], 0.7), lr_scheduler.ExponentialLR(one, 0.9)]
    ),
    "restarts": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 3),
    "lambda": lambda one: lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)),
    "cycle": lambda one: lr_scheduler.CyclicLR(one, 0.001, 0.02, step_size_up=3, cycle_momentum=False),
}
ORDERS = (
    "in order", "shuffle", "replacement", "more than there are", "weighted", "subset", "own", "own batches", "counts epochs",
    "a list", "no batches", "batches of indices", "stream", "stream read again",
)  # fmt: skip


class Loops:
    """See the module."""

    def run(self, draw: Draw, folder: Path) -> Verdict:
        """Whole, killed once or twice, and started again."""
        kills = processes.kills_of(draw, "batch", "save", steps=_STEPS, least=3)
        chain = Chain("loops", draw, folder, kills, [1] * (len(kills) + 1))
        _choose(draw)
        return chain.run() or processes.verdict_of(chain.wrong, chain.came_to())


def _choose(draw: Draw) -> dict[str, Any]:
    """The choices of both sides."""
    found = {
        "optimizer": draw.among("optimizer", *OPTIMIZERS),
        "scheduler": draw.among("scheduler", *SCHEDULERS),
        "order": draw.among("order", *ORDERS),
        "generator": draw.among("generator", "", "of the sampler", "of the loader"),
        "rows": draw.among("rows", 24, 20, 7),
        "batch": draw.among("batch", 2, 3, 1),
        "drop last": draw.flag("drop last", of=3),
        "workers": draw.among("workers", 0, 0, 2, 1),
        "persistent": draw.flag("persistent"),
        "prefetch": draw.among("prefetch", 2, 1, 3),
        "draws": draw.among("draws", "", "torch", "all", "the collation"),
        "second": draw.among("second loader", "", "", "within", "beside"),
        "breaks": draw.among("breaks behind", 0, 0, 3),
        "model": draw.among("model", "plain", "batch norm", "spectral norm", "weight norm", "tied"),
        "average": draw.among("average", "", "averaged model", "a dict", "a list", "a tuple"),
        "micro": draw.among("micro", 1, 2, 3),
        "within": draw.flag("saves within a step"),
        "every": draw.among("every", 2, 1, 3),
        "at": draw.among("saves", "in the loop", "in the loop", "both", "at the ends of epochs"),
        "rng": draw.among("rng", "of the rank", "of all"),
        "item": draw.among("loader's item", "of the rank", "of all"),
        "retention": draw.among("retention", "", "last", "best", "every"),
        "snapshot": draw.among("snapshot", "eager", "overlapped", "auto"),
        "in flight": draw.among("in flight", 1, 2),
        "inline": draw.flag("inline", of=4),
        "waits": draw.flag("waits", of=4),
        "export": draw.flag("exports between", of=4),
        "resumes": draw.among("resumes", "once", "twice"),
    }  # fmt: skip
    if draw.flag("workers stay", of=6):  # over the ends of several epochs
        found |= {"rows": 7, "workers": 2, "persistent": True, "draws": "torch", "order": "shuffle", "breaks": 0}
    if found["optimizer"] == "LBFGS":
        found["micro"], found["within"] = 1, False
    if found["order"].startswith("stream") or found["order"] == "no batches":
        found["drop last"] = False
    if found["order"] == "stream read again":  # what nothing else may draw between
        found |= {"workers": 0, "draws": "", "persistent": False}
    if found["breaks"]:
        found["persistent"] = False
        found["at"] = "in the loop"  # a save behind a loop that was left belongs to the epoch of that loop
    found["within"] &= found["snapshot"] == "eager"
    return found


class Rows(torch_data.Dataset[Any]):
    """Row n, with noise where the data draw."""

    def __init__(self, count: int, draws: str) -> None:
        self.count, self.draws = count, draws

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> torch.Tensor:
        if isinstance(number, list):
            return torch.stack([self[one] for one in number])
        noise = float(torch.rand(())) if self.draws in ("torch", "all") else 0.0
        noise += random.random() + numpy.random.random() if self.draws == "all" else 0.0
        return torch.tensor([number, number / 7, noise], dtype=torch.float32)


class Stream(torch_data.IterableDataset[Any]):
    """The same rows, of this worker."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch_data.get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        for at in range(number, len(self.rows), workers):
            yield self.rows[at]


class PlacedStream(Stream):
    """One that knows its place."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self.at = self.begin = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        begin, self.begin = self.begin, 0
        self.at = begin
        for one in list(super().__iter__())[begin:] if self.rows.draws == "" else self._lazily(begin):
            self.at += 1
            yield one

    def _lazily(self, begin: int) -> Iterator[torch.Tensor]:
        worker = torch_data.get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        for at in range(number + begin * workers, len(self.rows), workers):
            yield self.rows[at]

    def state_dict(self) -> dict[str, int]:
        """Where it is."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self.begin = self.at = state["at"]


class OwnSampler(torch_data.Sampler[int]):
    """Draws from torch's generator when its iteration begins; and one that counts its epochs."""

    def __init__(self, count: int, epochs: bool) -> None:
        self.count, self.epoch = count, 0 if epochs else None

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        if self.epoch is None:
            return iter(torch.randperm(self.count).tolist())
        return iter(torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def set_epoch(self, epoch: int) -> None:
        """As ``DistributedSampler`` has it."""
        if self.epoch is not None:
            self.epoch = epoch


class OwnBatches(torch_data.Sampler[list[int]]):
    """Batches of one and of two."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return -(-self.count // 3) * 2

    def __iter__(self) -> Iterator[list[int]]:
        for at in range(0, 3 * (len(self) // 2), 3):
            yield [at % self.count]
            yield [(at + 1) % self.count, (at + 2) % self.count]


def _noisy(batch: Any) -> torch.Tensor:
    return torch.stack(batch) + torch.rand(()) + random.random()


def loader_of(chosen: Mapping[str, Any], seed: int) -> Any:
    """A resumable loader."""
    order, count = chosen["order"], chosen["rows"]
    rows = Rows(count, chosen["draws"])
    own = torch.Generator().manual_seed(seed) if chosen["generator"] == "of the sampler" else None
    more: dict[str, Any] = {"batch_size": chosen["batch"], "drop_last": chosen["drop last"]}
    if chosen["workers"]:
        more |= {"num_workers": chosen["workers"], "prefetch_factor": chosen["prefetch"]}
        more |= {"persistent_workers": chosen["persistent"]}
    if chosen["generator"] == "of the loader":
        more["generator"] = torch.Generator().manual_seed(seed)
    if chosen["draws"] == "the collation" and order not in ("no batches", "batches of indices"):
        more["collate_fn"] = _noisy
    if order.startswith("stream"):
        of = Stream(rows) if order == "stream read again" else PlacedStream(rows)
        return resumable(torch_data.DataLoader(of, **more), skip="read" if order == "stream read again" else None)
    samplers: dict[str, Any] = {
        "in order": lambda: None, "shuffle": lambda: None, "no batches": lambda: None,
        "replacement": lambda: torch_data.RandomSampler(rows, replacement=True, generator=own),
        "more than there are": lambda: torch_data.RandomSampler(rows, num_samples=count + 5, generator=own),
        "weighted": lambda: torch_data.WeightedRandomSampler([1.0 + n for n in range(count)], count, generator=own),
        "subset": lambda: torch_data.SubsetRandomSampler(range(1, count), generator=own),
        "own": lambda: OwnSampler(count, False), "counts epochs": lambda: OwnSampler(count, True),
        "a list": lambda: list(range(count))[::-1],
        "batches of indices": lambda: torch_data.BatchSampler(torch_data.RandomSampler(rows, generator=own), 3, False),
    }  # fmt: skip
    if order == "own batches":
        more = {name: one for name, one in more.items() if name not in ("batch_size", "drop_last")}
        return resumable(torch_data.DataLoader(rows, batch_sampler=OwnBatches(count), **more))
    if order in ("no batches", "batches of indices"):
        more |= {"batch_size": None, "drop_last": False}
    return resumable(torch_data.DataLoader(rows, sampler=samplers[order](), shuffle=order == "shuffle" or None, **more))


def model_of(kind: str) -> nn.Sequential:
    """Three inputs, one output."""
    first, last = nn.Linear(3, 4), nn.Linear(4, 4)
    norm: nn.Module = nn.BatchNorm1d(4) if kind == "batch norm" else nn.Identity()
    if kind == "spectral norm":
        last = nn.utils.parametrizations.spectral_norm(last)
    if kind == "weight norm":
        last = nn.utils.parametrizations.weight_norm(last)
    again = nn.Linear(4, 4)
    if kind == "tied":
        again.weight = last.weight
    return nn.Sequential(first, norm, nn.Tanh(), nn.Dropout(0.3), last, again, nn.Linear(4, 1))


class Program:
    """What a start trains."""

    def __init__(self, chosen: Mapping[str, Any], here: Here) -> None:
        self.chosen, self.here = chosen, here
        self.model = model_of(chosen["model"])
        self.optimizer = OPTIMIZERS[chosen["optimizer"]](self.model.parameters())
        self.scheduler = SCHEDULERS[chosen["scheduler"]](self.optimizer)
        self.loader, self.second = loader_of(chosen, 3), loader_of(chosen, 4)
        self.inner: Iterator[Any] = iter(())
        self.at = {"epoch": 0, "batches": 0, "of epoch": 0, "loss": 0.0}
        self.grads: dict[str, Any] = {}
        self.step = 0
        self.average = self._average()

    def _average(self) -> Any:
        if self.chosen["average"] == "averaged model":
            return torch.optim.swa_utils.AveragedModel(self.model)
        copies = {name: one.detach().clone() for name, one in self.model.named_parameters()}
        kinds: dict[str, Any] = {
            "a dict": dict,
            "a list": lambda one: list(one.values()),
            "a tuple": lambda one: (*one.values(), 1),
        }
        return kinds[self.chosen["average"]](copies) if self.chosen["average"] else None

    def state(self) -> dict[str, Any]:
        """What is saved."""
        own = PerRank if self.chosen["item"] == "of the rank" else lambda one: one
        found = {"model": self.model, "optimizer": self.optimizer, "at": self.at, "loader": own(self.loader)}
        found["rng"] = PerRank(RngState()) if self.chosen["rng"] == "of the rank" else RngState()
        if self.chosen["second"]:
            found["second"] = own(self.second)
        if self.chosen["within"]:
            self.grads = {name: one.grad for name, one in self.model.named_parameters()}
            found["grads"] = self.grads
        more = {"scheduler": self.scheduler, "average": self.average}
        return found | {name: one for name, one in more.items() if one is not None}

    def take(self, state: Mapping[str, Any], step: int) -> None:
        """What a resume has put there."""
        self.step = step if not self.chosen["within"] else self.at["batches"] // self.chosen["micro"]
        self.average = state.get("average")
        for name, one in self.model.named_parameters():
            one.grad = state["grads"][name] if self.chosen["within"] else None

    def train(self, batch: torch.Tensor) -> bool:
        """A batch; returns whether a step was made."""
        self.here.meets("batch")
        self.at["batches"] += 1
        self.at["of epoch"] += 1
        values = torch.atleast_2d(batch) / 10
        values = torch.cat([values, values]) if len(values) == 1 else values  # a batch norm wants two
        if self.chosen["second"] == "within":
            values = values + self._of_second().mean()

        def loss() -> Any:
            with torch.random.fork_rng():
                found = self.model(values + 0.01 * torch.randn_like(values)).square().mean() + self._regular()
            found.backward()
            return found

        if self.chosen["optimizer"] == "LBFGS":
            self.optimizer.zero_grad()
            self.at["loss"] = float(self.optimizer.step(loss).detach())
        else:
            self.at["loss"] = float(loss().detach())
            torch.rand(1)
            if self.at["batches"] % self.chosen["micro"]:
                return False
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._behind()
        return True

    def _regular(self) -> Any:
        return 0.01 * sum(one.square().sum() for one in self.model[-1].parameters())

    def _of_second(self) -> torch.Tensor:
        for _ in range(3):
            with contextlib.suppress(StopIteration):
                return next(self.inner)
            self.inner = iter(self.second)
        return torch.zeros(1)

    def _behind(self) -> None:
        """A step."""
        self.step += 1
        if self.scheduler is not None:
            self.scheduler.step(*[self.at["loss"]] * (self.chosen["scheduler"] == "plateau"))
        if self.chosen["average"] == "averaged model":
            self.average.update_parameters(self.model)
        elif self.average is not None:
            of = self.average.values() if isinstance(self.average, dict) else self.average
            for one, other in zip(of, self.model.parameters(), strict=False):
                one.mul_(0.5).add_(other.detach(), alpha=0.5)


def start(draw: Draw, here: Here) -> None:
    """The program."""
    chosen = _choose(draw)
    program = Program(chosen, here)
    rules = {
        "": Retention(), "last": Retention(keep_last=2), "every": Retention(keep_last=1, keep_every_steps=4),
        "best": Retention(keep_last=1, keep_best=2, metric="loss"),
    }  # fmt: skip
    config = CheckpointConfig(
        retention=rules[chosen["retention"]], snapshot=chosen["snapshot"], max_in_flight=chosen["in flight"]
    )
    with inline_saves() if chosen["inline"] else contextlib.nullcontext(), Checkpointer(here.out, config) as ckpt:
        state = program.state()
        info = ckpt.resume(state)
        if chosen["resumes"] == "twice":
            info = ckpt.resume(state)
        if info is not None:
            program.take(state, info.step)
        here.note("resumed", [info and info.step, {}])
        _loop(program, ckpt, here)
    here.result("at", [program.at["batches"], program.at["loss"]])
    here.result("kept", sorted(one.name for one in here.out.glob("step-*")))


def _loop(program: Program, ckpt: Checkpointer, here: Here) -> None:
    chosen = program.chosen
    while program.step < _STEPS:
        for loader in (program.loader, program.second):
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(program.at["epoch"])
        pairs = zip(program.loader, program.second, strict=True) if chosen["second"] == "beside" else program.loader
        for found in pairs:
            if chosen["breaks"] and program.at["of epoch"] >= chosen["breaks"]:
                break
            batch = found[0] + found[1].mean() if chosen["second"] == "beside" else found
            is_step = program.train(batch)
            if chosen["at"] != "at the ends of epochs":
                _save_in_the_loop(program, ckpt, here, is_step)
            if program.step == _STEPS:
                break
        program.at.update({"epoch": program.at["epoch"] + 1, "of epoch": 0})
        if chosen["at"] != "in the loop" and (chosen["within"] or not program.at["batches"] % chosen["micro"]):
            _save(program, ckpt, here)


def _save_in_the_loop(program: Program, ckpt: Checkpointer, here: Here, is_step: bool) -> None:
    if program.chosen["within"]:
        if program.at["batches"] % program.chosen["every"] == 0:
            _save(program, ckpt, here)
    elif is_step and program.step % program.chosen["every"] == 0:
        _save(program, ckpt, here)


def _save(program: Program, ckpt: Checkpointer, here: Here) -> None:
    step = program.at["batches"] if program.chosen["within"] else program.step
    handle = ckpt.save(step, program.state(), metrics={"loss": program.at["loss"]})
    if program.chosen["waits"]:
        handle.result()
    here.meets("save")
    if program.chosen["export"] and step % 3 == 0:
        ckpt.export(program.model, here.out.parent / f"{here.out.name}-weights")
