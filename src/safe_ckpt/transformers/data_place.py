"""The place of a Trainer's loader in its data, and the losses that wait to be logged.

The Trainer counts steps. On a resume it draws the samples of the epoch anew and leaves out the first ones; a stream it reads
from its beginning. What its data set and its collator draw is not what it would have been. Here the loader of each process is
counted, and its state is a file of the checkpoint, which the stock Trainer ignores. What it has summed up since it logged last
is in there, too: the next ``loss`` that it logs is the mean of all these steps.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from safe_ckpt.accelerate import dataloaders as placed_loaders
from safe_ckpt.adapters import Engine
from safe_ckpt.adapters.data_position import has_length, saved_state
from safe_ckpt.adapters.extras import get_rng_state, set_rng_state
from safe_ckpt.adapters.planning import versions_of_buffers
from safe_ckpt.data.loader import Skip
from safe_ckpt.data.order import loses_its_buffer
from safe_ckpt.devices import generator_states, in_use, set_generator_states, types
from safe_ckpt.errors import RestoreError
from safe_ckpt.transformers import missing

logger = logging.getLogger(__name__)
_FILE = "train_loader_{rank}.pth"
_SUM = "losses"
_DEVICES = "devices"
_OF_THE_TRAINER = ("cuda", "npu", "hpu", "mlu", "musa")  # the devices whose generators it saves
_TR_LOSS = "_tr_loss"
_PICKLED = (RuntimeError, ValueError, OSError, EOFError)


class TrainerDataPlace:
    """The loader of one ``train()``, on this process.

    Args:
        folder: the checkpoint that training goes on from; None where it begins.
        arguments: of the Trainer.
        engine: where the processes meet.
    """

    def __init__(self, folder: str | None, arguments: Any, engine: Engine) -> None:
        self._engine, self._arguments = engine, arguments
        self._rank, self._accumulated = arguments.process_index, arguments.gradient_accumulation_steps
        # Then saves within a step are to be expected, so the generators are noted at each.
        self._within = getattr(arguments, "enable_jit_checkpoint", False)
        self._step: _Step | None = None
        self._skips, self._folder = not arguments.ignore_data_skip, folder
        saved = self._read() or {}
        self._summed: tuple[Any, int] | None = saved.get(_SUM)
        self._generators: Mapping[str, Sequence[torch.Tensor]] = saved.get(_DEVICES, {})
        self._placed: placed_loaders.Placed | None = None
        self._is_there = False

    def watch(self, loader: Any) -> None:
        """Count from now on, and go to a place between two epochs."""
        inner = getattr(loader, "base_dataloader", None)
        # As the stock Trainer does it: where a buffer is lost, what was in it would be, too.
        skip: Skip = "read" if type(inner) is DataLoader and loses_its_buffer(inner) else None
        if type(inner) is not DataLoader or not placed_loaders.count(loader, skip, self._accumulated):
            if self._state() is not None:
                message = (
                    "the checkpoint has the place of a loader that was counted; %s of now is not. The Trainer leaves out as "
                    "many batches as were trained on, and what it draws may differ"
                )
                logger.warning(message, type(inner if inner is not None else loader).__name__)
            return  # it knows its place itself, or cannot be counted
        # A pass over a stream may end within a step, and is saved there.
        self._within |= self._accumulated > 1 and not has_length(loader)
        self._placed, state = placed_loaders.Placed(loader, between=True), self._state()
        # Where none was trained on, the Trainer leaves out none.
        if state is not None and not (state["position"].get("begun") and state["position"].get("batches")):
            self._goes_to(state, self._placed)

    @property
    def is_resumed(self) -> bool:
        """Whether training goes on from a checkpoint."""
        return self._folder is not None

    def steps(self) -> int:
        """How many were done at the save."""
        state = missing.state_in(Path(self._folder)) if self._folder is not None else None
        return int((state or {}).get("global_step", 0))

    def step(self, trainer: Any, batches: int) -> None:
        """The batches of a step were taken: until it is done, none of them was trained on."""
        summed, self._summed = self._summed, None
        if summed is not None and hasattr(trainer, _TR_LOSS):
            trainer._tr_loss += summed[0]
            trainer._globalstep_last_logged = summed[1]
        if not batches:  # a stream has ended: no step is begun
            return
        generators = get_rng_state() if self._within else None
        state, versions = trainer.state, versions_of_buffers(trainer.model)
        counted = state.num_input_tokens_seen, trainer.current_flos
        self._step = _Step(state.global_step, batches, generators, versions, _losses(trainer), *counted)

    def save(self, folder: str, trainer: Any) -> None:
        """Write the state of this process's loader and of its generators.

        A save within a step (``enable_jit_checkpoint``) is one before that step: a resume does all of it again.

        Args:
            folder: where to.
            trainer: whose.
        """
        within = self._under_way(trainer)
        now = get_rng_state()
        set_rng_state((within and within.generators) or now)
        trainer._save_rng_state(folder)
        others = {name: generator_states(name) for name in in_use() if name not in _OF_THE_TRAINER}
        set_rng_state(now)
        state: dict[str, Any] = {_SUM: within.losses if within is not None else _losses(trainer)}
        if others:
            state[_DEVICES] = others
        if self._placed is not None:
            state |= self._placed.state(within.batches if within is not None else 0)
        torch.save(state, Path(folder) / _FILE.format(rank=self._rank))
        if within is not None and within.versions != versions_of_buffers(trainer.model):
            logger.warning(
                "saved within step %d, which a resume does again: its forward pass has changed buffers of the model (those of "
                "BatchNorm, for one), and will change them twice",
                within.number + 1,
            )

    @contextlib.contextmanager
    def before_the_step(self, trainer: Any) -> Iterator[None]:
        """Within this block no tokens and operations of a step that is under way are counted: a resume counts them again."""
        step = self._under_way(trainer)
        if step is None:
            yield
            return
        tokens, operations = trainer.state.num_input_tokens_seen - step.tokens, trainer.current_flos - step.operations
        trainer.state.num_input_tokens_seen, trainer.current_flos = step.tokens, step.operations
        try:
            yield
        finally:
            trainer.state.num_input_tokens_seen += tokens
            trainer.current_flos += operations

    def _under_way(self, trainer: Any) -> _Step | None:
        """The step that was begun and is not done."""
        return self._step if self._step is not None and self._step.number == trainer.state.global_step else None

    def skip(self, loader: Any, batches: int, stock: Callable[..., Any], rng: Callable[[], None]) -> Any:
        """Stands in for ``skip_first_batches``: the same loader, which begins behind these batches, if that is its place.

        Args:
            loader: of the Trainer.
            batches: how many to leave out.
            stock: what to do otherwise.
            rng: sets the generators of this process to where they were at the save.
        """
        placed = self._placed
        state = self._state() if placed is not None and placed.loader is loader else None
        if placed is None or state is None or not self._goes_to(state, placed):
            return stock(loader, batches)
        if not has_length(loader):
            # The Trainer does not know how many passes were made over a stream, and begins at 0: the loader's own count holds.
            count_on = loader.set_epoch
            loader.set_epoch = lambda _: count_on(loader.iteration)
            if loader.iteration:
                logger.warning(
                    "the Trainer does not know how many passes were made over the stream: epochs are logged as of 0"
                )
                if not state["position"].get("begun"):  # the last step was that of a pass
                    missing.warn_of_the_end(Path(str(self._folder)), self._arguments)
        elif placed_loaders.agreed(placed, loader, batches, self._engine) != batches:
            message = "the loader's place is not behind batch %d of its epoch: leaving out that many instead"
            logger.warning(message, batches)
            placed.begin_anew()
            return stock(loader, batches)
        rng()
        self._is_there = True
        return loader

    def rng_is_there(self) -> bool:
        """Whether the generators were set already, before the next batch was fetched. Once."""
        there, self._is_there = self._is_there, False
        return there

    def set_other_generators(self) -> None:
        """Put back those of devices whose generators the Trainer does not save (XPU, MTIA, a plug-in)."""
        for name in types():
            if name in self._generators:
                set_generator_states(name, self._generators[name])

    def _state(self) -> dict[str, Any] | None:
        found = self._read() if self._skips else None
        return found if found is not None and "position" in found else None

    def _read(self) -> dict[str, Any] | None:
        if self._folder is None:
            return None
        try:
            return saved_state(Path(self._folder), _FILE, self._rank)[0]
        except _PICKLED as error:  # a stream whose state is not plain data
            logger.warning("cannot read the place in the data from %s: %s", self._folder, error)
            return None

    def _goes_to(self, state: dict[str, Any], placed: placed_loaders.Placed) -> bool:
        try:
            placed.resume(state)
        except RestoreError as error:  # other data, or another number of processes: the Trainer does what it can
            logger.warning("%s. The Trainer leaves out as many batches as were trained on", error)
            return False
        return True


@dataclass(frozen=True)
class _Step:
    """One that was begun.

    Attributes:
        number: how many were done before it.
        batches: how many it has.
        generators: of this process, behind the making of those; None where they were not noted.
        versions: of the model's buffers, as torch counts their changes.
        losses: what was summed up since the last row, and at which step that was logged.
        tokens: how many the model was given before it.
        operations: how many were done before it on this process, and not summed up yet.
    """

    number: int
    batches: int
    generators: Mapping[str, Any] | None
    versions: Sequence[int]
    losses: tuple[Any, int] | None
    tokens: int
    operations: float


def _losses(trainer: Any) -> tuple[Any, int] | None:
    """A copy: the Trainer adds to it. None in releases that keep it in a variable."""
    if not hasattr(trainer, _TR_LOSS):
        return None
    return trainer._tr_loss.detach().clone(), int(trainer._globalstep_last_logged)
