"""Putting what was loaded back where it belongs: on all ranks, or on none."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self

from safe_ckpt.core.sharding.dtensor import Fitted
from safe_ckpt.core.state.items import PerRank, SavedItem, items_of
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.errors import RestoreError, StateError


class Restoring:
    """The last step of a resume on one rank: what was loaded is compared with where it goes, and then applied.

    Between the two all ranks agree: nothing is applied on any of them where something does not fit on one. That holds for
    names, shapes and types; an object of the user's own may still refuse what it is given.

    Args:
        state: where it goes. Values that cannot change in place are replaced in it.
        loaded: what was loaded, by item.
        path: of the checkpoint, for errors.
    """

    def __init__(self, state: Mapping[str, Any], loaded: Mapping[str, Any], path: Place) -> None:
        self._state = state
        self._loaded = loaded
        self._path = path
        self._fitted: list[tuple[SavedItem, Fitted]] = []

    def compare(self) -> dict[str, Any]:
        """Compare all items, on every rank.

        Returns:
            What this rank has no place for, for ``agree``.

        Raises:
            RestoreError: something does not fit; names it.
        """
        items = items_of(self._state)
        for item in items:
            with self._named(item):
                item.refuse_short()
        for item in items:
            with self._named(item):
                if not isinstance(self._state, MutableMapping) and not item.changes_in_place:
                    raise ValueError("its value cannot change in place and the state is read-only: pass a dict")
                loaded = self._loaded[item.name]
                fit = item.fit_shards(loaded.folder) if isinstance(loaded, Shards) else item.fit(loaded)
                self._fitted.append((item, fit))
        return {
            item.name: {"besides": list(fitted.besides), "refusal": fitted.refusal}
            for item, fitted in self._fitted
            if fitted.besides
        }

    def agree(self, answers: Mapping[int, Mapping[str, Any]]) -> dict[str, list[str]]:
        """On rank 0: what no rank has a place for, by item.

        Raises:
            RestoreError: that cannot be added; names it.
        """
        nowhere = {}
        for name, said in answers[0].items():
            of_all = [answer.get(name, {}).get("besides", ()) for answer in answers.values()]
            nowhere[name] = [one for one in said["besides"] if all(one in others for others in map(frozenset, of_all))]
            if nowhere[name] and said["refusal"]:
                message = f"{said['refusal']} {nowhere[name]}, which the checkpoint has"
                raise RestoreError(path=str(self._path), key=f"state[{name!r}]", message=message)
        return nowhere

    def apply(self, nowhere: Mapping[str, Collection[str]]) -> None:
        """Apply all items, after ``compare``.

        Raises:
            RestoreError: an object refused its state; says what was applied before.
        """
        done: list[str] = []
        for item, fitted in self._fitted:
            with self._named(item, done):
                result = fitted.apply(nowhere.get(item.name, ()))
                if result is not item.value and isinstance(self._state, MutableMapping):
                    self._state[item.name] = PerRank(result) if item.per_rank else result
            done.append(item.name)
        self._fitted.clear()

    @contextlib.contextmanager
    def _named(self, item: SavedItem, done: Sequence[str] = ()) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            message = (
                error.message if isinstance(error, RestoreError | StateError) else f"{type(error).__name__}: {error}"
            )
            key = getattr(error, "key", "")
            key = key if key.startswith(item.key) else item.key  # of a tensor in it
            if done:
                message += f". Applied before: {', '.join(done)}. Build the state again before another resume"
            raise RestoreError(path=str(self._path), key=key, message=message) from error


@dataclass(frozen=True)
class Shards:
    """A sharded item, verified and not read yet."""

    folder: Path

    def refuse_code(self) -> Self:
        """Before anything is restored: raise ``HostileCheckpointError`` where it would run code. Returns itself."""
        from safe_ckpt.core.sharding import dcp_read

        dcp_read.refuse_code(self.folder)
        return self
