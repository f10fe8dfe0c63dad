"""Loaders that know their place, under a Trainer: its loop says how far training is, and takes batches before it uses them."""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from safe_ckpt.adapters.data_position import has_length
from safe_ckpt.adapters.extras import get_rng_state
from safe_ckpt.adapters.patch import replace_for_good
from safe_ckpt.data import order as facts
from safe_ckpt.data.loader import Resumable, Skip, made_of
from safe_ckpt.data.order import is_map, is_placed, name_of
from safe_ckpt.data.position import Position
from safe_ckpt.errors import RestoreError
from safe_ckpt.lightning.checkpoint_io import fit_loops

logger = logging.getLogger(__name__)
_Loader = TypeVar("_Loader", bound="DataLoader[Any]")
_KEY = "safe_ckpt.position"
_VERSION = "version"
_PLACES, _AHEAD, _NOW = "places", "ahead", "now"


class ForLightning(Resumable):
    """A loader that saves the generators of this process, too: a stock ``ModelCheckpoint`` does not."""

    looks_ahead = 2  # one where it has no length, and one at an exception

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is. Called on every rank at a save."""
        places = [self.position(unseen).to_json() for unseen in range(self.looks_ahead + 1)]
        return {_KEY: {_PLACES: places, _AHEAD: int(not has_length(self)), _NOW: get_rng_state()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go there at the start of the next iteration."""
        if _KEY not in state:
            super().load_state_dict(state)  # of ``safe_ckpt.data.resumable``, or refused by name
            return
        if _PLACES not in state[_KEY]:
            logger.warning(
                "the place in the data was saved by an earlier version of safe_ckpt and is not known: the epoch starts afresh"
            )
            return
        super().load_state_dict(state[_KEY][_PLACES][0])


def let_places_be_used() -> None:
    """Have the loops of ``fit`` go to the places of their loaders, whenever those were set up, and whatever saved them.

    Lightning leaves places out where the loaders were set up before the states came (``trainer.estimated_stepping_batches``
    sets them up, and schedulers with a warm-up ask for it), and where an epoch had ended. After the last batch of an epoch it
    begins the next one with loaders that have nothing left. The method of the class is replaced: a stock ``ModelCheckpoint``
    has no part in this.
    """
    for fit_loop in fit_loops():
        replace_for_good(fit_loop, "setup_data", _loading_late)
        replace_for_good(fit_loop, "_load_combined_loader_states", lambda _: _load_places)


def _loading_late(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    def setup_data(fit_loop: Any) -> None:
        stock(fit_loop)
        loaders = fit_loop._combined_loader
        for one in loaders.flattened if loaders is not None else ():
            if isinstance(one, Resumable):
                one.reading = functools.partial(_iterators, weakref.ref(loaders))
        if loaders is not None and fit_loop._combined_loader_states_to_load:
            _go_to_places(fit_loop)
            _give_back(fit_loop)
            iter(fit_loop._data_fetcher)

    return setup_data


def _iterators(loaders: Callable[[], Any]) -> Sequence[Any]:
    """Those that the loop takes its batches from."""
    return getattr(getattr(loaders(), "_iterator", None), "iterators", ())


def _load_places(fit_loop: Any) -> None:
    """Stands in for the method of a ``_FitLoop``, which it calls before the first batch can be taken."""
    for one in filter(_reads_here, fit_loop._combined_loader.flattened):
        one.__dict__["data_at_first"] = copy.deepcopy(one.dataset.state_dict())
    _go_to_places(fit_loop)


def _go_to_places(fit_loop: Any) -> None:
    """Load the states of the loaders. Where an epoch had ended, a loader of ours is between two epochs."""
    saved, batches = fit_loop._combined_loader_states_to_load, fit_loop.epoch_loop.batch_progress
    if not saved:
        return
    fit_loop._combined_loader_states_to_load = []
    unseen = max(0, batches.current.ready - batches.current.processed)
    over = batches.is_last_batch and not unseen
    if fit_loop.restarting or all(map(_is_ours, saved)):
        places = [state_at_end(one) if over else at_batch(one, unseen=unseen) for one in saved]
        fit_loop._combined_loader._load_state_dicts(places)


def _give_back(fit_loop: Any) -> None:
    """Have streams give again what was taken of them before they went to their places."""
    for one in filter(_reads_here, fit_loop._combined_loader.flattened):
        one.dataset.load_state_dict(one.__dict__["data_at_first"])


def _reads_here(loader: Any) -> bool:
    """Whether it is a stream that knows its place, and is read in this process."""
    return isinstance(loader, Resumable) and is_placed(loader) and not loader.__dict__["num_workers"]


def load_again(fit_loop: Any, saved: Sequence[Any]) -> None:
    """Between two epochs, before the next one begins: what was taken ahead is given again, by the generators as they were.

    Args:
        fit_loop: whose fetcher may have taken a batch.
        saved: the states of its loaders.
    """
    fetcher, loaders = fit_loop._data_fetcher, fit_loop._combined_loader
    if fetcher is not None and fetcher.fetched and saved and all(map(_is_ours, saved)):
        loaders._load_state_dicts([state_at_end(one) for one in saved])
        _give_back(fit_loop)


def generators_at_start(loaders: Any) -> list[dict[str, str]]:
    """The generators that the user gave to loaders that do not save them: an epoch begins with them."""
    return [{} if isinstance(one, Resumable) else facts.own_as_text(one) for one in loaders.flattened]


def put_own_back(loaders: Any, saved: Sequence[Mapping[str, str]]) -> None:
    """Set them, before an epoch begins."""
    for loader, texts in zip(loaders.flattened, saved, strict=False):
        if texts and isinstance(loader, DataLoader):
            facts.put_back(loader, texts)


def _is_ours(state: Any) -> bool:
    return isinstance(state, dict) and (_KEY in state or _VERSION in state)


def refuse_unused(fit_loop: Any) -> None:
    """Refuse, before the first batch after a resume, to begin elsewhere than where the checkpoint was saved.

    Raises:
        RestoreError: the checkpoint has places of loaders, and they were not loaded.
    """
    if fit_loop._combined_loader_states_to_load:
        message = "the checkpoint has a place in the data, and training would begin elsewhere: no loader took it"
        raise RestoreError(key="train_dataloader", message=message)


def states(loaders: Any, *, ended: bool, unseen: int, trained: int, now: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the states of a loop's loaders, for a save.

    Args:
        loaders: Lightning's ``CombinedLoader``.
        ended: whether this is the end of an epoch.
        unseen: how many of the batches that they gave were not trained on; they are given again.
        trained: how many of this epoch were.
        now: what the generators were when training stopped, which may be a while ago.
    """
    found = [one for one in loaders.flattened if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")]
    places = {id(one): one.position() for one in found if isinstance(one, Resumable)}
    epoch = max((place.epoch for place in places.values() if place.begun), default=0)
    in_step = len(loaders.flattened) > 1 and loaders._mode != "max_size_cycle"  # until one has come to its end
    saved = []
    for loader in found:
        place = places.get(id(loader))
        if place is None:
            saved.append(loader.state_dict())
            continue
        last = loader.ended()
        over = last if not place.begun and last is not None and last.epoch >= epoch else None  # and others go on
        again = max(0, (over or place).batches - trained) if in_step else unseen
        place = over.without(again) if over is not None else loader.position(again)
        if ended:
            place = place.at_end()
        is_lightnings = isinstance(loader, ForLightning)  # else safe_ckpt.data.resumable made it
        saved.append({_KEY: {_PLACES: [place.to_json()], _NOW: now}} if is_lightnings else place.to_json())
    return saved


def state_at_end(state: Any) -> Any:
    """The state of a loader after the last batch of an epoch. Lightning does not ask for more, so the loader cannot know."""
    if not _is_ours(state):
        return state
    if _KEY not in state:  # safe_ckpt.data.resumable made it
        return Position.from_json(state).at_end().to_json()
    if _PLACES not in state[_KEY]:
        return state
    place = Position.from_json(state[_KEY][_PLACES][0]).at_end()
    return {_KEY: {**state[_KEY], _PLACES: [place.to_json()]}}


def at_batch(state: Any, *, unseen: int) -> Any:
    """The state of a loader within an epoch, as a stock checkpoint has it, before the batches that were not trained on."""
    if not isinstance(state, dict) or _PLACES not in state.get(_KEY, {}):
        return state
    places = state[_KEY][_PLACES]
    return {_KEY: {**state[_KEY], _PLACES: [places[min(unseen + state[_KEY].get(_AHEAD, 0), len(places) - 1)]]}}


def of_stock(states: Sequence[Any], *, unseen: int) -> dict[str, Any] | None:
    """Return the places and generators that loaders of ours gave to stock Lightning; None if none is ours."""
    now = [state[_KEY][_NOW] for state in states if isinstance(state, dict) and _KEY in state]
    return {"rng": now[0], "loaders": [at_batch(state, unseen=unseen) for state in states]} if now else None


def saves_within_epochs(trainer: Any, callback: Any) -> bool:
    """Whether a ``ModelCheckpoint`` is to save before an epoch has ended."""
    by_steps = callback._every_n_train_steps > 0 or callback._train_time_interval is not None
    if by_steps or callback.save_on_exception or callback._should_save_on_train_epoch_end(trainer):
        return by_steps or bool(callback.save_on_exception)
    timed = getattr(trainer, "_val_check_time_interval", None) is not None
    return timed or bool(trainer.val_check_batch < trainer.num_training_batches)  # it saves at each validation


def say_what_is_inexact(trainer: Any, callback: Any, *, resumed_within: bool) -> None:
    """Before training, on rank 0: one warning about loaders that do not know their place.

    Args:
        trainer: in ``fit``.
        callback: the one that saves.
        resumed_within: whether this run goes on within an epoch.
    """
    loaders = trainer.fit_loop._combined_loader
    if trainer.global_rank != 0 or not (resumed_within or saves_within_epochs(trainer, callback)):
        return
    several = len(loaders.flattened) > 1
    if several and loaders._mode == "max_size_cycle" and not all(map(has_length, loaders.flattened)):
        logger.warning(
            "CombinedLoader: with 'max_size_cycle' and a loader without a length, Lightning does not save which loaders "
            "have come to their end: after a resume within an epoch that epoch may be longer. Give each loader a length"
        )
    blind = [loader for loader in loaders.flattened if not hasattr(loader, "load_state_dict")]
    if blind:
        logger.warning(
            "checkpoints within an epoch, and %s cannot tell where it was: after a resume within an epoch some batches come "
            "again and others not, and the run differs from an uninterrupted one. Use safe_ckpt.lightning.resumable(loader), "
            "or save at the ends of epochs",
            ", ".join(name_of(loader) if isinstance(loader, DataLoader) else type(loader).__name__ for loader in blind),
        )


def resumable(loader: _Loader, *, skip: Skip = None) -> _Loader:
    """Make a DataLoader resumable within an epoch. Returns a loader that stands in for it, of a subclass of its class.

    See ``safe_ckpt.data.resumable``, which this is for Lightning: Lightning's own ``ModelCheckpoint`` saves its place, too.

    Args:
        loader: a ``torch.utils.data.DataLoader``.
        skip: as there. An ``IterableDataset`` without ``state_dict`` and ``load_state_dict`` is always read again.

    Raises:
        TypeError: as there.

    Example:
        ```python
        loader = resumable(DataLoader(dataset, batch_size=8, shuffle=True))
        trainer = Trainer(max_steps=4, callbacks=[SafeCheckpointCallback("runs/lightning", resume="auto")], **quiet)
        trainer.fit(module, loader)
        ```
    """
    if isinstance(loader, DataLoader) and not is_map(loader) and not is_placed(loader):
        skip = "read"
    let_places_be_used()
    return made_of(loader, skip, ForLightning)
