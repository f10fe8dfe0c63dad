"""torch_checkpointing: copies on a thread while forward and backward run, writes in a process of its own."""

from concurrent.futures import Future
from typing import Any

import torch
from backends import Way
from disk import sync_tree
from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


class Manager(Way):
    """As its tutorial has it, but with ``use_direct_io=False``: its default fails on file systems that want alignment."""

    direct_io = False
    _written: "Future[Any] | None"

    def open(self) -> None:
        config = CheckpointManager.Config.with_async_save()
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=self.direct_io)
        self._manager = CheckpointManager(config)

    def save(self, step: int) -> None:
        self._path = self.folder / f"step-{step}"
        self._written = self._manager.save(str(self._path), self.state())

    def gate(self) -> None:
        with self._manager.lock():  # the state may change when nothing is being copied
            pass

    def finish(self) -> None:
        if self._written is not None:
            self._written.result()
        sync_tree(self._path)

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loaded = self._manager.load(str(self._path), into={"model": model.state_dict(), "optimizer": None})
        optimizer.load_state_dict(loaded["optimizer"])

    def close(self) -> None:
        self._manager.close()


class Prewarmed(Manager):
    """Its staging memory is made ahead of the first save, by a public method that its tutorial does not mention."""

    def prepare(self) -> None:
        self._manager.prewarm_staging(self.state())


class DirectIO(Manager):
    """With its default storage."""

    direct_io = True
