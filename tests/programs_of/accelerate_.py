"""Loops with an Accelerator that safe_ckpt is registered on: on 1 rank mainly, on 2 gloo ranks now and then."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from kit.limits import QUICK
from programs_of import processes
from programs_of.draw import Draw
from programs_of.runner import Verdict
from programs_of.start import Here
from safe_ckpt import CheckpointConfig
from safe_ckpt.accelerate import SafeCheckpointPlugin, register
from safe_ckpt.data import resumable
from safe_ckpt.errors import NoValidCheckpointError

FIXED = (7, 15, 80)  # dispatched on 2 ranks; side by side; an evaluation that is left
_EPOCHS = 3
_CONFIG = CheckpointConfig(timeouts=QUICK)


class Accelerated:
    """See the module."""

    def __init__(self, stock: bool = False) -> None:
        self._stock = stock

    def run(self, draw: Draw, folder: Path) -> Verdict:
        """Whole, killed once or twice, and started again."""
        one = _choose(draw)
        kills = processes.kills_of(draw, "batch", "save", "saved", "evaluated", ranks=one.ranks)

        def started(name: str, **more: Any) -> processes.Started:
            return processes.start("accelerate_", draw, folder, name, ranks=one.ranks, stock=self._stock, **more)

        whole = started("whole", out="whole")
        if whole.error:
            return processes.failed(whole)
        wrong: list[str] = []
        for number, kill in enumerate([*kills, None]):
            there = sorted(path.parent.name for path in (folder / "stopped").glob("**/manifest.json"))
            last = started(f"start-{number}", out="stopped", number=number, kill=kill)
            if last.error:
                return processes.failed(last)
            wrong += [f"start {number}: {text}" for text in processes.began_anew(there, last)]
            wrong += processes.differences(whole.lines, last.lines)
        return processes.verdict_of(
            [*wrong, *processes.results_that_differ(whole, last)],
            limits=lambda text: one.accumulation == "not at the end" and one.saves != "steps",  # within a window
        )


def _choose(draw: Draw) -> SimpleNamespace:
    """The choices of both sides."""
    one = SimpleNamespace(ranks=draw.among("ranks", 1, 1, 1, 1, 1, 1, 2))
    stays = draw.flag("workers stay", of=8)  # and what they draw first is shuffled by
    one.loader = draw.among("loader", "stateful", "resumable", "plain") if not stays else "stateful"
    one.data = draw.among("data", "map", "draws", "placed", "stream") if one.loader == "resumable" else "map"
    _choose_loading(draw, one)
    _choose_saves(draw, one)
    if stays:
        one.workers, one.saves = 2, "steps"
        one.stay, one.shuffle, one.generator, one.seedable = True, True, False, False
    one.micro = draw.among("micro", 1, 2, 3)
    one.accumulation = draw.among("accumulation", "accumulate", "not at the end", "by hand") if one.micro > 1 else ""
    one.scheduler = draw.among("scheduler", "", "prepared", "registered", "apart")
    one.optimizer = draw.among("optimizer", "SGD", "AdamW", "Adagrad")
    one.models = draw.among("models", 1, 2)
    one.evaluation = draw.among("evaluation", "", "whole", "break", "next")
    one.evaluated = draw.among("evaluated", "behind epochs", "within") if one.evaluation else ""
    one.evaluating = draw.among("evaluating", "plain", "alike", "shuffled") if one.evaluation else ""
    one.hook = draw.among("hook", "", "file", "weights")
    one.tracker = draw.flag("tracker")
    one.door = draw.among("door", "register", "config", "plugin")
    one.end = draw.among("end", "end_training", "wait", "free_memory")
    return one


def _choose_loading(draw: Draw, one: SimpleNamespace) -> None:
    is_stream = one.data in ("placed", "stream")
    one.shuffle = draw.flag("shuffle") and not is_stream
    one.generator = draw.flag("generator") and one.shuffle
    one.seedable = draw.flag("seedable")
    one.dispatch = draw.among("dispatch", None, True)
    one.even = draw.among("even", True, False)
    one.split = draw.flag("split")
    one.workers = draw.among("workers", 0, 0, 2)
    one.stay = draw.flag("stay") and one.workers > 0 and one.data != "stream"  # read again, they would draw anew
    one.batch = draw.among("batch", 2, 4) if one.split else draw.among("batch", 2, 3)
    one.rows = draw.among("rows", 12, 13, 7)
    one.drop_last = draw.flag("drop last") or (one.ranks > 1 and not one.even)  # else one rank has more batches
    one.second = draw.among("second", "", "beside", "behind")


def _choose_saves(draw: Draw, one: SimpleNamespace) -> None:
    one.names = draw.among("names", "automatic", "own", "same")
    one.limit = draw.among("limit", None, 2, 1) if one.names == "automatic" else None
    one.saves = draw.among("saves", "epochs", "steps", "both") if one.loader != "plain" else "epochs"
    one.every = draw.among("every", 2, 1, 3)
    one.skip = draw.among("skip", "", "method")
    one.set_epoch = draw.flag("set_epoch")
    one.waited = draw.flag("waited")
    one.pickle = draw.flag("pickle")


class Rows(Dataset):  # type: ignore[type-arg]
    """So many, each told by its number; ``draws`` adds something random."""

    def __init__(self, number: int, first: int = 0, *, draws: bool = False) -> None:
        self.number, self.first, self.draws = number, first, draws

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, at: int) -> torch.Tensor:
        row = torch.tensor([1.0, self.first + at, (self.first + at) % 5]) / 100  # tame: bad numbers are not resumed
        return row + 0.01 * torch.randn(3) if self.draws else row


class Stream(IterableDataset):  # type: ignore[type-arg]
    """The same as a stream; the workers take turns."""

    def __init__(self, number: int) -> None:
        self.rows = Rows(number)

    def __iter__(self) -> Any:
        info = get_worker_info()
        first, each = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.rows[at] for at in range(first, len(self.rows), each))


class Placed(IterableDataset):  # type: ignore[type-arg]
    """A stream that knows its place."""

    def __init__(self, number: int) -> None:
        self.rows, self.at = Rows(number), 0

    def __iter__(self) -> Any:
        info = get_worker_info()
        first, each = (0, 1) if info is None else (info.id, info.num_workers)
        self.at = self.at or first
        while self.at < len(self.rows):
            self.at += each
            yield self.rows[self.at - each]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class At:
    """Where the program is; registered for checkpointing."""

    def __init__(self) -> None:
        self.epoch = self.batches = self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


class Told(GeneralTracker):
    """A tracker of the user's."""

    name = "told"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    @property
    def tracker(self) -> Any:
        return self.rows

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.rows.append((values, step))


class Program:
    """The script, with its parts as attributes.

    Args:
        one: the choices.
        here: of this start.
    """

    def __init__(self, one: SimpleNamespace, here: Here) -> None:
        self.one, self.here, self.at = one, here, At()
        naming = one.names == "automatic"
        self.project = ProjectConfiguration(str(here.out), automatic_checkpoint_naming=naming, total_limit=one.limit)
        more: dict[str, Any] = {"log_with": [Told()]} if one.tracker else {}
        self.accelerator = Accelerator(
            cpu=True,
            project_config=self.project,
            dataloader_config=DataLoaderConfiguration(
                split_batches=one.split,
                dispatch_batches=one.dispatch,
                even_batches=one.even,
                use_seedable_sampler=one.seedable,
                use_stateful_dataloader=one.loader == "stateful",
            ),
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=1 if one.accumulation == "by hand" else one.micro,
                sync_with_dataloader=one.accumulation != "not at the end",
            ),
            step_scheduler_with_optimizer=one.scheduler != "apart",
            **more,
        )
        self.handle = None if here.stock else self._register()
        self._make()
        if one.tracker:
            self.accelerator.init_trackers("programs")

    def _register(self) -> Any:
        if self.one.door == "plugin":
            return SafeCheckpointPlugin(_CONFIG).register(self.accelerator)
        return register(self.accelerator, _CONFIG if self.one.door == "config" else None)

    def _make(self) -> None:
        one, accelerator = self.one, self.accelerator
        nets = [
            torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
            for _ in range(one.models)
        ]
        optimizers = [getattr(torch.optim, one.optimizer)(net.parameters(), lr=1e-2) for net in nets]
        self.nets = [accelerator.prepare(net) for net in nets]
        self.optimizers = [accelerator.prepare(optimizer) for optimizer in optimizers]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9) for optimizer in optimizers]
        if one.scheduler in ("prepared", "apart"):
            self.schedulers = [accelerator.prepare(scheduler) for scheduler in self.schedulers]
        data = {"placed": Placed, "stream": Stream}.get(one.data, Rows)(one.rows)
        data.draws = one.data == "draws"
        self.loader = self._loader(data, one.loader, shuffle=one.shuffle)
        self.second = self._loader(Rows(one.rows, 100), one.loader, shuffle=one.shuffle) if one.second else None
        kind = "plain" if one.evaluating == "plain" else one.loader
        self.others = self._loader(Rows(6, 200), kind, shuffle=one.evaluating == "shuffled") if one.evaluation else None
        accelerator.register_for_checkpointing(self.at)
        if one.scheduler == "registered":
            accelerator.register_for_checkpointing(*self.schedulers)
        if one.hook:
            accelerator.register_save_state_pre_hook(self._before_save)
            accelerator.register_load_state_pre_hook(self._before_load)

    def _loader(self, data: Any, kind: str, *, shuffle: bool) -> Any:
        one = self.one
        workers = {"num_workers": one.workers, "persistent_workers": one.stay} if kind == one.loader else {}
        generator = torch.Generator().manual_seed(5) if one.generator and shuffle else None
        loader = DataLoader(data, one.batch, shuffle=shuffle, generator=generator, drop_last=one.drop_last, **workers)
        if kind == "resumable" and not self.here.stock:
            loader = resumable(loader, skip="read" if one.data == "stream" and isinstance(data, Stream) else None)
        return self.accelerator.prepare(loader)

    def _before_save(self, models: list[Any], weights: list[Any], folder: str) -> None:
        self.here.meets("hook")
        if self.accelerator.is_main_process:
            Path(folder, "mine.json").write_text(json.dumps(vars(self.at)))
            if self.one.hook == "weights":
                torch.save(weights, Path(folder, "mine.pt"))
        if self.one.hook == "weights":
            weights.clear()

    def _before_load(self, models: list[Any], folder: str) -> None:
        if json.loads(Path(folder, "mine.json").read_text())["steps"] < 1:
            raise AssertionError("nothing was done at the save")
        if self.one.hook == "weights":
            saved = torch.load(Path(folder, "mine.pt"))
            while models:
                models.pop().load_state_dict(saved.pop())

    def resume(self) -> None:
        """From what is there."""
        if self.one.names == "automatic":
            with contextlib.suppress(
                NoValidCheckpointError, *([FileNotFoundError, IndexError] if self.here.stock else [])
            ):
                self.accelerator.load_state()
        elif found := max(self.here.out.glob("state_*"), key=lambda path: int(path.name[6:]), default=None):
            self.accelerator.load_state(str(found))
        self.here.note("begins", self.at.steps)

    def save(self) -> None:
        """As the choices say."""
        self.here.meets("save")
        name = {"own": f"state_{self.at.steps}", "same": "state_0"}.get(self.one.names)
        path = None if name is None else str(self.here.out / name)
        more = {} if self.here.stock else {"async_save": not self.one.waited}
        self.accelerator.save_state(path, safe_serialization=not self.one.pickle, **more)
        self.here.meets("saved")

    def train(self) -> None:
        """To the end."""
        one, at = self.one, self.at
        begins = at.epoch
        # Then the loader takes the next epoch, as the page says; what comes behind the loop is still to be done.
        is_over = bool(at.batches) and one.loader == "stateful" and at.batches == self.length()
        for epoch in range(at.epoch, _EPOCHS):
            if epoch > begins or not is_over:
                self._epoch(self._begun(epoch, is_first=epoch == begins))
            at.epoch, at.batches = epoch + 1, 0
            if one.second == "behind":
                for batch in self.second:
                    self.step(batch, boundary=True)
            if one.evaluated == "behind epochs":
                self.evaluate()
            if one.saves != "steps":
                self.save()

    def _begun(self, epoch: int, *, is_first: bool) -> Any:
        one, loader = self.one, self.loader
        if one.set_epoch:
            loader.set_epoch(epoch)
        return self.accelerator.skip_first_batches(loader, self.at.batches) if is_first and one.skip else loader

    def length(self) -> int:
        return len(self.loader)

    def _epoch(self, loader: Any) -> None:
        one, at = self.one, self.at
        beside = (
            zip(loader, self.second, strict=False) if one.second == "beside" else ((batch, None) for batch in loader)
        )
        for batch, other in beside:
            self.here.meets("batch")
            at.batches += 1
            by_hand = one.accumulation == "by hand"
            if by_hand:
                stepped = at.batches % one.micro == 0 or self.accelerator.gradient_state.end_of_dataloader
                with contextlib.nullcontext() if stepped else self.accelerator.no_sync(self.nets[0]):
                    self.step(batch if other is None else batch.sum() + other, boundary=stepped)
            else:
                with self.accelerator.accumulate(*self.nets):
                    self.step(batch if other is None else batch.sum() + other, boundary=True)
                stepped = self.accelerator.sync_gradients
            if not stepped:
                continue
            at.steps += 1
            if self.one.tracker:
                self.accelerator.log(
                    {"steps": at.steps, "rate": self.optimizers[0].param_groups[0]["lr"]}, step=at.steps
                )
            if one.evaluated == "within" and at.steps % 3 == 2:
                self.evaluate()
            if one.saves != "epochs" and at.steps % one.every == 0:
                self.save()

    def step(self, batch: torch.Tensor, *, boundary: bool) -> None:
        """Of all models and optimizers."""
        losses = [net(batch + 0.01 * torch.randn_like(batch)).pow(2).mean() for net in self.nets]
        self.accelerator.backward(torch.stack(losses).sum())
        if not boundary:
            return
        for optimizer in self.optimizers:
            optimizer.step()
        if self.one.scheduler:
            for scheduler in self.schedulers:
                if self.one.scheduler != "registered" or self.accelerator.sync_gradients:
                    scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def evaluate(self) -> None:
        """Of a few batches or all."""
        for net in self.nets:
            net.eval()
        found = []
        with torch.no_grad():
            if self.one.evaluation == "next":
                found.append(next(iter(self.others)).sum().item())
            for number, batch in enumerate(self.others if self.one.evaluation != "next" else ()):
                found.append(self.accelerator.gather_for_metrics(self.nets[0](batch)).sum().item())
                if number == 1 and self.one.evaluation == "break":
                    break
        for net in self.nets:
            net.train()
        self.here.event(self.at.steps, f"evaluated {found}")
        self.here.meets("evaluated")

    def end(self) -> None:
        """What is told at the end."""
        if self.handle is not None and self.one.end == "wait":
            self.handle.wait()
        elif self.one.end == "free_memory":
            self.accelerator.free_memory()
        else:
            self.accelerator.end_training()
        self.here.result("at", vars(self.at))
        if self.here.rank == 0:  # which deletes
            self.here.result("kept", kept(self.here.out))


def kept(folder: Path) -> list[str]:
    """The files of all checkpoints."""
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in files if not re.search(r"(^|/)[._]safe_ckpt", name))


def start(draw: Draw, here: Here) -> None:
    """The program."""
    one = _choose(draw)
    if one.ranks > 1:
        os.environ["MASTER_ADDR"] = "localhost"  # Accelerate asks for it, and uses the group that is there
        torch.distributed.init_process_group(
            "gloo", f"file://{here.records / 'store'}", rank=here.rank, world_size=one.ranks
        )
    program = Program(one, here)
    program.resume()
    program.train()
    program.end()
    accelerate.state.PartialState().destroy_process_group()
