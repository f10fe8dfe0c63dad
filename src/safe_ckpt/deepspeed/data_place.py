"""The place of an engine's own loader (``engine.training_dataloader``) in its data.

DeepSpeed makes a new ``DataLoader`` for each epoch. Here it makes one that counts, and keeps it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import deepspeed.runtime.dataloader as upstream
from torch.utils.data import DataLoader

from safe_ckpt.adapters import FilePlan, Patch, torch_file
from safe_ckpt.adapters.data_position import DataPosition, saved_state
from safe_ckpt.adapters.extras import get_rng_state, set_rng_state
from safe_ckpt.data import resumable
from safe_ckpt.errors import ConfigError

logger = logging.getLogger(__name__)
_FILE = "train_loader_rank_{rank}_states.pt"  # a file that ends so belongs to the tag, and is replaced with it


class EngineDataPlace(DataPosition):
    """The loader of one engine, on this rank.

    Args:
        engine: a ``DeepSpeedEngine`` that ``refuse_without_place`` admits.
    """

    def __init__(self, engine: Any) -> None:
        loader = engine.training_dataloader
        self._rank = engine.global_rank
        self._loader = loader
        self._counted: Any = None
        self._pending: dict[str, Any] | None = None
        self._create = loader._create_dataloader
        self._patch = Patch(loader, {"_create_dataloader": self._create_counted})

    def state(self) -> dict[str, Any]:
        """See ``DataPosition``. DeepSpeed saves no generators, and torch seeds the workers of the next epoch from them."""
        place = self._pending if self._counted is None else self._counted.state_dict()
        return {"place": place, "rng": get_rng_state()}

    def resume(self, state: dict[str, Any]) -> None:
        """See ``DataPosition``. The generators are those of another rank where they are left out."""
        self._pending = state["place"]
        if self._counted is not None and self._pending is not None:
            self._counted.load_state_dict(self._pending)
        if "rng" in state:
            set_rng_state(state["rng"])

    def file(self) -> FilePlan:
        """Return the file to save of this rank's loader."""
        return torch_file(_FILE.format(rank=self._rank), self.state())

    def load(self, tag: Path) -> None:
        """Go to the place of a checkpoint. Ranks that it does not know take rank 0's, if all share one order."""
        state, saved_by = saved_state(tag, _FILE, self._rank, 0)
        if state is None:
            logger.warning("%s does not say where its loader was: the epoch begins anew", tag)
            return
        self.resume(state if saved_by == self._rank else {"place": state["place"]})

    @staticmethod
    def warn_if_left(tag: Path) -> None:
        """Log that a tag has the place of a loader, which nobody asked for."""
        if any(tag.glob(_FILE.format(rank="*"))):
            logger.warning(
                "%s has the place of engine.training_dataloader, and it is not used: say install(engine, resume_data=True), "
                "unless your script leaves out batches itself",
                tag,
            )

    def forget(self) -> None:
        """Leave the loader as it was."""
        self._patch.give_back()

    def _create_counted(self) -> Any:
        with Patch(upstream, {"DataLoader": self._make}):
            return self._create()

    def _make(self, *args: Any, **kwargs: Any) -> Any:
        if self._counted is None:
            self._counted = resumable(DataLoader(*args, **kwargs))
            if self._pending is not None:
                self._counted.load_state_dict(self._pending)
        return self._counted


def refuse_without_place(engine: Any) -> None:
    """Refuse an engine without a loader whose place could be saved.

    Raises:
        ConfigError: it has none.
    """
    loader = engine.training_dataloader
    if not isinstance(loader, upstream.DeepSpeedDataLoader):
        message = (
            "the engine has no loader of its own: give deepspeed.initialize training_data, or leave resume_data out"
        )
        raise ConfigError(key="install: resume_data", message=message)
    if loader.curriculum_learning_enabled:
        message = "DeepSpeed saves the place itself with curriculum learning: leave resume_data out"
        raise ConfigError(key="install: resume_data", message=message)
