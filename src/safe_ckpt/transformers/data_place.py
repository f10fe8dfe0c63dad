"""The place of a Trainer's loader in its data.

The Trainer counts steps. On a resume it draws the samples of the epoch anew and leaves out the first ones; a stream it reads
from its beginning. What its data set and its collator draw is not what it would have been. Here the loader of each process is
counted, and its state is a file of the checkpoint, which the stock Trainer ignores.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from safe_ckpt.accelerate import dataloaders as placed_loaders
from safe_ckpt.adapters.data_position import has_length, saved_state
from safe_ckpt.errors import RestoreError

logger = logging.getLogger(__name__)
_FILE = "train_loader_{rank}.pth"
_PICKLED = (RuntimeError, ValueError, OSError, EOFError)


class DataPlace:
    """The loader of one ``train()``, on this process.

    Args:
        folder: the checkpoint that training goes on from; None where it begins.
        rank: of this process.
        skips: whether batches are left out at all: ``ignore_data_skip`` is off.
    """

    def __init__(self, folder: str | None, rank: int, *, skips: bool) -> None:
        self._rank = rank
        self._folder = folder if skips else None
        self._placed: placed_loaders.Placed | None = None
        self._loader: Any = None
        self._is_there = False

    def watch(self, loader: Any) -> None:
        """Count from now on, and go to a place between two epochs."""
        inner = getattr(loader, "base_dataloader", None)
        if type(inner) is not DataLoader or not placed_loaders.count(loader, None):
            if self._state() is not None:
                message = (
                    "the checkpoint has the place of a loader that was counted; %s of now is not. The Trainer leaves out as "
                    "many batches as were trained on, and what it draws may differ"
                )
                logger.warning(message, type(inner if inner is not None else loader).__name__)
            return  # it knows its place itself, or cannot be counted
        self._loader, self._placed = loader, placed_loaders.Placed(loader, between=True)
        state = self._state()
        if state is not None and not state["position"].get("begun"):
            self._go_to(state)

    def save(self, folder: str) -> None:
        """Write the state of this process's loader."""
        if self._placed is not None:
            torch.save(self._placed.state(), Path(folder) / _FILE.format(rank=self._rank))

    def skip(self, loader: Any, batches: int, stock: Callable[..., Any], rng: Callable[[], None]) -> Any:
        """Stands in for ``skip_first_batches``: the same loader, which begins behind these batches, if that is its place.

        Args:
            loader: of the Trainer.
            batches: how many to leave out.
            stock: what to do otherwise.
            rng: sets the generators of this process to where they were at the save.
        """
        state = self._state() if loader is self._loader and self._loader is not None else None
        if state is None or not self._go_to(state):
            return stock(loader, batches)
        if not has_length(loader):
            _count_on(loader)
        elif self._placed is not None and self._placed.pending() != batches:
            logger.warning(
                "the loader's place is not behind batch %d of its epoch: leaving out that many instead", batches
            )
            self._placed.begin_anew()
            return stock(loader, batches)
        rng()
        self._is_there = True
        return loader

    def rng_is_there(self) -> bool:
        """Whether the generators were set already, before the next batch was fetched. Once."""
        there, self._is_there = self._is_there, False
        return there

    def _state(self) -> dict[str, Any] | None:
        if self._folder is None:
            return None
        try:
            return saved_state(Path(self._folder), _FILE, self._rank)[0]
        except _PICKLED as error:  # a stream whose state is not plain data
            logger.warning("cannot read the place in the data from %s: %s", self._folder, error)
            return None

    def _go_to(self, state: dict[str, Any]) -> bool:
        try:
            if self._placed is not None:
                self._placed.resume(state)
        except RestoreError as error:  # other data, or another number of processes: the Trainer does what it can
            logger.warning("%s. The Trainer leaves out as many batches as were trained on", error)
            return False
        return True


def _count_on(loader: Any) -> None:
    """Go by the loader's own count of passes. The Trainer does not know how many were made over a stream, and begins at 0."""
    stock = loader.set_epoch

    def set_epoch(_: int) -> None:
        stock(loader.iteration)

    loader.set_epoch = set_epoch
