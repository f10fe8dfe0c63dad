"""The background of saving: one thread per process that runs saves to their end, one after the other.

It writes, commits, retains and reports; it issues no collectives. The order in which saves are put in is the order in which
they are committed, the same on every rank.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from safe_ckpt import events
from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.coordination.coordinator import Coordinator
from safe_ckpt.core.coordination.rounds import TwoPhaseCommit
from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.core.health.verdict import Known
from safe_ckpt.core.home import retention
from safe_ckpt.core.home.candidates import WEIGHTS, stamp_of
from safe_ckpt.core.home.file_home import Workspace
from safe_ckpt.core.home.object_home import ObjectRoot
from safe_ckpt.core.home.retention import Decision
from safe_ckpt.core.saving.commit_protocol import CommitProtocol, Publication
from safe_ckpt.core.saving.file_publication import FilePublication
from safe_ckpt.core.saving.object_publication import ObjectPublication
from safe_ckpt.core.saving.save import Root, SaveJob, SaveRequest
from safe_ckpt.core.staging.buffer import SharedBuffer
from safe_ckpt.core.staging.worker_thread import Background, Refused
from safe_ckpt.core.storage.copier import Stamp
from safe_ckpt.core.storage.durable import freed_bytes
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.core.transfer.mirror import Mirror
from safe_ckpt.core.writer.supervisor import WriterSupervisor
from safe_ckpt.errors import (
    CommitOutcomeUnknown,
    PeerLostError,
    RendezvousTimeout,
    SafeCheckpointError,
    SaveError,
    UnhealthyStateError,
)
from safe_ckpt.hooks.emitter import Emitter

_SHARE_OF_WAIT = 0.7
logger = logging.getLogger(__name__)
_LAST_WORDS_S = 5.0
_NAMES_REPORTED = 10


class SaveQueue:
    """Runs saves in the background.

    Args:
        coordinator: where the ranks meet.
        config: settings.
        emit: receives what happens.
        give_back: takes the buffer of a save that is over.

    Attributes:
        writer: writes this rank's files.
        stop_by: when the job must be over, on the monotonic clock; a save that is not done by then is given up.
        last_save_s: how long the last committed save took, from the call to its commit; 0 when there was none.
        known: what this rank knows of the health of its files.
        mirror: gets what was committed; None for no mirror, and on other ranks than 0.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        config: CheckpointConfig,
        emit: Emitter,
        give_back: Callable[[SharedBuffer], None],
    ) -> None:
        self._coordinator = coordinator
        self._store_client = coordinator.store_client("phases")
        self._config = config
        self._emit = emit
        self._give_back = give_back
        # An upload gives up before the others stop waiting for it, so that they learn why.
        storage = StorageOptions.of(config.storage, _SHARE_OF_WAIT * config.timeouts.lengthy_s)
        self.writer = WriterSupervisor(config.writer, config.timeouts, self._respawned, storage)
        coordinator.movers.append(self.writer.progress)
        self._background = Background("safe_ckpt-save", self._work)
        self._open: list[SaveJob] = []
        self._beginning = threading.RLock()
        self._failures = 0
        self.mirror: Mirror | None = None
        self._deferred: list[tuple[Root, Place, Stamp | None]] = []  # to be deleted, and not gone yet
        self.stop_by: float | None = None
        self.last_save_s = 0.0
        self.known = Known()
        self._giving_up = threading.Event()

    def start(self) -> None:
        """Start the thread and the writer process ahead of the first save. On any thread."""
        self._background.start()
        self.writer.start()

    def put(self, job: SaveJob) -> None:
        """Put a save whose snapshot is planned into the queue. Its handle gets an outcome, whatever happens here."""
        self._open.append(job)
        job.versions, self.known.versions = self.known.versions, {}
        try:
            self._hand_over(job)
        except BaseException:
            self._hand_over(job)  # interrupted: it may be in the queue already, and then this one is ignored
            raise

    def _hand_over(self, job: SaveJob) -> None:
        try:
            self._background.put(job)
        except Refused as error:
            # The system gives no more threads, or another thread closed this. The other ranks learn of it from here.
            if job.copy is not None:
                job.copy.abandon()
            if job.error is None:
                job.error = SaveError(name=job.name, cause=str(error), rank=self._coordinator.rank, phase="snapshot")
            self._work(job)

    def close(self, *, within_s: float | None = None) -> None:
        """Finish what was put in, then end the writer process.

        Waits as long as bytes progress on any rank, and ``shutdown_s`` for what makes no progress; that save then fails.

        Args:
            within_s: wait this long at most, progress or not: the program is on its way out.
        """
        try:
            self._background.end()
            if not self._background.is_current:  # a collector may call this from anywhere
                self._drain(within_s)
        finally:
            self._coordinator.movers.remove(self.writer.progress)
            self.writer.close()
            self._store_client.close()

    def _drain(self, within_s: float | None) -> None:
        thread = self._background
        limit_s = self._config.timeouts.shutdown_s if within_s is None else within_s
        seen, since = self._coordinator.progress(), time.monotonic()
        try:
            while thread.is_alive and time.monotonic() - since <= limit_s:
                thread.join(0.1)
                if (now := self._coordinator.progress()) != seen and within_s is None:
                    seen, since = now, time.monotonic()
            if thread.is_alive:
                lag = "made no progress for" if within_s is None else "was not done within"
                logger.error("a save %s %.0f s at shutdown and is given up", lag, limit_s)
        finally:
            # Also on a second Ctrl-C: what is still under way ends now.
            if thread.is_alive:
                self._giving_up.set()
                thread.join(_LAST_WORDS_S)
            if thread.is_alive:
                self._abandon()

    def _abandon(self) -> None:
        """The thread is in a call that does not end. Give an error to those who wait for its saves."""
        cause = "this rank shut down while the disk did not answer"
        for number, job in enumerate(list(self._open)):
            kind = SaveError if number else CommitOutcomeUnknown  # the first one may be committed or not
            error = kind(name=job.name, cause=cause, rank=self._coordinator.rank, phase="shutdown")
            self._emit(failed(job.request, error, self._coordinator.rank, time.monotonic() - job.started))
            job.handle.finish(None, error)

    def _work(self, job: SaveJob) -> None:
        with self._beginning:
            if job.begun:
                return
            job.begun = True
        try:
            self._process(job)
        except BaseException as error:  # a bug of ours must not leave the caller waiting
            logger.exception("the background thread failed")
            job.handle.finish(None, SaveError(name=job.name, cause=repr(error), rank=self._coordinator.rank))
            self._open.remove(job)
            if not isinstance(error, Exception) and not self._background.is_current:
                raise  # Ctrl-C is the caller's

    def _process(self, job: SaveJob) -> None:
        give_up = functools.partial(self._check_giving_up, job.name)
        reporting = [rank for rank in job.writers if rank != 0]
        two_phase = TwoPhaseCommit(self._coordinator, self._store_client, job.op_id, reporting, give_up, job.call)
        publication = publication_of(job, self._config)
        phases = CommitProtocol(
            job, publication, two_phase, self.writer, self._config, self._coordinator.rank, give_up, self.known
        )
        self._emit(_agreed(job, self._coordinator.rank))
        info, failure = None, None
        try:
            info = phases.run()
        except SafeCheckpointError as error:
            failure = error
        finally:
            self._free(job)
        if info is not None:
            self.last_save_s = time.monotonic() - job.started
        # Here and not on the caller's thread: hooks write to files.
        self._emit.emit(_outcome(job, phases, info, failure, self._coordinator.rank))
        if info is not None and phases.health:
            failure = self._unhealthy(info, phases.health)
        if info is not None and self._coordinator.rank == 0:
            if self.mirror is not None and isinstance(job.workspace, Workspace):
                self.mirror.put(info, job.workspace)
            self._retain(job, info)
        if info is not None and info.marked:
            self.known.marked = [info]
        self._conclude(job, info, failure)

    def _unhealthy(self, info: CheckpointInfo, what: str) -> SafeCheckpointError | None:
        """Say it, and what all ranks raise."""
        action, rank = self._config.health.action, self._coordinator.rank
        facts: dict[str, Any] = {"name": info.name, "step": info.step, "path": str(info.path), "what": what}
        self._emit(events.Unhealthy(rank=rank, marked=info.marked, **facts))
        if action == "stop":
            return UnhealthyStateError(path=str(info.path), step=info.step, what=what)
        return None

    def _free(self, job: SaveJob) -> None:
        if job.copy is not None:
            job.copy.fail(
                SaveError(name=job.name, cause="the save was over before the copy was", rank=self._coordinator.rank)
            )
            if not job.copy.wait(self._config.timeouts.shutdown_s):
                logger.error("the memory of %s stays taken: a copy into it does not end", job.name)
                return
        if job.buffer is not None:
            self._give_back(job.buffer)

    def _retain(self, job: SaveJob, info: CheckpointInfo) -> None:
        on_commit, begun = job.request.on_commit, time.monotonic()
        try:
            decision = retention.after_commit(info, on_commit.catalog, on_commit.retention, marked=self.known.marked)
            if decision is None and any(root is job.workspace for root, *_ in self._deferred):
                decision = Decision(to_delete=())
            if on_commit.catalog is not None and not info.marked:  # what is still to be deleted was chosen again
                self._deferred = [one for one in self._deferred if one[0] is not job.workspace]
            if decision is not None:
                gone = self._carry_out(decision, job.workspace, begun)
                if on_commit.catalog is not None:
                    on_commit.catalog.settle(gone)
        except Exception:  # the save is committed, and must not fail because of the cleaning up
            logger.warning("could not remove old checkpoints after %s", info.path, exc_info=True)
        if isinstance(job.workspace, Workspace):
            job.workspace.drop_pending(job.op_id)

    def _carry_out(self, decision: Decision, root: Root, begun: float) -> Sequence[Place]:
        rank = self._coordinator.rank
        to_delete = self._due(root, decision.to_delete)
        if to_delete:
            root.confirm()
        freed = freed_bytes(path for path in to_delete if isinstance(path, Path))
        gone = self._discard(root, to_delete)
        freed += sum(decision.sizes.get(path, 0) for path in gone)
        for path in gone:
            self._emit(events.Removed(rank=rank, path=str(path)))
        self._emit(
            events.Retained(
                rank=rank,
                kept=tuple(decision.kept[-_NAMES_REPORTED:]),
                kept_count=len(decision.kept),
                removed=tuple(str(path) for path in gone),
                freed_bytes=freed if gone else 0,
                seconds=time.monotonic() - begun,
            )
        )
        return gone

    def _due(self, root: Root, paths: Sequence[Place]) -> list[Place]:
        """What of ``paths`` may be deleted now, and earlier ones: what the mirror needed, and what could not go then."""
        asked = {path: stamp for other, path, stamp in self._deferred if other is root and _is_still(path, stamp)}
        for path in paths:
            asked.setdefault(path, stamp_of(path) if isinstance(path, Path) else None)
        held = self.mirror.holding(list(asked)) if self.mirror is not None else set()
        others = [one for one in self._deferred if one[0] is not root]
        self._deferred = [*others, *((root, path, stamp) for path, stamp in asked.items())]
        return [path for path in asked if path not in held]

    def _discard(self, root: Root, paths: Sequence[Place]) -> Sequence[Place]:
        gone = root.discard(paths)
        self._deferred = [one for one in self._deferred if one[0] is not root or one[1] not in gone]
        if self.mirror is not None and isinstance(root, Workspace):
            self.mirror.deleted(gone, root)
        return gone

    def delete_deferred(self) -> None:
        """Delete what the mirror needed, when it has ended. On rank 0, after ``close``. What fails is logged."""
        for root in {id(one): one for one, *_ in self._deferred}.values():
            try:
                due = self._due(root, [])
                root.confirm()
                self._discard(root, due)
            except (OSError, SafeCheckpointError):
                logger.warning("could not remove old checkpoints in %s", root.path, exc_info=True)

    def _conclude(self, job: SaveJob, info: CheckpointInfo | None, failure: SafeCheckpointError | None) -> None:
        self._failures = 0 if failure is None else self._failures + 1
        stops = isinstance(failure, UnhealthyStateError)
        tolerated = (
            not stops and self._config.on_failure == "warn" and self._failures < self._config.max_consecutive_failures
        )
        if failure is not None and tolerated:
            logger.warning("%s (failure %d in a row; training goes on)", failure, self._failures)
            job.handle.mark_reported()
        job.handle.finish(info, failure)
        self._open.remove(job)

    def _respawned(self, pid: int, ended: str) -> None:
        name = self._open[0].name if self._open else ""  # what is written is the oldest
        self._emit(events.Respawned(rank=self._coordinator.rank, pid=pid, ended=ended, name=name))

    def _check_giving_up(self, name: str) -> None:
        if self._giving_up.is_set():
            cause = "this rank shut down before it was done"
            raise SaveError(name=name, cause=cause, rank=self._coordinator.rank, phase="shutdown")
        if self.stop_by is not None and time.monotonic() > self.stop_by:
            cause = f"the {self._config.signal_grace_s:.0f} s after the signal (signal_grace_s) are over"
            raise SaveError(name=name, cause=cause, rank=self._coordinator.rank, phase="shutdown")


def publication_of(job: SaveJob, config: CheckpointConfig) -> Publication:
    """How this save becomes a checkpoint, where it goes to."""
    root, folder, path = job.workspace, job.folder, job.path
    if isinstance(root, ObjectRoot) and isinstance(folder, ObjectPath):
        return ObjectPublication(job, root, folder)
    if isinstance(root, Workspace) and isinstance(folder, Path) and isinstance(path, Path):
        return FilePublication(job, root, path, folder, config.timeouts)
    raise TypeError(f"{path} does not lie in {root.path}")


def _agreed(job: SaveJob, rank: int) -> events.Agreed:
    at = _since_epoch(job.started + job.agreed_s)
    return events.Agreed(rank=rank, at=at, name=job.name, step=job.request.facts.step, seconds=job.agreed_s)


def _outcome(
    job: SaveJob, phases: CommitProtocol, info: CheckpointInfo | None, failure: SafeCheckpointError | None, rank: int
) -> Iterator[events.Event]:
    """The events of ``job`` once its outcome is known."""
    now = time.monotonic()
    facts: dict[str, Any] = {"rank": rank, "name": job.name, "step": job.request.facts.step}
    size = sum(task.length for task in job.tasks)
    copied = job.copy is not None and job.copy.error is None
    if copied or (job.streamed and phases.write_s):
        stall_s = job.stall_s or now - job.started
        at = _since_epoch(job.started + stall_s)
        mode: Literal["eager", "overlapped"] = "eager" if job.overlap is None else "overlapped"
        yield events.Snapshotted(
            **facts, at=at, size_bytes=size, stall_s=stall_s, mode="streamed" if job.streamed else mode
        )
    if phases.written_bytes:
        at = _since_epoch(phases.written_at)
        yield events.Written(**facts, at=at, size_bytes=phases.written_bytes, seconds=phases.write_s)
    if failure is not None:
        yield failed(job.request, failure, rank, now - job.started)
    elif info is not None:
        notes = job.request.facts.notes
        yield events.Committed(
            **facts,
            path=str(info.path),
            sequence=info.sequence,
            size_bytes=info.size_bytes,
            seconds=now - job.started,
            weights_only=notes.get("adapter") == WEIGHTS or bool(notes.get("weights_only")),
        )


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


def _since_epoch(moment: float) -> float:
    """A moment of the monotonic clock in seconds since the epoch."""
    return time.time() - (time.monotonic() - moment)


def _is_still(path: Place, stamp: Stamp | None) -> bool:
    """Whether it is what was to be deleted, and no other one of its name. In an object store a name is there once."""
    return not isinstance(path, Path) or (stamp is not None and stamp_of(path) == stamp)
