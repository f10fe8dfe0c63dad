"""Loaders that ``safe_ckpt.data.resumable`` made, once Accelerate has prepared them.

Accelerate makes a loader of its own around a new ``DataLoader`` with the data set and a sampler for this rank. That inner one
counts here. Accelerate takes a batch, or with ``dispatch_batches`` one for each rank, before it gives the last one to training:
those are given again after a resume.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from accelerate.data_loader import DataLoaderDispatcher

from safe_ckpt.data.facts import is_map, is_placed
from safe_ckpt.data.loader import Resumable, Seeding, made_of

logger = logging.getLogger(__name__)


class ForAccelerate(Resumable):
    """Without a ``state_dict`` that Accelerate would ask for at each batch."""

    looks_ahead = 1

    @property
    def state_dict(self) -> Any:
        """Not there."""
        raise AttributeError("state_dict")


def prepare(loader: Any, given: Any) -> None:
    """Have the inner loader of a prepared one count, as the loader that the user gave was to.

    Args:
        loader: what Accelerate made of it.
        given: what the user gave.
    """
    if isinstance(given, Resumable) and not getattr(loader, "use_stateful_dataloader", False):
        kind = type(given)
        count(loader, kind.worker_seeding, kind.skip)


def count(loader: Any, seeding: Seeding, skip: Literal["read"] | None) -> bool:
    """Have the inner loader of a prepared one count. Returns whether it does.

    Args:
        loader: a prepared one.
        seeding: see ``safe_ckpt.data.resumable``.
        skip: see there.
    """
    inner = getattr(loader, "base_dataloader", None)
    if inner is None or isinstance(inner, Resumable):
        return isinstance(inner, ForAccelerate)
    skip = skip if is_map(inner) or is_placed(inner) else "read"
    try:
        counted: Any = made_of(inner, seeding, skip, ForAccelerate)
    except TypeError as error:
        logger.warning("%s", error)
        return False
    counted.__dict__["looks_ahead"] = _ahead(loader)
    loader.base_dataloader = counted
    return True


def forget(loader: Any) -> None:
    """Have the next loop over a counted loader begin at the beginning."""
    loader.base_dataloader.begin_anew()


def is_placed_loader(loader: Any) -> bool:
    """Whether ``prepare`` did that."""
    return isinstance(getattr(loader, "base_dataloader", None), ForAccelerate)


def is_within(loader: Any) -> bool:
    """Whether a loop is iterating over a prepared loader."""
    active = getattr(getattr(loader, "gradient_state", None), "dataloader_references", ())
    return any(one is loader for one in active)


class Placed:
    """The place of one such loader."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._base: Any = loader.base_dataloader

    def state(self) -> dict[str, Any]:
        """What to save."""
        within, last = is_within(self._loader), bool(getattr(self._loader, "end_of_dataloader", False))
        place = self._base.position(self._taken() if within and not last else 0)
        # The number of the epoch increases only when the loop is left, and the resume begins the next one.
        return {"position": place.to_json(), "iteration": self._loader.iteration + (within and last)}

    def resume(self, state: Mapping[str, Any], _: Mapping[str, Any]) -> None:
        """Go to a place that ``state`` told."""
        if "position" not in state:
            return
        self._base.load_state_dict(state["position"])
        self._loader.iteration = state["iteration"]

    def pending(self) -> int | None:
        """How many batches of the epoch were given before the place that is gone to next; None where none is."""
        place = self._base.pending()
        return place.batches if place is not None else None

    def forget(self) -> None:
        """It counts on: that takes nothing away."""

    def _taken(self) -> int:
        """How many batches were taken that training was not given."""
        ahead, end = _ahead(self._loader), self._base.ended()
        return ahead if end is None else end.batches % ahead or ahead  # the last turn may not have one for each rank


def _ahead(loader: Any) -> int:
    if isinstance(loader, DataLoaderDispatcher) and not loader.split_batches:
        return int(loader.state.num_processes)
    return 1
