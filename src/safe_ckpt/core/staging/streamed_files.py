"""Files of one save that are handed over one by one: the caller's thread copies each at once, the background writes it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from safe_ckpt.core.formats.file_plan import FilePlan, WriteTask
from safe_ckpt.core.staging import snapshot
from safe_ckpt.core.staging.buffer import SharedBuffer
from safe_ckpt.errors import SafeCheckpointError

_LOOK_S = 0.1


class FileStream:
    """The files of one save on one rank, on their way to the background. They end with ``seal`` or ``fail``.

    Args:
        pool: memory of earlier saves, to be used again; this gives back to it.

    Attributes:
        size_bytes: how much was handed over until now.
    """

    def __init__(self, pool: list[SharedBuffer]) -> None:
        self._pool = pool
        self._waiting: deque[tuple[SharedBuffer, list[WriteTask]]] = deque()
        self._turn = threading.Condition()
        self._place: tuple[str, Mapping[str, Any]] = ("", {})
        self._ended = False
        self._error: SafeCheckpointError | None = None
        self.size_bytes = 0

    def bind(self, folder: str, manifest: Mapping[str, Any]) -> None:
        """Where the files go. For the engine, before the first one comes."""
        self._place = (folder, manifest)

    def add(self, image: FilePlan) -> None:
        """Copy one file. When this returns the caller may change whatever it likes.

        Raises:
            NotEnoughSpaceError: the machine has not that much memory left.
        """
        with self._turn:
            self.size_bytes += image.length
            buffer = self._buffer_for(snapshot.buffer_bytes([image]))
        try:
            tasks = snapshot.take([image], buffer, *self._place)
        except BaseException:
            buffer.close()
            raise
        with self._turn:
            if self._ended:  # the save failed meanwhile, and its handle has the error
                self._pool.append(buffer)
            else:
                self._waiting.append((buffer, tasks))
            self._turn.notify_all()

    def _buffer_for(self, size_bytes: int) -> SharedBuffer:
        """The smallest that is large enough, else the largest, which grows. So each stays about as large as one file."""
        self._pool.sort(key=lambda buffer: buffer.size)
        fitting = next((buffer for buffer in self._pool if buffer.size >= size_bytes), None)
        if fitting is None:
            return self._pool.pop() if self._pool else SharedBuffer()
        self._pool.remove(fitting)
        return fitting

    def seal(self) -> None:
        """No more will come: the save is complete."""
        with self._turn:
            self._ended = True
            self._turn.notify_all()

    def fail(self, error: SafeCheckpointError) -> None:
        """No more will come, and what came is not to be committed. After ``seal`` it is too late."""
        with self._turn:
            if not self._ended:
                self._ended, self._error = True, error
            self._turn.notify_all()

    def take(self, check: Callable[[], None]) -> Iterator[tuple[SharedBuffer, list[WriteTask]]]:
        """What is to be written, as it comes. On the background thread; the memory is taken back with the next one.

        Args:
            check: called while waiting; raises to give up.

        Raises:
            SafeCheckpointError: that of ``fail``.
        """
        while True:
            with self._turn:
                while not self._waiting and not self._ended:
                    self._turn.wait(_LOOK_S)
                    check()
                if self._error is not None:
                    raise self._error
                if not self._waiting:
                    return
                buffer, tasks = self._waiting.popleft()
            try:
                yield buffer, tasks
            finally:
                with self._turn:
                    self._pool.append(buffer)

    def release(self) -> None:
        """The save is over: take back what was not written. On the background thread."""
        with self._turn:
            self._pool.extend(buffer for buffer, _ in self._waiting)
            self._waiting.clear()
            self._ended = True
