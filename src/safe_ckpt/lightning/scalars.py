"""What a Trainer's loggers are told of saves: on the thread that trains, for loggers are not made for any other."""

from __future__ import annotations

import logging
from typing import Any

from safe_ckpt.adapters import Engine
from safe_ckpt.hooks.scalars import ScalarsHook

logger = logging.getLogger(__name__)


class LoggerScalars:
    """Gives ``ckpt/stall_s``, ``ckpt/write_gbps`` and their like to the loggers of a Trainer, on rank 0.

    Args:
        trainer: whose loggers.
        engine: what saves; ``telemetry.logger_scalars`` of its settings switches this off.
    """

    def __init__(self, trainer: Any, engine: Engine) -> None:
        self._trainer = trainer
        self._hook: ScalarsHook | None = None
        if engine.rank == 0 and engine.config.telemetry.logger_scalars:
            self._hook = ScalarsHook()
            engine.emit.add(self._hook)

    def tell(self, name: str) -> None:
        """The save of this name is over. A logger that fails is logged: a committed save must not look like a failed one."""
        scalars = self._hook.take(name) if self._hook is not None else None
        if scalars is None:
            return
        for log in self._trainer.loggers:
            try:
                log.log_metrics(scalars.values, step=scalars.step)
            except Exception:
                logger.warning("%s could not be told of %s", type(log).__name__, name, exc_info=True)
