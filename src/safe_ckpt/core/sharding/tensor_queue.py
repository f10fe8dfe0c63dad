"""Tensors on their way from the thread that gathers to the thread that writes: in order, and never too many at a time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from safe_ckpt.errors import SaveError

if TYPE_CHECKING:
    import torch

_LOOK_S = 0.25


class TensorQueue:
    """A bounded queue of tensors.

    Args:
        name: of what is saved, for messages.
        most_bytes: so much may wait or be written while the next tensor is gathered. A larger one is waited for by itself.
        timeout_s: how long either side waits for the other.
    """

    def __init__(self, name: str, most_bytes: int, timeout_s: float) -> None:
        self._name = name
        self._most_bytes = most_bytes
        self._timeout_s = timeout_s
        self._waiting: deque[tuple[str, torch.Tensor]] = deque()
        self._held_bytes = 0
        self._error: Exception | None = None
        self._turn = threading.Condition()

    def give(self, name: str, tensor: torch.Tensor, check: Callable[[], None]) -> None:
        """Hand over a tensor; returns when there is room for another one. On the thread that gathers.

        Args:
            name: its name.
            tensor: not used by the caller afterwards.
            check: called now and then; raises when the writing has ended.

        Raises:
            SaveError: it was not taken in time.
        """
        size = tensor.numel() * tensor.element_size()
        with self._turn:
            self._waiting.append((name, tensor))
            self._held_bytes += size
            self._turn.notify_all()
        del tensor
        deadline = time.monotonic() + self._timeout_s
        with self._turn:
            while self._held_bytes > self._most_bytes:
                self._turn.wait(_LOOK_S)
                check()
                if time.monotonic() > deadline:
                    cause = f"{name} was not written within {self._timeout_s:.0f} s"
                    raise SaveError(name=self._name, cause=cause, phase="write")

    def take(self, name: str) -> torch.Tensor:
        """The next tensor, which must be ``name``. On the thread that writes.

        Raises:
            SaveError: it did not come in time, or another one comes: after a disk error nothing can be read again.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._turn:
            while not self._waiting:
                if self._error is not None:
                    raise self._error
                if time.monotonic() > deadline:
                    cause = f"{name} was not gathered within {self._timeout_s:.0f} s"
                    raise SaveError(name=self._name, cause=cause, phase="gather")
                self._turn.wait(_LOOK_S)
            gathered, tensor = self._waiting.popleft()
        if gathered != name:
            cause = f"{name} is to be written and {gathered} was gathered: tensors cannot be gathered a second time"
            raise SaveError(name=self._name, cause=cause, phase="write")
        return tensor

    def release(self, size_bytes: int) -> None:
        """A tensor that was taken has been written. On the thread that writes."""
        with self._turn:
            self._held_bytes -= size_bytes
            self._turn.notify_all()

    def fail(self, error: Exception) -> None:
        """No more will come. On the thread that gathers."""
        with self._turn:
            self._error = error
            self._waiting.clear()
            self._turn.notify_all()
