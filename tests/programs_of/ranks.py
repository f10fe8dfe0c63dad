"""Plain loops on several ranks with a Checkpointer: loaders, generators, and restarts on other numbers of ranks."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from programs_of import processes
from programs_of.chains import Chain
from programs_of.draw import Draw
from programs_of.runner import Verdict
from programs_of.start import Here
from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, Retention, RngState
from safe_ckpt.data import resumable
from safe_ckpt.tools.audit.recorder import digest

FIXED = (86, 93, 94)
"""Seeds that together cover much."""
_EPOCHS = 3


class Ranks:
    """See the module."""

    def run(self, draw: Draw, folder: Path) -> Verdict:
        """Whole, killed or stopped once or twice, and started again, perhaps on other ranks."""
        chosen = _choose(draw)
        kills = processes.kills_of(draw, "batch", "save", "end", steps=12, ranks=2, least=3)
        ranks = [chosen["ranks"], chosen["ranks again"], chosen["ranks at last"]][: len(kills) + 1]

        def is_same(number: int) -> bool:
            return ranks[number] == ranks[0] and not chosen["batch again"]

        chain = Chain(
            "ranks", draw, folder, kills, ranks, is_exact=lambda number: not number or is_same(number),
            more={"signal": chosen["signal"]},
        )  # fmt: skip
        wrong = chain.run()
        return wrong or processes.verdict_of([*chain.wrong, *_samples(chain, chosen)], chain.came_to())


def _choose(draw: Draw) -> dict[str, Any]:
    """The choices of both sides."""
    found = {
        "ranks": draw.among("ranks", 2, 2, 1, 3),
        "order": draw.among("order", "shared", "shared in order", "own", "own in order", "stream", "a function", "batches"),
        "rows": draw.among("rows", 24, 23, 13, 7),
        "batch": draw.among("batch", 2, 3, 1),
        "drop last": draw.flag("drop last", of=3),
        "workers": draw.among("workers", 0, 0, 2, 1),
        "persistent": draw.flag("persistent"),
        "prefetch": draw.among("prefetch", 2, 1, 3),
        "generator": draw.among("generator", "", "of the loader"),
        "per rank": draw.flag("per rank"),
        "draws": draw.among("draws", "", "data", "loop", "both"),
        "wrap": draw.among("wrap", "by hand", "DDP"),
        "optimizer": draw.among("optimizer", "SGD", "AdamW", "Adagrad"),
        "micro": draw.among("micro", 1, 2),
        "scheduler": draw.flag("scheduler"),
        "average": draw.flag("average"),
        "scaler": draw.flag("scaler", of=3),
        "validation": draw.among("validation", "", "a loader", "a resumable loader"),
        "second": draw.flag("second loader", of=3),
        "every": draw.among("every", 1, 2, 3),
        "at": draw.among("saves", "in the loop", "in the loop", "both", "at the ends of epochs"),
        "breaks": draw.among("breaks behind", 0, 0, 3),
        "retention": draw.among("retention", "", "last", "best"),
        "snapshot": draw.among("snapshot", "eager", "overlapped"),
        "in flight": draw.among("in flight", 1, 2),
        "waits": draw.flag("waits", of=3),
        "signal": draw.among("signal", 0, 0, 3, 5),
        "batch again": draw.among("batch again", 0, 0, 0, 1),
    }  # fmt: skip
    if draw.flag("more ranks", of=6):  # what a rank that has saved nothing goes on with
        found |= {
            "ranks": draw.among("fewer ranks", 1, 2),
            "order": draw.among("order of all", "shared", "shared in order"),
            "per rank": True,
        }
        found |= {"ranks again": 3, "ranks at last": 3}
    most = max(found["ranks"], 3)
    found["second"] &= found["rows"] // (most * max(1, found["workers"])) >= found["batch"]  # it has batches
    if found["breaks"]:
        found["at"] = "in the loop"  # a save behind a loop that was left belongs to the epoch of that loop
        found["persistent"] = False  # what such workers draw ahead is not exact
    if not found["order"].startswith("shared") or found["batch again"] == found["batch"]:
        found["batch again"] = 0
    return {**_elsewhere(draw, found), **found}


def _elsewhere(draw: Draw, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of ranks of later starts: another one where one order is shared."""
    ranks = chosen["ranks"]
    if not draw.flag("elsewhere", of=3) or chosen["order"] not in ("shared", "shared in order", "a function"):
        return {"ranks again": ranks, "ranks at last": ranks}
    return {"ranks again": draw.among("ranks again", 1, 2, 3), "ranks at last": draw.among("ranks at last", 2, 1, 3)}


def _samples(chain: Chain, chosen: Mapping[str, Any]) -> list[str]:
    """Each sample comes once in each epoch, whatever the ranks, but for those that fill up the last batch."""
    if chain.came_to() != "equal elsewhere" or chosen["order"] == "a function" or chosen["breaks"]:
        return []
    seen: dict[int, Counter[int]] = {}
    last = len(chain.starts) - 1
    for number, one in enumerate(chain.starts):
        until = _reached(chain, number)
        for rank in one.told:
            for step, epoch, rows in one.notes("rows", rank):
                if number == last or until is None or step <= until:
                    seen.setdefault(epoch, Counter()).update(rows)
    most = max(chain.ranks)
    wrong = []
    for epoch, counted in seen.items():
        missing, twice = chosen["rows"] - len(counted), sum(counted.values()) - len(counted)
        if twice >= most or missing > (chosen["batch"] * most if chosen["drop last"] else 0):
            wrong.append(f"samples: {missing} missing and {twice} twice in epoch {epoch}")
    return wrong


def _reached(chain: Chain, number: int) -> int | None:
    """The last step of a start that counts: the place of the next one, or of one behind it that went further back."""
    places = [place or 0 for place in chain.places[number + 1 :]]
    return min(places, default=None)


class Rows(Dataset[Any]):
    """Row n, with noise where the data draw."""

    def __init__(self, count: int, draws: bool) -> None:
        self.count, self.draws = count, draws

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> torch.Tensor:
        noise = torch.rand(()) + random.random() + numpy.random.random() if self.draws else 0.0
        return torch.tensor([number, number / 7, noise], dtype=torch.float32)


class Stream(IterableDataset[Any]):
    """Rows of this rank and worker, with a place."""

    def __init__(self, rows: Rows, rank: int, size: int) -> None:
        self.rows, self.rank, self.size, self.at, self.begin = rows, rank, size, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        each = len(self.rows) // (self.size * workers)  # all ranks have as many batches
        mine = range(self.rank * workers + number, len(self.rows), self.size * workers)[:each]
        begin, self.begin = self.begin, 0
        for self.at in range(begin + 1, len(mine) + 1):
            yield self.rows[mine[self.at - 1]]

    def state_dict(self) -> dict[str, int]:
        """Where it is."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self.begin = self.at = state["at"]


def _loader(chosen: Mapping[str, Any], here: Here, seed: int, *, batch: int = 0) -> Any:
    rank, size, order = here.rank, _size(), chosen["order"]
    rows = Rows(chosen["rows"], chosen["draws"] in ("data", "both"))
    more: dict[str, Any] = {"batch_size": batch or chosen["batch"], "drop_last": chosen["drop last"]}
    if chosen["workers"]:
        more |= {"num_workers": chosen["workers"], "prefetch_factor": chosen["prefetch"]}
        more |= {"persistent_workers": chosen["persistent"]}
    if chosen["generator"]:
        more["generator"] = torch.Generator().manual_seed(seed + rank)
    if order == "stream":
        return resumable(DataLoader(Stream(rows, rank, size), **more))
    if order.startswith("own"):
        return resumable(DataLoader(rows, shuffle=order == "own", **more))
    sampler = DistributedSampler(
        rows, size, rank, shuffle=order != "shared in order", seed=seed, drop_last=chosen["drop last"]
    )
    if order == "batches":
        del more["drop_last"]
        return resumable(
            DataLoader(rows, batch_sampler=BatchSampler(sampler, more.pop("batch_size"), chosen["drop last"]), **more)
        )
    return resumable(DataLoader(rows, sampler=sampler, **more))


def _size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


class Program:
    """What a start trains."""

    def __init__(self, chosen: Mapping[str, Any], here: Here) -> None:
        self.chosen, self.here = chosen, here
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1))
        torch.manual_seed(100 + here.rank)
        is_wrapped = chosen["wrap"] == "DDP" and dist.is_initialized()
        self.model = (
            nn.parallel.DistributedDataParallel(self.net, find_unused_parameters=True) if is_wrapped else self.net
        )
        self.optimizer = getattr(torch.optim, chosen["optimizer"])(self.model.parameters(), lr=0.01)
        self.loader = _loader(chosen, here, 3, batch=chosen["batch again"] if here.number else 0)
        self.second = _loader(chosen, here, 4)
        self.rows_left: Iterator[Any] = iter(())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.9)
        self.average = torch.optim.swa_utils.AveragedModel(self.net) if chosen["average"] else None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3) if chosen["scaler"] else None
        self.validation: Any = DataLoader(Rows(5, False), 2, shuffle=True)
        if chosen["validation"] == "a resumable loader":
            self.validation = resumable(self.validation)
        self.step = self.batches = 0
        self.at = {"epoch": 0, "batches": 0}
        self.loss = 0.0

    def state(self) -> dict[str, Any]:
        """What is saved."""
        is_of_all = self.chosen["order"] in ("shared", "shared in order", "batches")
        is_own = not is_of_all or self.chosen["per rank"] or (self.chosen["workers"] and self.chosen["draws"])
        found = {"model": self.model, "optimizer": self.optimizer, "rng": PerRank(RngState()), "at": self.at}
        if self.chosen["order"] != "a function":
            found["loader"] = PerRank(self.loader) if is_own else self.loader
        if self.chosen["second"]:
            found["second"] = PerRank(self.second) if is_own else self.second
        if self.chosen["validation"] == "a resumable loader":
            found["validation"] = PerRank(self.validation)
        more = {"scheduler": self.scheduler, "average": self.average, "scaler": self.scaler}
        return found | {name: one for name, one in more.items() if one is not None}

    def all(self) -> dict[str, Any]:
        """Digests of what is saved."""
        found: dict[str, Any] = {name: digest(one, 1 << 20) for name, one in self.net.state_dict().items()}
        for number, one in enumerate(self.net.parameters()):
            found |= {
                f"state {key} of {number}": digest(torch.as_tensor(v), 1 << 20)
                for key, v in self.optimizer.state[one].items()
            }
        found |= {"at": dict(self.at), "scheduler": str(self.scheduler.state_dict())}
        found |= {"average": "" if self.average is None else digest(self.average.module[0].weight, 1 << 20)}
        return found | {
            "own torch": digest(torch.get_rng_state(), 1 << 20),
            "own python": zlib.crc32(repr(random.getstate()).encode()),
        }

    def batches_of(self, epoch: int) -> Iterator[Any]:
        """Of one epoch, what is left of it."""
        self.at["epoch"] = epoch
        if self.chosen["order"] != "a function":
            for sampler in (self.loader.sampler, getattr(self.loader.batch_sampler, "sampler", None)):
                if isinstance(sampler, DistributedSampler):
                    sampler.set_epoch(epoch)
            yield from self.loader
            return
        for at in range(self.at["batches"], 8):
            order = torch.randperm(24, generator=torch.Generator().manual_seed(epoch))[3 * at : 3 * at + 3]
            yield torch.stack([Rows(24, False)[int(one)] for one in order])

    def train(self, batch: torch.Tensor) -> bool:
        """A batch; returns whether a step was made."""
        self.here.meets("batch")
        self.at["batches"] += 1
        self.batches += 1
        noise = torch.rand(1) * random.random() if self.chosen["draws"] in ("loop", "both") else 0.0
        self.here.note("rows", [self.step + 1, self.at["epoch"], batch[:, 0].int().tolist()])
        if self.chosen["second"]:
            batch = batch + self._of_second().mean()
        loss = self.model(batch / 10 + noise).square().mean() / self.chosen["micro"]
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.batches % self.chosen["micro"]:
            return False
        if self.model is self.net and dist.is_initialized():
            for one in self.net.parameters():
                dist.all_reduce(one.grad)
        self._step()
        self.loss = float(loss.detach())
        return True

    def _of_second(self) -> torch.Tensor:
        for _ in range(3):
            with contextlib.suppress(StopIteration):
                return next(self.rows_left)
            self.rows_left = iter(self.second)
        return torch.zeros(1)

    def _step(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        if self.average is not None:
            self.average.update_parameters(self.net)
        self.step += 1


def start(draw: Draw, here: Here) -> None:
    """The program."""
    chosen = _choose(draw)
    if _size() > 1:
        store = dist.FileStore(str(here.records / "store"), _size())
        dist.init_process_group("gloo", store=store, rank=here.rank, world_size=_size())
    program = Program(chosen, here)
    rules = {
        "": Retention(),
        "last": Retention(keep_last=2),
        "best": Retention(keep_last=1, keep_best=1, metric="loss"),
    }
    config = CheckpointConfig(
        retention=rules[chosen["retention"]], snapshot=chosen["snapshot"], max_in_flight=chosen["in flight"],
        save_on_signals=("SIGTERM",) if chosen["signal"] else (),
    )  # fmt: skip
    with Checkpointer(here.out, config) as ckpt:
        _loop(program, ckpt, here)
    here.result("at", [program.step, program.at])
    if not chosen["signal"] and here.rank == 0:  # which deletes
        here.result("kept", sorted(one.name for one in here.out.glob("step-*")))
    if dist.is_initialized():
        dist.destroy_process_group()


def _loop(program: Program, ckpt: Checkpointer, here: Here) -> None:
    chosen = program.chosen
    if (info := ckpt.resume(program.state())) is not None:
        program.step, program.batches = info.step, info.step * chosen["micro"]
    here.note("resumed", [info and info.step, program.all()])
    for epoch in range(program.at["epoch"], _EPOCHS):
        for batch in program.batches_of(epoch):
            if chosen["breaks"] and program.at["batches"] >= chosen["breaks"]:
                break
            if program.train(batch) and _saves(program, ckpt, here):
                return
        program.at.update(epoch=epoch + 1, batches=0)
        for values in program.validation if chosen["validation"] else ():
            program.loss += float(program.net(values / 10).detach().mean())
        if chosen["at"] != "in the loop" and not program.batches % chosen["micro"] and program.step:
            _save(program, ckpt, here)
        here.meets("end")


def _saves(program: Program, ckpt: Checkpointer, here: Here) -> bool:
    """Behind a step; returns whether the job is to stop."""
    chosen = program.chosen
    if here.more.get("signal") == program.step and not here.number and here.rank == chosen["ranks"] - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    stops = bool(chosen["signal"]) and ckpt.stop_requested
    if stops or (chosen["at"] != "at the ends of epochs" and not program.step % chosen["every"]):
        _save(program, ckpt, here)
    return stops


def _save(program: Program, ckpt: Checkpointer, here: Here) -> None:
    here.note("saved", [program.step, program.all()])
    handle = ckpt.save(program.step, program.state(), metrics={"loss": program.loss})
    if program.chosen["waits"]:
        handle.result()
    here.meets("save")
