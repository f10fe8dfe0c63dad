"""The ways to save that are compared: what each must offer, and where each is found."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch


class Backend(Protocol):
    """One way to save a model and its optimizer."""

    def setup(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """Open; the folder is empty and its own."""

    def prepare(self) -> None:
        """Called once after the first training step: whatever can be done ahead of the first save."""

    def save(self, step: int) -> None:
        """Returns when the caller may go on with forward and backward."""

    def gate(self) -> None:
        """Called right before ``optimizer.step()``: wait here if the state must not change yet."""

    def finish(self) -> None:
        """Wait until the last save is durable. Called on a thread of its own while training goes on."""

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Restore the last save."""

    def close(self) -> None:
        """End."""


class Way:
    """A backend that prepares nothing and gates nothing."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    folder: Path

    def setup(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, folder
        self.open()

    def open(self) -> None:
        """What is special in setting up."""

    def prepare(self) -> None:
        """Nothing."""

    def gate(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


@dataclass(frozen=True)
class Entry:
    """Where a backend is found, and what it is compared as."""

    kind: Literal["ours", "asynchronous peer", "synchronous peer"]
    module: str
    name: str
    options: tuple[Any, ...] = ()
    copies_first: bool = False  # before its call returns


ENTRIES = {
    "safe_ckpt overlapped": Entry("ours", "ours", "Directory", ("overlapped",)),
    "safe_ckpt eager": Entry("ours", "ours", "Directory", ("eager",)),
    "safe_ckpt eager, not prepared": Entry("ours", "ours", "Unprepared", ("eager",)),
    "safe_ckpt Lightning .ckpt overlapped": Entry("ours", "ours", "SingleFile", ("overlapped",)),
    "safe_ckpt Lightning .ckpt eager": Entry("ours", "ours", "SingleFile", ("eager",)),
    "safe_ckpt accelerator.save_state overlapped": Entry("ours", "ours", "Accelerated", ("overlapped",)),
    "safe_ckpt accelerator.save_state eager": Entry("ours", "ours", "Accelerated", ("eager",)),
    "torch_checkpointing": Entry("asynchronous peer", "torch_checkpointing_peer", "Manager"),
    "torch_checkpointing prewarmed": Entry("asynchronous peer", "torch_checkpointing_peer", "Prewarmed"),
    "torch_checkpointing direct I/O": Entry("asynchronous peer", "torch_checkpointing_peer", "DirectIO"),
    "DCP async_save thread": Entry("asynchronous peer", "dcp_peer", "Dcp", ("thread", False), copies_first=True),
    "DCP async_save process": Entry("asynchronous peer", "dcp_peer", "Dcp", ("process", False), copies_first=True),
    "DCP async_save thread, async staging": Entry("asynchronous peer", "dcp_peer", "Dcp", ("thread", True)),
    "DCP async_save process, async staging": Entry("asynchronous peer", "dcp_peer", "Dcp", ("process", True)),
    "Lightning AsyncCheckpointIO": Entry("asynchronous peer", "torch_save_peer", "LightningAsync", copies_first=True),
    "torch.save + fsync": Entry("synchronous peer", "torch_save_peer", "TorchSave"),
}


def make(name: str) -> Backend:
    """Build a backend; a peer that is not installed is an ImportError here and nowhere else."""
    entry = ENTRIES[name]
    backend: Callable[..., Backend] = getattr(importlib.import_module(entry.module), entry.name)
    return backend(*entry.options)
