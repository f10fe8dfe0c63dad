"""One save: as it is asked for, whether it may start, and once it is under way on a rank; and the handle on its outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from safe_ckpt import events
from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.coordination.rounds import to_wire
from safe_ckpt.core.formats.file_plan import FilePlan, WriteTask
from safe_ckpt.core.formats.manifest import Manifest
from safe_ckpt.core.home.home import Home, Publication
from safe_ckpt.core.saving.handle import OpenSave
from safe_ckpt.core.saving.request import SaveRequest, Snapshot
from safe_ckpt.core.staging.buffer import SharedBuffer
from safe_ckpt.core.staging.snapshot import StagingCopy
from safe_ckpt.core.state.overlap import OverlapPlan
from safe_ckpt.core.state.planner import refuse_unsaved
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.writer.existing import Existing
from safe_ckpt.errors import (
    CommitOutcomeUnknown,
    PeerLostError,
    RendezvousTimeout,
    SafeCheckpointError,
)


def answer(
    request: SaveRequest, earlier: tuple[str, SafeCheckpointError] | None, rank: int, spared_bytes: int
) -> dict[str, Any]:
    """Return a rank's answer: how much it will write, and which earlier failure it knows of.

    Args:
        request: this rank's own.
        earlier: the ``op_id`` and the error of a save that failed and was not reported yet; None for none.
        rank: this rank.
        spared_bytes: how much of it probably need not be written.

    Raises:
        Exception: why it cannot plan its payload.
    """
    if request.error is not None:
        raise request.error
    failure = None
    if earlier is not None:
        failure = {"op_id": earlier[0], "error": to_wire(earlier[1], rank=rank, phase="save")}
    held = {name: list(texts) for name, texts in request.held.items()}
    return {
        "bytes": request.payload.new_bytes - spared_bytes,
        "writes": request.payload.writes,
        "earlier": failure,
        "held": held,
    }


def is_to_be_skipped(config: CheckpointConfig, request: SaveRequest, in_flight: int) -> bool:
    """Whether as many saves are in flight as may be, and this one is not to wait."""
    return config.on_busy == "skip" and not request.patient and in_flight >= config.max_in_flight


def decide(
    request: SaveRequest, answers: Mapping[int, Any], *, skip: bool, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Decide on rank 0 what follows from the answers.

    Args:
        request: rank 0's own.
        answers: what ``answer`` returned on every rank.
        skip: see ``is_to_be_skipped``.
        fields: what the manifest says besides.

    Returns:
        ``earlier``: the failed save that every rank reports instead of starting this one. Or the ``manifest`` of the save that
        may start, the ``writers``, and the ``needed_bytes`` of each rank. Nothing when the save is skipped.

    Raises:
        DesyncError: a rank holds something that would be lost; names it.
    """
    ranks = sorted(answers)
    for rank in ranks:
        if answers[rank]["earlier"]:
            return {"earlier": answers[rank]["earlier"]}
    refuse_unsaved({rank: answers[rank]["held"] for rank in ranks})
    if skip:
        return {}
    manifest = Manifest(
        name=request.name,
        sequence=request.destination.home.next_sequence(),
        step=request.facts.step,
        world_size=len(ranks),
        metrics=dict(request.facts.metrics),
        notes=dict(request.facts.notes),
        **fields,
    )
    return {
        "manifest": manifest.to_json(),
        "writers": [rank for rank in ranks if answers[rank]["writes"]],
        "needed_bytes": [answers[rank]["bytes"] for rank in ranks],
    }


@dataclass(kw_only=True)
class SaveJob:
    """A save under way, on one rank.

    Attributes:
        manifest: what is known of it before a byte is written.
        publication: how it becomes a checkpoint.
        writers: the ranks that write.
        tasks: what this rank writes.
        copy: what fills the buffer; the writing follows it.
        read: set when the files to be copied have been copied, or never will be.
        streamed: written straight from the tensors, while the caller waits; there is no buffer then.
        error: what went wrong on this rank after the agreement.
        stall_s: how long the call held the caller.
        started: when the caller called, on the monotonic clock. Its deadline counts from when its turn comes.
        agreed_s: how long after that the ranks had agreed.
        call: the number of the call that began it.
        begun: whether its background phases have begun.
        files: what of its payload this rank writes from memory.
        existing: what it does not write, by path: a checkpoint before has it.
    """

    request: SaveRequest
    manifest: Manifest
    publication: Publication
    writers: tuple[int, ...]
    save: OpenSave
    buffer: SharedBuffer | None = None
    tasks: Sequence[WriteTask] = ()
    copy: StagingCopy | None = None
    read: threading.Event = field(default_factory=threading.Event)
    streamed: bool = False
    error: BaseException | None = None
    stall_s: float = 0.0
    started: float = field(default_factory=time.monotonic)
    agreed_s: float = 0.0
    call: int = 0
    begun: bool = False
    files: Sequence[FilePlan] = ()
    existing: Mapping[str, Existing] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        return self.request.name

    @property
    def path(self) -> Place:
        """The checkpoint's final name."""
        return self.request.destination.path

    @property
    def home(self) -> Home:
        """The directory that is held."""
        return self.request.destination.home

    @property
    def overlap(self) -> OverlapPlan | None:
        """Which tensors may be copied after ``save`` has returned; None for none."""
        payload = self.request.payload
        return payload.overlap if isinstance(payload, Snapshot) else None

    @property
    def op_id(self) -> str:
        """Unique to this save; its pending directory is named after it."""
        return self.manifest.op_id

    @property
    def folder(self) -> Place:
        """The directory into which files are written."""
        return self.publication.folder


def failed(request: SaveRequest, error: SafeCheckpointError, rank: int, seconds: float) -> events.Failed:
    """The event of a save that failed ``seconds`` after the call."""
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


def since_epoch(moment: float) -> float:
    """A moment of the monotonic clock in seconds since the epoch."""
    return time.time() - (time.monotonic() - moment)
