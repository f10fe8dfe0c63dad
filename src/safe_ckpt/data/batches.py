"""The batches of an epoch as training is given them: counted, and what came along with them kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch._utils import ExceptionWrapper

from safe_ckpt.data import generators
from safe_ckpt.data.facts import is_map, name_of
from safe_ckpt.data.workers import Delivered
from safe_ckpt.errors import RestoreError

Undo = tuple[int, str, Mapping[str, Any] | None, Mapping[str, Any] | None]
_LOOKED_BACK = 3  # a framework has given training one batch less than it took, or two


class Counter:
    """How many batches were given since an epoch began, or was resumed, and what their workers were at after them.

    Args:
        looked_back: how many batches may have to be given again.

    Attributes:
        before: how many of the epoch were given before.
        workers: what they are at.
        turn: which of them makes the next batch.
        undo: what it was before the last batches: see ``Position``.
    """

    __slots__ = ("before", "count", "turn", "undo", "workers")

    def __init__(self, looked_back: int = _LOOKED_BACK) -> None:
        self.before = self.count = self.turn = 0
        self.workers: dict[str, Mapping[str, Any]] = {}
        self.undo: deque[Undo] = deque(maxlen=looked_back)

    def took(self, delivered: Delivered, drawn: Mapping[str, Any] | None) -> Any:
        """The batch that has just been counted, and what the generators of this process were before."""
        worker = str(delivered.worker)
        self.undo.append((self.before + self.count, worker, self.workers.get(worker), drawn))
        self.workers[worker] = delivered.state
        self.turn = delivered.worker + 1
        return delivered.batch


class Batches:
    """The batches of an epoch. As Lightning has it for those of a DataLoader, none go along in a copy of a Trainer.

    The loader does not hold it, so that workers end with the last reference to either.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._inner: Iterator[Any] | None = None
        self._counter = Counter(max(_LOOKED_BACK, loader.looks_ahead))
        self._noted = bool(loader.looks_ahead) and not loader.__dict__["num_workers"]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        inner = self._inner
        if inner is None:
            # Not in ``__iter__``: a framework's hooks before the first batch have run by now.
            inner = self._inner = self._loader._begin(self._counter)
            resumed = self._loader._place.first_batch > 0
            batch = self._given(inner)
            if resumed and is_map(self._loader) and not self._loader._found:
                message = "its class has an iteration of its own, so that its place cannot be found again"
                raise RestoreError(key=name_of(self._loader), message=message)
            return batch
        return self._given(inner)

    def _given(self, inner: Iterator[Any]) -> Any:
        drawn = generators.snapshot() if self._noted else None
        try:
            batch = next(inner)
        except StopIteration:
            self._loader._end(self._counter)
            raise
        except Exception:
            self._counter.count += 1  # torch goes on with the next one, if the caller does
            raise
        counter = self._counter
        counter.count += 1
        if type(batch) is Delivered:
            found = counter.took(batch, drawn)
            if isinstance(found, ExceptionWrapper):
                found.reraise()  # type: ignore[no-untyped-call]
            return found
        if drawn is not None:
            counter.undo.append((counter.before + counter.count, "0", None, drawn))
        return batch

    def __reduce__(self) -> tuple[Any, ...]:
        return iter, ((),)
