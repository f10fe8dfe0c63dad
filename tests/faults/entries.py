"""The ways into a save that the fault tests go through: the same faults, the same promises.

Every way saves numbered contents of one kind: each element of each tensor says to which save it belongs.
"""

import contextlib
from pathlib import Path

import torch

from accelerate_runs import forget, make
from kit.inside import engine_of, writer_of
from safe_ckpt import Checkpointer, PerRank
from safe_ckpt.accelerate import register
from safe_ckpt.core.formats.manifest import read_manifest


class ThroughCheckpointer:
    """``Checkpointer.save`` and ``resume``."""

    like_stock = False
    large_files = r"own\.rank0000|model\.safe|optimizer\.pt"

    def __init__(self, folder, config, *, rank=0, size=1000):
        self.folder, self.rank, self.size = folder, rank, size
        self._ckpt = Checkpointer(folder, config)
        self.engine, self.writer = engine_of(self._ckpt), writer_of(self._ckpt)

    def save(self, number):
        return self._ckpt.save(number, self._content(number))

    def load(self):
        """The number of the save that came back, whole; None when there is none."""
        found = {
            "model": {"w": torch.zeros(self.size)},
            "optimizer": None,
            "own": PerRank({"t": torch.zeros(self.size)}),
            "epoch": 0,
        }
        info = self._ckpt.resume(found)
        if info is None:
            return None
        numbers = {*found["model"]["w"].unique().tolist(), *found["optimizer"]["t"].unique().tolist(), found["epoch"]}
        numbers |= {float(v) - 1000 * self.rank for v in found["own"].value["t"].unique()}
        if numbers != {info.step} or found["optimizer"]["note"] != (info.step, None):
            raise AssertionError(f"a mix: {numbers} as {info.step}")
        return info.step

    def _content(self, number):
        return {
            "model": {"w": torch.full((self.size,), float(number))},
            "optimizer": {"note": (number, None), "t": torch.full((self.size,), number)},
            "own": PerRank({"t": torch.full((self.size,), float(number) + 1000 * self.rank)}),
            "epoch": number,
        }

    def path(self, number):
        return self.folder / f"step-{number:08d}"

    def close(self):
        self._ckpt.close()


class ThroughAccelerate:
    """``accelerator.save_state`` and ``load_state``, with Accelerate's own naming."""

    large_files = r"model\.safe|optimizer\.bin"
    like_stock = True  # without its manifest a checkpoint may be one that Accelerate itself wrote

    def __init__(self, folder, config, *, rank=0, size=1000):
        forget()
        self.folder, self.rank = folder, rank
        self._model = torch.nn.Linear(size, 1)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1.0, momentum=0.9)
        self._number = 0
        self._accelerator = make(folder)
        # Not prepared by DDP: its own collectives would be in the way of ranks that are lost.
        self._accelerator._models.append(self._model)
        self._accelerator._optimizers.append(self._optimizer)
        self._accelerator.register_for_checkpointing(self)
        self._handle = register(self._accelerator, config)
        self.engine, self.writer = engine_of(self._handle), writer_of(self._handle)

    def state_dict(self):
        return {"number": self._number}

    def load_state_dict(self, state):
        self._number = state["number"]

    def save(self, number):
        self._number = number
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.fill_(number)
                self._optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, number)
        torch.manual_seed(1000 * self.rank + number)
        self._accelerator.save_state(step=number)
        return self._handle.saver.tracking._flights[-1][0]

    def load(self):
        self._number = -1
        self._accelerator.load_state()
        buffers = [state["momentum_buffer"] for state in self._optimizer.state.values()]
        numbers = {float(v) for t in (*self._model.parameters(), *buffers) for v in t.detach().unique()}
        numbers.add(torch.initial_seed() - 1000 * self.rank)
        if numbers != {self._number}:
            raise AssertionError(f"a mix: {numbers} as {self._number}")
        return self._number

    def path(self, number):
        there = [path for path in (self.folder / "checkpoints").iterdir() if (path / "manifest.json").exists()]
        return next(path for path in there if read_manifest(path).step == number)

    def close(self):
        self._handle.remove()


ENTRIES = {"Checkpointer": ThroughCheckpointer, "accelerator.save_state": ThroughAccelerate}


@contextlib.contextmanager
def entered(name, folder, config, **more):
    """One of them, closed at the end."""
    entry = ENTRIES[name](Path(folder), config, **more)
    try:
        yield entry
    finally:
        entry.close()
