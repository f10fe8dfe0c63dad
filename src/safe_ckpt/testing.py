"""For the tests of your own program: saves that start no process and are over when they return."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["inline_saves"]

_changing = threading.RLock()
_entered = 0


@contextlib.contextmanager
def inline_saves() -> Iterator[None]:
    """Let whatever is opened within save inline: a ``Checkpointer``, ``publishing``, ``safe_ckpt.dcp``, any adapter.

    Such a one starts no writer process: this process writes. Each save returns when its checkpoint is committed, old ones are
    deleted, and the hooks were told. A failed save raises where it always does: in ``result``, and in the next call. If another
    job may hold the directory, ``DirectoryInUseError`` comes at once, without waiting for its lease. All else is as usual: the
    files, their checksums, fsync, and what is agreed among ranks. A mirror uploads in a thread, which no save waits for.

    It counts for this process, on all threads. With several ranks each of them enters it; then a save returns on a rank when
    the checkpoint of all ranks is committed. A rank outside of it saves as usual, and neither waits for the other.

    Use it as a context manager, as a decorator, or as the body of a pytest fixture: ``with inline_saves(): yield``. What was
    opened before is not changed. What is opened within stays inline until it is closed.

    Example:
        ```python
        from safe_ckpt.testing import inline_saves

        with inline_saves(), Checkpointer("runs/test") as ckpt:
            ckpt.save(1, {"model": model})
            print(os.listdir("runs/test/step-00000001"))
        ```

        ```text
        …manifest.json…
        ```
    """
    global _entered  # noqa: PLW0603 - of the process, as the processes and locks are that it is about
    with _changing:
        _entered += 1
    try:
        yield
    finally:
        with _changing:
            _entered -= 1


def saves_inline() -> bool:
    """Whether what is opened now saves inline. For the core."""
    return _entered > 0
