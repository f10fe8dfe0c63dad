"""Peers that write one file with ``torch.save``: by itself, and on the thread of Lightning's AsyncCheckpointIO."""

import os
from pathlib import Path

import torch
from backends import Way
from disk import sync_file


class _OneFile(Way):
    path: Path

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = torch.load(self.path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


class TorchSave(_OneFile):
    """Synchronous."""

    def save(self, step: int) -> None:
        self.path = self.folder / f"step-{step}.pt"
        with self.path.open("wb") as file:
            torch.save(self.state(), file)
            file.flush()
            os.fsync(file.fileno())
        sync_file(self.path)

    def finish(self) -> None:
        """It is durable already."""


class LightningAsync(_OneFile):
    """The plugin as a Trainer would call it; it clones on the caller's thread."""

    def open(self) -> None:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        self._io = AsyncCheckpointIO(TorchCheckpointIO())

    def save(self, step: int) -> None:
        self.path = self.folder / f"step-{step}.ckpt"
        self._io.save_checkpoint(self.state(), self.path)

    def finish(self) -> None:
        self._io.teardown()  # the only public way to wait; the next save makes a thread anew
        sync_file(self.path)
