"""Loaders that ``safe_ckpt.data.resumable`` made, once Accelerate has prepared them.

Accelerate makes a loader of its own around a new ``DataLoader`` with the data set and a sampler for this rank. That inner one
counts here. Accelerate takes a batch, or with ``dispatch_batches`` one for each rank, before it gives the last one to training:
those are given again after a resume.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

from accelerate.data_loader import DataLoaderDispatcher

from safe_ckpt.adapters import patch
from safe_ckpt.data.facts import is_map, is_placed, name_of
from safe_ckpt.data.loader import Resumable, Seeding, made_of
from safe_ckpt.errors import RestoreError

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
    counted.__dict__["looks_ahead"] = 2 * _ahead(loader) - 1  # an exception may come in the middle of the next turn
    loader.base_dataloader = counted
    return True


def is_placed_loader(loader: Any) -> bool:
    """Whether ``prepare`` did that."""
    return isinstance(getattr(loader, "base_dataloader", None), ForAccelerate)


def is_within(loader: Any) -> bool:
    """Whether a loop is iterating over a prepared loader."""
    active = getattr(getattr(loader, "gradient_state", None), "dataloader_references", ())
    return any(one is loader for one in active)


def seed(loader: Any) -> dict[str, int]:
    """What the order of each epoch comes from, where Accelerate gave a prepared loader a seedable sampler."""
    found = getattr(loader.get_sampler(), "initial_seed", None)
    return {"seed": found} if isinstance(found, int) else {}


def seed_as(loader: Any, state: Mapping[str, Any]) -> None:
    """Have that be what it was at the save: a script may begin with another seed."""
    if "seed" in state and seed(loader):
        loader.get_sampler().initial_seed = state["seed"]


class Placed:
    """The place of one such loader."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._base: Any = loader.base_dataloader
        self._over: int | None = None  # how many batches the epoch had that is over, until the next loop
        self._saved_iteration = 0

    def state(self, *, between: bool = False) -> dict[str, Any]:
        """What to save.

        Args:
            between: whether a place behind the last batch of an epoch is one between two epochs. Else it belongs to that epoch,
                and the next loop, which is the rest of that epoch, gives nothing: as with a loader that nobody prepared.
        """
        within, last = is_within(self._loader), bool(getattr(self._loader, "end_of_dataloader", False))
        over = self._steps() if within and last and not between else self._over
        if over is not None:
            place = self._base.position(self._taken() if self._over is None else 0)
            return {
                "position": place.to_json(),
                "iteration": self._loader.iteration,
                "over": over,
                **seed(self._loader),
            }
        place = self._base.position(self._taken() if within and not last else 0)
        # The number of the epoch increases only when the loop is left, and the resume begins the next one.
        iteration = self._loader.iteration + (within and last)
        return {"position": place.to_json(), "iteration": iteration, **seed(self._loader)}

    def resume(self, state: Mapping[str, Any], _: Mapping[str, Any]) -> None:
        """Go to a place that ``state`` told; nowhere where nothing was saved.

        Raises:
            RestoreError: another kind of loader was saved.
        """
        if not state:
            return
        if "position" not in state:
            message = (
                "the checkpoint has the place of a loader of another kind: prepare the loader as it was prepared then"
            )
            raise RestoreError(key=name_of(self._base), message=message)
        seed_as(self._loader, state)
        self._base.load_state_dict(state["position"])
        self._loader.iteration, self._over = state["iteration"], state.get("over")
        if self._over is not None:
            self._saved_iteration = state["iteration"]
            patch.once(self._loader, "begin", self._leave_out)

    def pending(self) -> int | None:
        """How many batches of the epoch were given before the place that is gone to next; None where none is."""
        if self._over is not None:
            return self._over
        place = self._base.pending()
        return place.batches if place is not None else None

    def is_over(self) -> bool:
        """Whether that is behind the last batch of the epoch."""
        return self._over is not None

    def begin_anew(self) -> None:
        """Have the next loop begin at the beginning: of the next epoch where this one is over."""
        if self._over is not None:
            self._loader.iteration, self._over = self._loader.iteration + 1, None
            patch.take_away(self._loader, "begin")
        self._base.begin_anew()

    def forget(self) -> None:
        """It counts on: that takes nothing away."""

    def _leave_out(self, begin: Callable[[], None]) -> None:
        """At the start of the loop over the rest of an epoch that is over: its last batch is taken again, and not given."""
        loader, skipped = self._loader, self._loader.skip_batches
        if loader.iteration != self._saved_iteration:  # set_epoch was called: the loop is over another epoch
            self._over = None
            self._base.begin_anew()
            begin()
            return
        self._over = None
        begin()
        logger.warning(
            "the checkpoint was saved behind the last batch of epoch %d, so this loop gives no batch. If your loop begins with "
            "the next epoch, call accelerator.skip_first_batches(loader, 0), or loader.set_epoch",
            loader.iteration,
        )

        def end(stock: Callable[[], None]) -> None:
            loader.skip_batches = skipped
            stock()

        loader.skip_batches = skipped + 1
        patch.once(loader, "end", end)

    def _steps(self) -> int:
        """How many steps the epoch had that is over. Where batches are dispatched, only the main process reads them."""
        end = self._base.ended()
        try:
            return len(self._loader)
        except TypeError:
            return -(-end.batches // _ahead(self._loader)) if end is not None else 0

    def _taken(self) -> int:
        """How many batches were taken that training was not given."""
        ahead, end = _ahead(self._loader), self._base.ended()
        if end is None:  # an exception may have come between the batches of one turn
            return ahead + int(self._base.position().batches) % ahead
        rest = int(end.batches) % ahead  # the last turn may not have one for each rank; with drop_last it was none
        return rest + ahead if not rest or bool(self._loader._drop_last) else rest


def _ahead(loader: Any) -> int:
    if isinstance(loader, DataLoaderDispatcher) and not loader.split_batches:
        return int(loader.state.num_processes)
    return 1
