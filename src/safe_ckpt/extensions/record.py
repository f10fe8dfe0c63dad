"""The events of the phases of each save, for hooks, and signs of life between them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from safe_ckpt import events
from safe_ckpt.core.home.candidates import holds_weights_alone
from safe_ckpt.core.saving.extension import Extension, Outcome, Run
from safe_ckpt.core.saving.request import SaveRequest
from safe_ckpt.core.saving.save import SaveJob, failed, since_epoch
from safe_ckpt.errors import SafeCheckpointError
from safe_ckpt.hooks import steps
from safe_ckpt.hooks.emitter import Emitter
from safe_ckpt.hooks.event_log import SIGN_S

_MOST_WAITING = 64


class RecordExtension(Extension):
    """Emits the events of saves, and on rank 0 signs of life."""

    name: ClassVar[str] = "record"

    def __init__(self) -> None:
        self._signs: SignsOfLife | None = None
        self._steps: dict[int, int] = {}  # by request: how many there were when it was asked for

    def opened(self, run: Run) -> None:
        """See ``Extension``."""
        self._run = run
        if run.rank == 0:
            self._signs = SignsOfLife(run.emit)
            steps.begin_counting(self._signs.start)

    def planning(self, request: SaveRequest) -> int:
        """See ``Extension``."""
        if self._signs is not None:
            self._steps[id(request)] = steps.taken()
            for one in list(self._steps)[:-_MOST_WAITING]:  # of saves that were not begun
                self._steps.pop(one, None)
        return 0

    def started(self, job: SaveJob) -> None:
        """See ``Extension``."""
        at = since_epoch(job.started + job.agreed_s)
        made = self._steps.pop(id(job.request), None)
        facts: dict[str, Any] = {"name": job.name, "step": job.request.facts.step, "seconds": job.agreed_s}
        self._run.emit(events.Agreed(rank=self._run.rank, at=at, optimizer_steps=made, **facts))

    def ended(self, job: SaveJob, outcome: Outcome) -> SafeCheckpointError | None:
        """See ``Extension``."""
        self._run.emit.emit(_outcome(job, outcome, self._run.rank))
        return None

    def closing(self, within_s: float | None) -> None:
        """See ``Extension``."""
        if self._signs is not None:
            self._signs.stop()


class SignsOfLife:
    """Emits one every ``SIGN_S`` on a thread of its own, from the first step of an optimizer on.

    Args:
        emit: receives them.
        every_s: how often.
    """

    def __init__(self, emit: Emitter, every_s: float = SIGN_S) -> None:
        self._emit = emit
        self._every_s = every_s
        self._over = threading.Event()
        self._pid = os.getpid()

    def start(self) -> None:
        """Begin. On the thread that trains."""
        if not self._over.is_set() and os.getpid() == self._pid:
            threading.Thread(target=self._run, name="safe_ckpt-alive", daemon=True).start()

    def stop(self) -> None:
        """End it. On any thread; nothing is waited for."""
        steps.forget(self.start)
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self._emit(events.Alive(rank=0, optimizer_steps=steps.taken()))


def _outcome(job: SaveJob, outcome: Outcome, rank: int) -> Iterator[events.Event]:
    """The events of ``job`` once its outcome is known."""
    now = time.monotonic()
    facts: dict[str, Any] = {"rank": rank, "name": job.name, "step": job.request.facts.step}
    size = sum(task.length for task in job.tasks)
    copied = job.copy is not None and job.copy.error is None
    if copied or (job.streamed and outcome.write_s):
        stall_s = job.stall_s or now - job.started
        at = since_epoch(job.started + stall_s)
        copied_how: Literal["eager", "overlapped"] = "eager" if job.overlap is None else "overlapped"
        mode: Literal["streamed", "eager", "overlapped"] = "streamed" if job.streamed else copied_how
        yield events.Snapshotted(**facts, at=at, size_bytes=size, stall_s=stall_s, mode=mode)
    if outcome.written_bytes:
        at = since_epoch(outcome.written_at)
        yield events.Written(**facts, at=at, size_bytes=outcome.written_bytes, seconds=outcome.write_s)
    if outcome.error is not None:
        yield failed(job.request, outcome.error, rank, now - job.started)
    elif (info := outcome.info) is not None:
        yield events.Committed(
            **facts,
            path=str(info.path),
            sequence=info.sequence,
            size_bytes=info.size_bytes,
            seconds=now - job.started,
            weights_only=holds_weights_alone(job.request.facts.notes),
        )
