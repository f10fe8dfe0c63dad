"""What an Accelerator's trackers are told of saves: on the thread that trains, for trackers belong to it."""

from __future__ import annotations

import logging
from typing import Any

from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.saving.handle import SaveHandle
from safe_ckpt.hooks.scalars import Scalars, ScalarsHook

logger = logging.getLogger(__name__)


class Trackers:
    """Tells of each save once it is over, in their order. The other processes keep count, and tell nobody.

    Args:
        accelerator: whose trackers.
        engine: what saves; without ``telemetry.logger_scalars`` of its settings only commits are told of, without durations.
    """

    def __init__(self, accelerator: Any, engine: Engine) -> None:
        self._accelerator = accelerator
        self._flights: list[tuple[SaveHandle, int | None]] = []
        self._hook: ScalarsHook | None = None
        if engine.rank == 0 and engine.config.telemetry.logger_scalars:
            self._hook = ScalarsHook()
            engine.emit.add(self._hook)

    def follow(self, handle: SaveHandle, step: int | None) -> None:
        """A save was begun; ``step`` is the user's own."""
        self._flights.append((handle, step))

    def tell(self) -> None:
        """Tell of what is over since the last call. Does not wait, and needs no other process."""
        while self._flights and self._flights[0][0].done():
            handle, step = self._flights.pop(0)
            scalars = self._hook.take(handle.name) if self._hook is not None else None
            if self._accelerator.is_main_process:
                self._log(handle, step, scalars)

    def _log(self, handle: SaveHandle, step: int | None, scalars: Scalars | None) -> None:
        values: dict[str, Any] = dict(scalars.values) if scalars is not None else {}
        info = handle.outcome
        if info is not None:
            values |= {"checkpoint/size_bytes": info.size_bytes, "checkpoint/sequence": info.sequence}
            values |= {f"checkpoint/{name}": value for name, value in info.metrics.items()}
            step = info.step if step is None else step
        elif scalars is not None:
            step = scalars.step if step is None else step
        else:
            return
        try:
            self._accelerator.log(values, step=step)
        except Exception:  # a tracker that fails must not make a committed save look like a failed one
            logger.warning("a tracker could not be told of %s", handle.name, exc_info=True)
