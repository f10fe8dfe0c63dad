"""What a save's events say. Values in, events out; the pipeline and the engine emit them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from safe_ckpt import events
from safe_ckpt.core.directory.catalog import WEIGHTS
from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.core.saving.commit_protocol import CommitProtocol
from safe_ckpt.core.saving.request import SaveJob, SaveRequest
from safe_ckpt.errors import CommitOutcomeUnknown, PeerLostError, RendezvousTimeout, SafeCheckpointError


def agreed(job: SaveJob, rank: int) -> events.Agreed:
    """The ranks agreed on ``job``."""
    at = _since_epoch(job.started + job.agreed_s)
    return events.Agreed(rank=rank, at=at, name=job.name, step=job.request.facts.step, seconds=job.agreed_s)


def refused(request: SaveRequest, error: SafeCheckpointError, rank: int, seconds: float) -> events.Failed:
    """The ranks could not agree; ``seconds`` since the call of ``save``."""
    return _failed(request, error, rank, seconds)


def over(
    job: SaveJob, phases: CommitProtocol, info: CheckpointInfo | None, failure: SafeCheckpointError | None, rank: int
) -> Iterator[events.Event]:
    """Everything there is to say of ``job`` now that its outcome is known."""
    now, step = time.monotonic(), job.request.facts.step
    size = sum(task.length for task in job.tasks)
    copied = job.copy is not None and job.copy.error is None
    if copied or (job.streamed and phases.write_s):
        stall_s = job.stall_s or now - job.started
        at = _since_epoch(job.started + stall_s)
        yield events.Snapshotted(
            rank=rank, at=at, name=job.name, step=step, size_bytes=size, stall_s=stall_s, mode=_mode(job)
        )
    if phases.written_bytes:
        yield events.Written(
            rank=rank,
            at=_since_epoch(phases.written_at),
            name=job.name,
            step=step,
            size_bytes=phases.written_bytes,
            seconds=phases.write_s,
        )
    if failure is not None:
        yield _failed(job.request, failure, rank, now - job.started)
    elif info is not None:
        notes = job.request.facts.notes
        yield events.Committed(
            rank=rank,
            name=job.name,
            step=step,
            path=str(info.path),
            sequence=info.sequence,
            size_bytes=info.size_bytes,
            seconds=now - job.started,
            weights_only=notes.get("adapter") == WEIGHTS or bool(notes.get("weights_only")),
        )


def occupied_bytes(path: Path) -> int:
    """How much deleting ``path`` gives back: not what has another name besides. 0 where that is not known; never raises."""
    try:
        if path.is_symlink() or not path.is_dir():
            return _own_bytes(os.lstat(path))
        return sum(_own_bytes(entry.lstat()) for entry in path.rglob("*"))
    except OSError:
        return 0


def _mode(job: SaveJob) -> Literal["eager", "overlapped", "streamed"]:
    if job.streamed:
        return "streamed"
    return "eager" if job.overlap is None else "overlapped"


def _own_bytes(stat: os.stat_result) -> int:
    return stat.st_size if stat.st_nlink == 1 else 0  # a directory has several


def _failed(request: SaveRequest, error: SafeCheckpointError, rank: int, seconds: float) -> events.Failed:
    return events.Failed(
        rank=rank,
        name=request.name,
        step=request.facts.step,
        error=str(error),
        phase=str(getattr(error, "phase", "")),
        seconds=seconds,
        missing=_missing(error),
        outcome_unknown=isinstance(error, CommitOutcomeUnknown),
    )


def _missing(error: BaseException) -> tuple[int, ...]:
    """The ranks that did not come or were lost, also where that is only what the error comes from."""
    for cause in (error, error.__cause__):
        if isinstance(cause, RendezvousTimeout):
            return tuple(cause.missing)
        if isinstance(cause, PeerLostError):
            return tuple(cause.ranks)
    return ()


def _since_epoch(moment: float) -> float:
    """A moment of the monotonic clock in seconds since the epoch."""
    return time.time() - (time.monotonic() - moment)
