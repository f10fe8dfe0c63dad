"""The place in the data: what a stateful loader needs besides its own state to go on in the middle of an epoch, bit for bit.

Accelerate saves how many batches a ``StatefulDataLoader`` has given. Which ones those were, and what comes next, also depends
on the random generators at the moment the epoch began; and starting an iterator draws from them, after Accelerate has put them
back. So the generators' state at each beginning is saved too, and when a loader is continued it begins from that state, gives
its first batch, and then the generators get the state that they had when the checkpoint was taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from safe_ckpt.accelerate import capture

KEY = "safe_ckpt_loaders"
"""In each rank's ``random_states_<rank>.pkl``; stock Accelerate ignores it."""


class Loaders:
    """The stateful loaders of one Accelerator, watched from ``prepare`` on."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}

    def watch(self, loader: Any) -> None:
        """From now on remember with which generators an epoch of ``loader`` begins."""
        if getattr(loader, "use_stateful_dataloader", False) and id(loader.base_dataloader) not in self._watched:
            self._watched[id(loader.base_dataloader)] = _Watched(loader)

    def states(self, loaders: Sequence[Any]) -> list[dict[str, Any] | None]:
        """What to save, loader by loader."""
        found = [self._of(loader) for loader in loaders]
        return [watched.state() if watched is not None else None for watched in found]

    def resume(self, loaders: Sequence[Any], states: Sequence[Mapping[str, Any] | None]) -> None:
        """Accelerate has restored everything: let loaders in mid-epoch go on exactly, all others begin as new ones do."""
        random_states = capture.random_states(0)
        for index, loader in enumerate(loaders):
            self.watch(loader)
            watched = self._of(loader)
            if watched is not None:
                watched.resume(states[index] if index < len(states) else None, random_states)

    def forget(self) -> None:
        """Leave the loaders as they were."""
        for watched in self._watched.values():
            watched.forget()
        self._watched.clear()

    def _of(self, loader: Any) -> _Watched | None:
        return self._watched.get(id(getattr(loader, "base_dataloader", None)))


class _Watched:
    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._base = loader.base_dataloader
        self._iterate: Callable[[], Iterator[Any]] = self._base.__iter__
        self._begun: dict[str, Any] | None = None
        self._pending: tuple[Mapping[str, Any] | None, Mapping[str, Any]] | None = None
        # Accelerate asks the loader within by attribute, so one of the instance is found.
        self._base.__iter__ = self._begin

    def state(self) -> dict[str, Any]:
        return {"begun": self._begun, **self._now()}

    def resume(self, state: Mapping[str, Any] | None, random_states: Mapping[str, Any]) -> None:
        place = getattr(self._base, "next_iter_state", None)
        if not isinstance(place, Mapping):
            return
        if place.get("_iterator_finished") or place.get("_num_yielded") == 0:
            # A continued iterator that has nothing left is started twice, and draws twice.
            self._base.next_iter_state = None
            generator = self._generator()
            if state is not None and generator is not None and state["generator"] is not None:
                generator.set_state(state["generator"])
            if state is not None and state["ready"]:
                self._base.state_dict()  # starts it, as it was
                capture.restore_random_states(random_states)
            return
        self._pending = (state["begun"] if state is not None else None, random_states)

    def forget(self) -> None:
        vars(self._base).pop("__iter__", None)

    def _begin(self) -> Iterator[Any]:
        pending, self._pending = self._pending, None
        if pending is None:
            self._begun = self._now()
            return self._iterate()
        begun, random_states = pending
        generator = self._generator()
        if begun is None:
            return _Continued(self._iterate(), random_states)
        self._begun = dict(begun)
        torch.set_rng_state(begun["torch"])
        if generator is not None and begun["generator"] is not None:
            generator.set_state(begun["generator"])
        own = self._base.generator
        if begun["ready"]:
            # It had been started before the epoch began: what starting draws must not come from the generators now.
            self._base.generator = torch.Generator()
        try:
            return _Continued(self._iterate(), random_states)
        finally:
            self._base.generator = own

    def _now(self) -> dict[str, Any]:
        generator = self._generator()
        state = generator.get_state() if generator is not None else None
        return {"torch": torch.get_rng_state(), "generator": state, "ready": self._is_ready()}

    def _is_ready(self) -> bool:
        """Whether the loader's next iterator is there already: asking a new loader for its state starts one."""
        return bool(getattr(self._base, "_initial_iter_for_state_dict", False))

    def _generator(self) -> torch.Generator | None:
        sampler: Any = getattr(self._loader, "batch_sampler", None)
        while hasattr(sampler, "batch_sampler"):
            sampler = sampler.batch_sampler
        found = getattr(getattr(sampler, "sampler", sampler), "generator", None)
        return found if isinstance(found, torch.Generator) else None


class _Continued:
    """Puts the generators back when the first batch has been fetched: at that point they were when it was saved."""

    def __init__(self, iterator: Iterator[Any], random_states: Mapping[str, Any]) -> None:
        self._iterator = iterator
        self._random_states: Mapping[str, Any] | None = random_states

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._iterator)
        if self._random_states is not None:
            capture.restore_random_states(self._random_states)
            self._random_states = None
        return batch
