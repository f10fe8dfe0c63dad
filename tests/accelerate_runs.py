"""A small training with an Accelerator in which everything random takes part, and Accelerators made anew in one process."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import threading
from pathlib import Path

import numpy
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch.utils.data import DataLoader, TensorDataset

from kit.limits import QUICK
from safe_ckpt import CheckpointConfig
from safe_ckpt.accelerate import register

CONFIG = CheckpointConfig(timeouts=QUICK)


class Tracker(GeneralTracker):
    """Keeps what is said, and on which thread."""

    name = "ours"
    requires_logging_directory = False

    def __init__(self, name="ours"):
        super().__init__()
        self.name = name
        self.heard = []

    @property
    def tracker(self):
        return self.heard

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **_):
        self.heard.append((step, values, threading.current_thread()))


class Counter:
    """An object of the user's that is registered for checkpointing."""

    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def seed(number):
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def make(folder=None, *, limit=None, automatic=True, iteration=0, **more):
    project = ProjectConfiguration(
        None if folder is None else str(folder),
        automatic_checkpoint_naming=automatic and folder is not None,
        total_limit=limit,
        iteration=iteration,
    )
    return Accelerator(cpu=True, project_config=project, **more)


@contextlib.contextmanager
def fresh():
    """Accelerate keeps its state in the process: within this nothing of an earlier Accelerator is left."""
    forget()
    try:
        yield
    finally:
        forget()


def forget():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Training:
    """Dropout, numpy and Python randomness in the step; two models, two optimizers, a scheduler, an object of the user's."""

    def __init__(self, accelerator, width=4, number=0, data=None, wrap=lambda loader: loader, **loading):
        seed(number)
        self.accelerator = accelerator
        # With several ranks each has running averages of its own, and rank 0's are saved.
        norm = torch.nn.BatchNorm1d if accelerator.num_processes == 1 else torch.nn.LayerNorm
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), norm(width), torch.nn.Linear(width, 2))
        self.side = torch.nn.Linear(2, 2)
        self.side.tied = self.side.weight  # saved once, loaded twice
        self.drop = torch.nn.Dropout(0.5)
        optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=min(0.1, 0.4 / width)
        )  # a wide net would go to infinity
        other = torch.optim.SGD(self.side.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
        data = TensorDataset(torch.arange(24.0).repeat(4, 1).T) if data is None else data
        loader = wrap(DataLoader(data, **{"batch_size": 4, "shuffle": True, **loading}))
        prepared = accelerator.prepare(self.net, self.side, optimizer, other, scheduler, loader)
        self.model, self.head, self.optimizer, self.other, self.scheduler, self.loader = prepared
        self.counter, self.seen = Counter(), []
        accelerator.register_for_checkpointing(self.counter)

    def step(self, batch):
        self.seen.append(batch[0][:, 0].tolist())
        x = batch[0] * (1 + numpy.random.rand() + random.random())
        loss = self.drop(self.head(self.model(x))).pow(2).mean()
        for optimizer in (self.optimizer, self.other):
            optimizer.zero_grad()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.other.step()
        self.scheduler.step()
        self.counter.count += 1
        return loss.item()

    def epoch(self, after_step=lambda _: None):
        for batch in self.loader:
            self.step(batch)
            after_step(self.counter.count)

    def scramble(self):
        """Leave nothing from which a load that loads nothing could look right."""
        with torch.no_grad():
            for tensor in (*self.net.state_dict().values(), *self.side.state_dict().values()):
                tensor.fill_(7)
        for optimizer in (self.optimizer.optimizer, self.other.optimizer):
            optimizer.state.clear()
            optimizer.param_groups[0]["lr"] = 7.0
        self.counter.count = -1
        seed(99)

    def fingerprint(self):
        """Of everything that training goes on from, generators included."""
        digest = hashlib.sha256()
        tensors = [*self.net.state_dict().values(), *self.side.state_dict().values()]
        for optimizer in (self.optimizer.optimizer, self.other.optimizer):
            tensors += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
            digest.update(repr([group["lr"] for group in optimizer.param_groups]).encode())
        for tensor in tensors:
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        digest.update(repr(self.scheduler.scheduler.last_epoch).encode() + repr(self.counter.count).encode())
        digest.update(repr(random.getstate()).encode() + numpy.random.get_state()[1].tobytes())
        digest.update(torch.get_rng_state().numpy().tobytes())
        return digest.hexdigest()[:16]


def train(made, parts, steps):
    """Train a model of four inputs, its optimizer and its schedule, all of them prepared."""
    model, optimizer, scheduler = parts
    for _ in range(steps):
        made.backward(model(torch.rand(3, 4)).pow(2).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def stateful():
    return DataLoaderConfiguration(use_stateful_dataloader=True)


def shared_memory():
    """What this process holds open of ours."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [target for target in found if "safe_ckpt" in target]


@contextlib.contextmanager
def registered(folder, config=CONFIG, **more):
    accelerator = make(folder, **more)
    with register(accelerator, config) as handle:
        yield accelerator, handle


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def checkpoints(folder):
    return names(folder / "checkpoints")
