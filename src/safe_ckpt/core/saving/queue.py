"""The background of saving: one thread per process that runs saves to their end, one after the other.

It writes, commits, retains and reports; it issues no collectives. The order in which saves are put in is the order in which
they are committed, the same on every rank.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.coordination.coordinator import Coordinator
from safe_ckpt.core.formats.manifest import CheckpointInfo
from safe_ckpt.core.saving.save import SaveJob, failed
from safe_ckpt.core.staging.worker_thread import Background, Refused
from safe_ckpt.core.writer.supervisor import WriterSupervisor
from safe_ckpt.errors import (
    CommitOutcomeUnknown,
    SafeCheckpointError,
    SaveError,
    UnhealthyStateError,
)
from safe_ckpt.hooks.emitter import Emitter

logger = logging.getLogger(__name__)
_LAST_WORDS_S = 5.0


class SaveQueue:
    """Runs saves in the background.

    Args:
        coordinator: where the ranks meet.
        config: settings.
        emit: receives what happens.
        writer: is watched while it ends, and ended with this.
        finish: runs one save to its end; see ``one_save``.

    Attributes:
        stop_by: when the job must be over, on the monotonic clock; a save that is not done by then is given up.
        last_save_s: how long the last committed save took, from the call to its commit; 0 when there was none.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        config: CheckpointConfig,
        emit: Emitter,
        writer: WriterSupervisor,
        finish: Callable[[SaveJob], None],
    ) -> None:
        self._coordinator = coordinator
        self._config = config
        self._emit = emit
        self._writer = writer
        self._finish = finish
        coordinator.progress_sources.append(writer.progress)
        self._background = Background("safe_ckpt-save", self._work)
        self._open: list[SaveJob] = []
        self._beginning = threading.RLock()
        self._failures = 0
        self.stop_by: float | None = None
        self.last_save_s = 0.0
        self._giving_up = threading.Event()

    def start(self) -> None:
        """Start the thread and the writer process ahead of the first save. On any thread."""
        self._background.start()
        self._writer.start()

    def put(self, job: SaveJob) -> None:
        """Put a save whose snapshot is planned into the queue. Its handle gets an outcome, whatever happens here."""
        self._open.append(job)
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
            self._coordinator.progress_sources.remove(self._writer.progress)
            self._writer.close()

    def _drain(self, within_s: float | None) -> None:
        thread = self._background
        limit_s = self._config.timeouts.shutdown_s if within_s is None else within_s
        try:
            thread.drain(self._coordinator.progress, limit_s, extend=within_s is None)
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
        rank = self._coordinator.rank
        for number, job in enumerate(list(self._open)):
            # The first one may be committed or not, and so may one that rank 0 commits without this rank.
            kind = SaveError if number and rank in (0, *job.writers) else CommitOutcomeUnknown
            error = kind(name=job.name, cause=cause, rank=rank, phase="shutdown")
            # Told here: what stands beside the save may still be in use by that thread.
            self._emit(failed(job.request, error, rank, time.monotonic() - job.started))
            logger.error("%s", error)
            job.save.finish(None, error)

    def _work(self, job: SaveJob) -> None:
        with self._beginning:
            if job.begun:
                return
            job.begun = True
        try:
            self._finish(job)
        except BaseException as error:  # a bug of ours must not leave the caller waiting
            logger.exception("the background thread failed")
            job.save.finish(None, self.unexpected(job, error))
            self._open.remove(job)
            if not isinstance(error, Exception) and not self._background.is_current:
                raise  # Ctrl-C is the caller's

    def unexpected(self, job: SaveJob, error: BaseException) -> SaveError:
        """Make the error for one that is none of this package: a bug of ours, or an interrupt."""
        return SaveError(name=job.name, cause=repr(error), rank=self._coordinator.rank)

    def conclude(self, job: SaveJob, info: CheckpointInfo | None, failure: SafeCheckpointError | None) -> None:
        """A save is over, whatever came of it: its handle gets the outcome."""
        self._failures = 0 if failure is None else self._failures + 1
        stops = isinstance(failure, UnhealthyStateError)
        warns = self._config.on_failure == "warn" and self._failures < self._config.max_consecutive_failures
        if failure is not None and warns and not stops:
            logger.warning("%s (failure %d in a row; training goes on)", failure, self._failures)
            job.save.mark_reported()
        elif failure is not None and not stops:  # the caller learns of it at the next call, which may be long from now
            logger.warning("%s (result() raises this, or the next call)", failure)
        job.save.finish(info, failure)
        self._open.remove(job)

    @property
    def oldest(self) -> str:
        """The name of the oldest save that is not over, which is the one that is written; "" for none."""
        return self._open[0].name if self._open else ""

    def check_giving_up(self, name: str) -> None:
        """Called while a save runs.

        Raises:
            SaveError: it is to be given up: this rank shuts down, or the time after a signal is over.
        """
        if self._giving_up.is_set():
            cause = "this rank shut down before it was done"
            raise SaveError(name=name, cause=cause, rank=self._coordinator.rank, phase="shutdown")
        if self.stop_by is not None and time.monotonic() > self.stop_by:
            cause = f"the {self._config.signal_grace_s:.0f} s after the signal (signal_grace_s) are over"
            raise SaveError(name=name, cause=cause, rank=self._coordinator.rank, phase="shutdown")
