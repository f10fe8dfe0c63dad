"""Where training stands in the data of one loader: each rank saves its own, beside what the framework saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch


class DataPosition(Protocol):
    """The place of one loader, on one rank."""

    def state(self) -> dict[str, Any]:
        """Where it stands, as plain data that ``torch.load`` reads with ``weights_only=True``."""

    def resume(self, state: dict[str, Any]) -> None:
        """Have the next iteration begin there.

        Raises:
            RestoreError: the data, or the loader, were others then.
        """

    def forget(self) -> None:
        """Leave the loader as it was."""


def saved_state(folder: Path, pattern: str, *ranks: int) -> tuple[dict[str, Any] | None, int]:
    """Return a loader's state from a checkpoint: that of the first of these ranks that it knows, and which rank that was.

    Args:
        folder: the checkpoint.
        pattern: of the files' names, with ``{rank}`` in it.
        ranks: which ones will do, the best first.

    Raises:
        Exception: what is there cannot be read, as ``torch.load`` says it.
    """
    for rank in ranks:
        file = folder / pattern.format(rank=rank)
        if file.is_file():
            return torch.load(file, weights_only=True), rank
    return None, -1


def has_length(loader: Any) -> bool:
    """Whether a loader knows how many batches an epoch has."""
    try:
        return len(loader) >= 0
    except (TypeError, NotImplementedError):
        return False
