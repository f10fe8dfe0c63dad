"""The events of the phases of each save, for hooks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from safe_ckpt import events
from safe_ckpt.core.home.candidates import holds_weights_alone
from safe_ckpt.core.saving.extension import Extension, Outcome, Run
from safe_ckpt.core.saving.save import SaveJob, failed, since_epoch
from safe_ckpt.errors import SafeCheckpointError


class RecordExtension(Extension):
    """Emits the events of saves."""

    name: ClassVar[str] = "record"

    def opened(self, run: Run) -> None:
        """See ``Extension``."""
        self._run = run

    def started(self, job: SaveJob) -> None:
        """See ``Extension``."""
        at = since_epoch(job.started + job.agreed_s)
        step = job.request.facts.step
        self._run.emit(events.Agreed(rank=self._run.rank, at=at, name=job.name, step=step, seconds=job.agreed_s))

    def ended(self, job: SaveJob, outcome: Outcome) -> SafeCheckpointError | None:
        """See ``Extension``."""
        self._run.emit.emit(_outcome(job, outcome, self._run.rank))
        return None


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
