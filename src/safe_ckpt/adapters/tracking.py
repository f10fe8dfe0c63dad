"""What a framework's loggers and trackers are told of saves: on the thread that trains, for they are not made for any other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from safe_ckpt.hooks.scalars import ScalarsHook

if TYPE_CHECKING:
    from safe_ckpt.core.saving.engine import Engine
    from safe_ckpt.core.saving.job import SaveHandle

logger = logging.getLogger(__name__)

Sinks = Callable[[], Iterable[tuple[str, Callable[..., Any]]]]
"""Returns what takes numbers now: (name for messages, called with a dict and ``step=``). Nothing on ranks that log nothing."""


class Tracking:
    """Gives ``ckpt/stall_s``, ``ckpt/write_gbps`` and their like to loggers, on rank 0, save by save, once each is over.

    Args:
        engine: what saves; ``telemetry.logger_scalars`` of its settings switches these numbers off.
        sinks: the loggers.
        facts: whether they also get size, place and metrics of what was committed, as ``checkpoint/...``.
    """

    def __init__(self, engine: Engine, sinks: Sinks, *, facts: bool = False) -> None:
        self._sinks = sinks
        self._facts = facts
        self._flights: list[tuple[SaveHandle, int | None]] = []
        self._hook: ScalarsHook | None = None
        if engine.rank == 0 and engine.config.telemetry.logger_scalars:
            self._hook = ScalarsHook()
            engine.emit.add(self._hook)

    def follow(self, handle: SaveHandle, step: int | None = None) -> None:
        """A save was begun. ``step`` is the user's own; None for that of the save."""
        self._flights.append((handle, step))

    def report(self) -> None:
        """Report what is over since the last call, in order. Does not wait, and needs no other process."""
        while self._flights and self._flights[0][0].done():
            self.report_one(*self._flights.pop(0))

    def report_one(self, handle: SaveHandle, step: int | None = None) -> None:
        """Report one save that is over. A logger that fails is logged: a committed save must not look like a failed one."""
        scalars = self._hook.take(handle.name) if self._hook is not None else None
        values: dict[str, Any] = dict(scalars.values) if scalars is not None else {}
        info = handle.outcome if self._facts else None
        if info is not None:
            values |= {"checkpoint/size_bytes": info.size_bytes, "checkpoint/sequence": info.sequence}
            values |= {f"checkpoint/{name}": value for name, value in info.metrics.items()}
        about = info or scalars
        if about is None:
            return
        for name, log in self._sinks():
            try:
                log(values, step=about.step if step is None else step)
            except Exception:
                logger.warning("%s could not be told of %s", name, handle.name, exc_info=True)
