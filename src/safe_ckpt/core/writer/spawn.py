"""Starting the writer process on a thread of its own: ``exec`` may hang for good, and nothing can be done about that.

The interpreter may lie on a network file system that does not answer. The thread that waits then is neither the one that trains
nor the one that saves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from safe_ckpt.core.writer.workers import WriterClient

_LOOK_S = 0.1


class Spawn:
    """One attempt. Begins at once, and does not wait.

    Args:
        niceness: of the process.
        ahead: modules that it imports before its first job.

    Attributes:
        child: the process, once it is there.
        error: why it cannot be started; None while that is not known, or where it was.
    """

    def __init__(self, niceness: int, ahead: Sequence[str] = ()) -> None:
        self.child: WriterClient | None = None
        self.error: BaseException | None = None
        self._niceness, self._modules = niceness, ahead
        self._over = threading.Event()
        self._ending = threading.RLock()
        self._abandoned = False
        try:
            threading.Thread(target=self._run, name="safe_ckpt-spawn", daemon=True).start()
        except RuntimeError:  # no more threads, or Python 3.12 shuts down
            self._run()

    @property
    def is_over(self) -> bool:
        """Whether it is known how it ended."""
        return self._over.is_set()

    def wait(self, limit_s: float, stop: Callable[[], None] = lambda: None) -> bool:
        """Wait for it. Returns whether it is over.

        Args:
            limit_s: how long.
            stop: called now and then; raises to give up.
        """
        deadline = time.monotonic() + limit_s
        while not self._over.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic()))) and time.monotonic() < deadline:
            stop()
        return self.is_over

    def abandon(self) -> None:
        """Nobody wants the process any more: it is ended when it is there."""
        with self._ending:
            self._abandoned = True
            child = self.child
        if child is not None:
            child.kill()

    def _run(self) -> None:
        try:
            child = WriterClient(self._niceness, self._modules)
        except Exception as error:  # the one that waits says so
            self.error = error
        else:
            with self._ending:
                self.child = child
                abandoned = self._abandoned
            if abandoned:
                child.kill()
        finally:
            self._over.set()
