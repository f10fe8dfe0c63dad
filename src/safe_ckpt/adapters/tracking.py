"""Reports saves to a framework's loggers and trackers, on the thread that trains: they are not made for any other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from safe_ckpt.hooks.scalars import ScalarsHook

if TYPE_CHECKING:
    from safe_ckpt.core.formats.manifest import CheckpointInfo
    from safe_ckpt.core.saving.engine import Engine
    from safe_ckpt.core.saving.handle import OpenSave

logger = logging.getLogger(__name__)

Sinks = Callable[[], Iterable[tuple[str, Callable[..., Any]]]]
"""Returns what takes numbers now: (name for messages, called with a dict and ``step=``). Nothing on ranks that log nothing."""
AtEnd = Callable[["CheckpointInfo | None"], None]
"""Called when a save is over, with what was committed; with None when it failed."""


class Tracking:
    """Logs ``ckpt/stall_s``, ``ckpt/write_gbps`` and similar numbers of each save once it is over, on rank 0.

    Args:
        engine: what saves; ``telemetry.logger_scalars`` of its settings switches these numbers off.
        sinks: the loggers; None for none.
    """

    def __init__(self, engine: Engine, sinks: Sinks | None) -> None:
        self._sinks: Sinks = sinks or tuple
        self._flights: list[tuple[OpenSave, AtEnd]] = []
        self._hook: ScalarsHook | None = None
        if sinks is not None and engine.rank == 0 and engine.config.telemetry.logger_scalars:
            self._hook = ScalarsHook()
            engine.emit.add(self._hook)

    def follow(self, handle: OpenSave, *, at_end: AtEnd = lambda _: None) -> None:
        """Follow a save that was begun.

        Args:
            handle: its outcome.
            at_end: called once it is reported, with what was committed; or before that, with None, when it failed.
        """
        self._flights.append((handle, at_end))

    def report(self, *, committed_only: bool = False) -> None:
        """Report the saves that have ended since the last call, in order. Does not wait, and needs no other process.

        Args:
            committed_only: stop before a save that failed, until ``land``.
        """
        while self._flights:
            handle, at_end = self._flights[0]
            if not handle.done() or (committed_only and handle.outcome is None):
                return
            self._report(handle, at_end)

    def land(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is in flight, and report it. Failures stay to be raised.

        Raises:
            RendezvousTimeout: it takes longer than ``timeout_s``.
        """
        while self._flights:
            handle, at_end = self._flights[0]
            handle.wait_until_over(timeout_s)
            self._report(handle, at_end)

    def _report(self, handle: OpenSave, at_end: AtEnd) -> None:
        if (handle, at_end) not in self._flights:
            return  # a signal handler that saves came first
        self._flights.remove((handle, at_end))
        if handle.outcome is None:
            at_end(None)  # nothing that counts on the save is seen by a logger
        self._log(handle)
        if handle.outcome is not None:
            at_end(handle.outcome)

    def _log(self, handle: OpenSave) -> None:
        """A logger that fails is logged: a committed save must not look like a failed one."""
        scalars = self._hook.take(handle.name) if self._hook is not None else None
        if scalars is None:
            return
        for name, log in self._sinks():
            try:
                log(scalars.values, step=scalars.step)
            except Exception:
                logger.warning("%s could not log the save of %s", name, handle.name, exc_info=True)
