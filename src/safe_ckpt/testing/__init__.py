"""For tests of your own: saves that start no process, an audit of what a resume forgets, kills, storage that goes wrong.

``safe_ckpt.testing.contracts``, which needs pytest, has the contracts of homes, sources, extensions and adapters.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from safe_ckpt.core.writer.inline import inline
from safe_ckpt.testing.faults import FaultyStorage
from safe_ckpt.testing.kills import Kills, kills
from safe_ckpt.tools.audit.result import Audit
from safe_ckpt.tools.audit.runs import Options
from safe_ckpt.tools.audit.runs import audit as run

__all__ = ["FaultyStorage", "Kills", "audit", "inline_saves", "kills"]


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
    with inline():
        yield


def audit(
    command: Sequence[str],
    *,
    stop: int = 20,
    until: int = 60,
    stops: int = 1,
    within_save: bool = False,
    resume_args: Sequence[str] = (),
    timeout_s: float = 3600.0,
    folder: str | os.PathLike[str] | None = None,
) -> Audit:
    """Run a training script twice, and a third time that is killed and started again, and name what its resume forgot.

    It is what ``safe-ckpt audit`` does. The script is a process of its own, and so are its ranks.

    Args:
        command: of the script; ``{out}`` in it becomes a folder of each run's own, in which its checkpoints must lie.
        stop: optimizer steps that a start makes before SIGKILL.
        until: optimizer steps that are compared, from the beginning.
        stops: how often it is killed.
        within_save: every second kill comes while files below ``{out}`` change.
        resume_args: are added where it is started again.
        timeout_s: for everything, in seconds.
        folder: keeps what the runs write; must be empty. Without it all that is removed.

    Returns:
        What it came to; ``check()`` raises ``ResumeDiffersError`` if it is not equal.

    Raises:
        AuditError: the script could not be run, saved nothing, or did not end in time.
        ResumeDiffersError: from ``check()`` of what is returned.

    Example:
        ```python
        def test_my_script_resumes_exactly():
            safe_ckpt.testing.audit([sys.executable, "train.py", "--out", "{out}"], stop=20, until=60).check()
        ```
    """
    with tempfile.TemporaryDirectory(prefix="safe-ckpt-audit-") as made:
        options = Options(
            command=command, folder=Path(folder or made), resume_args=resume_args, stop=stop, stops=stops,
            within_save=within_save, until=until, timeout_s=timeout_s,
        )  # fmt: skip
        return run(options)
