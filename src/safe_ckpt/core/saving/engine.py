"""From snapshots to committed checkpoints: agree with the other ranks, take the copy, and run the rest in the background.

Adapters and ``Checkpointer`` share this. It knows neither what is saved nor under which name. Every rank calls its public
methods in the same order, on the thread that trains.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing.util
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from safe_ckpt import events
from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.coordination.coordinator import Coordinator, open_coordinator
from safe_ckpt.core.coordination.preemption import Preemption
from safe_ckpt.core.coordination.process_groups import ProcessGroup, group_timeout_s
from safe_ckpt.core.formats.manifest import installed_versions
from safe_ckpt.core.home.home import Home
from safe_ckpt.core.saving import one_save
from safe_ckpt.core.saving.after_commit import AfterCommit
from safe_ckpt.core.saving.extension import Extension, Extensions, Run
from safe_ckpt.core.saving.handle import Handles, OpenSave
from safe_ckpt.core.saving.homes import HeldHomes
from safe_ckpt.core.saving.queue import SaveQueue
from safe_ckpt.core.saving.request import SaveRequest
from safe_ckpt.core.saving.stager import Stager
from safe_ckpt.core.state.planner import Models
from safe_ckpt.core.storage.objects.options import StorageOptions
from safe_ckpt.core.writer.inline import saves_inline
from safe_ckpt.core.writer.supervisor import WriterSupervisor
from safe_ckpt.errors import (
    ClosedError,
    ConfigError,
    ForkedError,
    SafeCheckpointError,
)
from safe_ckpt.hooks import asked_for
from safe_ckpt.hooks.disk import DiskHook
from safe_ckpt.hooks.emitter import Emitter
from safe_ckpt.hooks.logging_hook import LoggingHook

logger = logging.getLogger(__name__)
_SHARE_OF_WAIT = 0.7


class Engine:
    """One pipeline from snapshots to committed checkpoints, on every rank of a group.

    Args:
        config: settings; must be equal on all ranks.
        group: the ranks; None means WORLD, or this process alone without a process group.
        hooks: called with what happens.
        owner: what this belongs to and how that is ended, for messages.
        extensions: what stands beside the saves, see ``safe_ckpt.extensions.assemble``.

    Attributes:
        extensions: these.
        group: as given.
        owner: as given.
        hold: takes a directory; see ``HeldHomes``.
        list_held: has rank 0 look at what lies in one; the same.
        release: gives one back; the same.

    Raises:
        RendezvousTimeout: some ranks did not come.
        DesyncError: the ranks were given different settings.
        ConfigError: a hook that ``telemetry`` asks for cannot work; on every rank.

    Example:
        ```python
        engine = Engine(CheckpointConfig(), owner="the toy's adapter")
        print(engine.agree("tag", decide=lambda answers: f"decided by rank 0 for {len(answers)} rank"))
        engine.close()
        ```

        ```text
        decided by rank 0 for 1 rank
        ```
    """

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        group: ProcessGroup | None = None,
        hooks: Iterable[events.Hook] = (),
        owner: str = "",
        extensions: Sequence[Extension] = (),
    ) -> None:
        self.config = config
        self.owner = owner
        self.group = group
        self.emit = Emitter([LoggingHook(), *hooks])
        self._closed = True  # as long as it is not open
        self.coordinator: Coordinator = open_coordinator(group, config.timeouts, network=config.network)
        self.rank = self.coordinator.rank
        self._pid = os.getpid()
        self._inline = saves_inline()
        self.extensions = Extensions(extensions)
        self._held_homes = HeldHomes(self.coordinator, config, self.emit, owner, self.extensions.held)
        self.hold, self.release = self._held_homes.hold, self._held_homes.release
        self.list_held, self.tell = self._held_homes.list_held, self._held_homes.tell
        self._pipeline = pipeline = self._parts()
        self._stager, self._save_queue, self._handles = pipeline.stager, pipeline.queue, pipeline.handles
        self._closed = False
        self._preemption: Preemption | None = None
        try:
            self.agree("open", must_match={"settings": config.deviations()}, local=self._equip, phase="opening")
        except BaseException:
            self._closed = True
            self._end()
            raise
        if self.rank == 0 and pipeline.writer.needs_process(1):
            pipeline.writer.start()
        self._warn_of_a_short_group_timeout(group)
        # Also where atexit does not run: processes that multiprocessing forked end without it.
        self._at_exit = multiprocessing.util.Finalize(None, _close_at_exit, (weakref.ref(self),), exitpriority=100)

    def _parts(self) -> one_save.Pipeline:
        # None of them refers to this engine: one that is not referenced any more is closed.
        config, coordinator, emit, rank = self.config, self.coordinator, self.emit, self.rank
        # An upload gives up before the others stop waiting for it, so that they learn why.
        storage = StorageOptions.of(config.storage, _SHARE_OF_WAIT * config.timeouts.lengthy_s)
        ahead = [module for one in self.extensions for module in one.imports]

        def respawned(pid: int, ended: str) -> None:
            emit(events.Respawned(rank=rank, pid=pid, ended=ended, name=pipeline.queue.oldest))

        writer = WriterSupervisor(config.writer, config.timeouts, respawned, storage, ahead)
        pipeline = one_save.Pipeline(
            config=config,
            coordinator=coordinator,
            emit=self.emit,
            extensions=self.extensions,
            handles=Handles(),
            stager=Stager(config, self.rank, self.extensions),
            writer=writer,
            queue=SaveQueue(coordinator, config, self.emit, writer, lambda job: one_save.finish(pipeline, job)),
            after_commit=AfterCommit(self.rank, self.emit, self.extensions),
            store_client=coordinator.store_client("phases"),
        )
        return pipeline

    def _equip(self) -> None:
        """Open the extensions and, on rank 0, add the hooks that ``telemetry`` asks for."""
        run = Run(config=self.config, rank=self.rank, emit=self.emit, owner=self.owner, coordinator=self.coordinator)
        for extension in self.extensions:
            extension.opened(run)
        if self.rank != 0:
            return
        self.emit.add(DiskHook())
        try:
            for hook in asked_for(self.config.telemetry):
                self.emit.add(hook)
        except ConfigError:
            raise
        except Exception as error:  # such as from an exporter of another package
            message = f"a hook cannot be set up: {type(error).__name__}: {error}"
            raise ConfigError(key="telemetry", message=message) from error

    def _warn_of_a_short_group_timeout(self, group: ProcessGroup | None) -> None:
        limit_s = group_timeout_s(group)
        if self.rank == 0 and limit_s is not None and limit_s <= self.config.timeouts.barrier_s:
            logger.warning(
                "timeouts.barrier_s (%.0f s) is not below the process group's own timeout (%.0f s): the process group "
                "gives up on a late rank first, without a named error. Set a lower barrier_s",
                self.config.timeouts.barrier_s,
                limit_s,
            )

    def agree(self, kind: str, **options: Any) -> Any:
        """One agreed step under ``barrier_s``. See ``Coordinator.agree``."""
        return self.coordinator.agree(kind, timeout_s=self.config.timeouts.barrier_s, **options)

    def together(self, call: str = "") -> contextlib.AbstractContextManager[None]:
        """All agreements within are one call: see ``Coordinator.together``."""
        return self.coordinator.together(call)

    def note_models(self, models: Models) -> None:
        """Before each save: these are the models that it saves. On any rank."""
        self.extensions.ask("before a save", lambda one: one.models(models))

    def save(self, request: SaveRequest) -> OpenSave:
        """Save. Returns when the copy is taken; every rank calls this.

        Raises:
            StateError: this or another rank has something that cannot be saved; nothing was started.
            DesyncError: the ranks asked for different saves.
            RendezvousTimeout: some ranks did not come.
            SafeCheckpointError: the error of an earlier save that was not reported yet; this one was not started.
        """
        self.coordinator.refuse_fork("save")
        if self._closed:
            raise ClosedError(message="save: this was closed; open a new one")
        handle = one_save.begin(self._pipeline, request)
        if self._inline:
            handle.wait_until_over()
        return handle

    def prepare(self, size_bytes: int) -> None:
        """Allocate host memory for snapshots of this size, and start the writer, in the background. On any rank, any time.

        Args:
            size_bytes: what this rank will save, roughly; never shrinks what is there.
        """
        if not self._closed and os.getpid() == self._pid and self._pipeline.writer.needs_process(size_bytes):
            # Without a reference to this engine: one that is not referenced any more is closed.
            self._stager.prepare(size_bytes, functools.partial(_get_ready, self._save_queue))

    def watch_signals(self, unwrap: Callable[[Any], Any] = lambda handler: handler) -> None:
        """From now on watch for ``save_on_signals``, if there are any. Every rank calls this, on the main thread.

        Args:
            unwrap: turns the handler that is there before into the one that is run besides.

        Raises:
            ConfigError: this, on some rank, is not the main thread.
        """
        if not self.config.save_on_signals or self._preemption is not None:
            return

        def watch() -> None:
            self._preemption = Preemption(self.coordinator, self.config, unwrap)

        self.agree("signals", local=watch, phase="opening")

    def stop_requested(self) -> bool:
        """Whether a signal on any rank asks all to save and stop. Every rank asks once per step and gets the same answer.

        Raises:
            RendezvousTimeout: rank 0 has not asked as often as this rank.
            PeerLostError: rank 0 died or stopped.
        """
        self.coordinator.refuse_fork("stop_requested")
        if self._preemption is None:
            return False
        was, wanted, stop = self._preemption.stop, self._preemption.requested(), self._preemption.stop
        if stop is not None and was is None:
            self._save_queue.stop_by = until = stop.until
            self.extensions.ask("a signal", lambda one: one.stopping(until))
            self.emit(
                events.StopRequested(
                    rank=self.rank,
                    signal=stop.signal,
                    by_rank=stop.rank,
                    left_s=until - time.monotonic(),
                    forecast_s=self._save_queue.last_save_s * (1 + self.in_flight),
                )
            )
        return wanted

    def wait(self, *, mirrored: bool = False) -> None:
        """Wait until everything in flight is over. ``mirrored``: and the newest has its copy in the mirror.

        Raises:
            ConfigError: there is no mirror.
            SafeCheckpointError: the error of a save that was not reported yet, or of the mirror; the same on every rank.
        """
        if mirrored and self.config.mirror.url is None:
            raise ConfigError(key="mirror.url", message="is not set: there is no mirror to wait for")
        self.wait_until_over()
        self.raise_unreported()
        if mirrored:
            limit_s = self.config.timeouts.lengthy_s

            def await_copies(_: object) -> None:
                for one in self.extensions:
                    one.awaited(limit_s)

            timeout_s = limit_s + self.config.timeouts.barrier_s
            self.coordinator.agree("wait for the mirror", timeout_s=timeout_s, decide=await_copies)

    def wait_until_over(self, within: Home | None = None) -> None:
        """Wait until everything in flight is over, or what goes to one directory, whatever came of it."""
        self._handles.wait_until_over(within)

    def raise_unreported(self) -> None:
        """Raise the first error of a finished save that was not reported yet."""
        self._handles.raise_unreported()

    @property
    def in_flight(self) -> int:
        """How many saves are not over."""
        return self._handles.in_flight

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called, or it was never opened."""
        return self._closed

    def close(self, *, quiet: bool = False, within_s: float | None = None) -> None:
        """Finish what is in flight, end the writer process, free the memory, give the directories back.

        Waits as long as bytes progress, and ``shutdown_s`` for what makes no progress. Needs no other rank to call it.

        Args:
            quiet: log errors instead of raising, for when another exception is on its way or the interpreter ends.
            within_s: wait this long at most, progress or not, as an exception is on its way: the record says so.

        Raises:
            ForkedError: this process was forked from the one that opened this.
            SafeCheckpointError: the error of a save that was not reported yet.
        """
        if self._closed:
            return
        if os.getpid() != self._pid:
            if quiet:  # the end of a forked child: what is in flight is its parent's
                return
            raise ForkedError(what="close", pid=self._pid)
        self._closed = True
        self._at_exit.cancel()
        try:
            self._save_queue.close(within_s=within_s)
        finally:
            self._pipeline.store_client.close()
            self.extensions.ask("the end of the job", lambda one: one.closing(within_s))
            if self.rank == 0:
                self._pipeline.after_commit.delete_deferred()
            try:
                self._end(failed=within_s is not None)
            finally:
                self.extensions.ask("the end of the job", lambda one: one.closed())
        try:
            self.raise_unreported()
        except SafeCheckpointError as error:
            if not quiet:
                raise
            logger.error("%s", error)  # noqa: TRY400 - the traceback that matters is the one on its way

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close(quiet=True, within_s=self.config.timeouts.shutdown_s)

    def _end(self, *, failed: bool = False) -> None:
        if self._preemption is not None:
            self._preemption.close()
        self._stager.close()
        self.emit.close()
        self._held_homes.close(failed=failed)
        self.coordinator.release()


def _get_ready(save_queue: SaveQueue) -> None:
    save_queue.start()
    installed_versions()


def _close_at_exit(weak: weakref.ref[Engine]) -> None:
    engine = weak()
    if engine is not None:
        # After an uncaught exception the user should not wait long for the prompt.
        failed = getattr(sys, "last_value", None) is not None
        engine.close(quiet=True, within_s=engine.config.timeouts.shutdown_s if failed else None)
