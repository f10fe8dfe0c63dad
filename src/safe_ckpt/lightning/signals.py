"""Signals: whether a handler is running, ending ``fit`` after one, and SLURM's requeueing.

After a signal ``fit`` ends at once, in order, and with nothing saved after the checkpoint that was made for it.

With ``SLURMEnvironment(auto_requeue=True)``, which Lightning detects by itself, Lightning saves in the handler of SIGUSR1, on
every rank at another place in the middle of a step, and has SLURM end the job at once. Here that signal becomes one decision
of all ranks, as those of ``save_on_signals`` do, and Lightning's handler runs when ``fit`` is over, to requeue and no more.
"""

from __future__ import annotations

import dataclasses
import functools
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from safe_ckpt.adapters import Engine, Patch
from safe_ckpt.adapters.extras import open_coordinator
from safe_ckpt.config import CheckpointConfig

STOPPED_NAME = "stopped"
HANDLER = "_slurm_sigusr_handler_fn"
_NUMBERS = tuple(signal.valid_signals())  # this is asked at each save, and making the set takes as long as the rest


def in_signal_handler() -> bool:
    """Whether a registered signal handler is on this thread's stack, between any two steps of what it interrupted."""
    codes = {_code(signal.getsignal(number)) for number in _NUMBERS} - {None}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


def _code(handler: object) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    code = getattr(handler, "__code__", None)
    if code is None and callable(handler):
        # Lightning composes several handlers in an object that is called.
        code = getattr(type(handler).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def end_fit(trainer: Any, undo: Patch) -> None:
    """Let ``fit`` return after this batch, without the validation that Lightning would run before."""
    undo.put_methods(trainer.fit_loop.epoch_loop, {"_should_check_val_fx": lambda _: False})
    trainer.should_stop = True
    # Else Lightning trains on until they are reached. The next fit asks for them again.
    undo.put(trainer.fit_loop, {"min_epochs": None})
    undo.put(trainer.fit_loop.epoch_loop, {"min_steps": None})


def meet_at_exception(engine: Engine | None, config: CheckpointConfig) -> None:
    """Learn, within ``peer_stall_s``, whether all ranks save at an exception. Each rank that does calls this.

    Args:
        engine: where the ranks meet; None when it is closed.
        config: the settings.

    Raises:
        SafeCheckpointError: some are not.
    """
    timeout_s = config.timeouts.peer_stall_s
    if engine is not None:
        engine.coordinator.agree("exception", timeout_s=timeout_s)
        return
    timeouts = dataclasses.replace(config.timeouts, barrier_s=timeout_s)
    coordinator = open_coordinator(None, timeouts, network=config.network)
    try:
        coordinator.agree("exception", timeout_s=timeout_s)
    finally:
        coordinator.release(keep=True)


def without_lightnings(handler: Any, at_requeue_signal: Callable[[], None]) -> Any:
    """A signal handler without what Lightning would do in it. What the user had installed stays.

    For SIGTERM Lightning issues a broadcast from within the handler, which waits for ranks that are somewhere else, and makes
    the loop raise before anything is saved. Stopping in agreement takes its place.

    Args:
        handler: what is installed.
        at_requeue_signal: called in the place of Lightning's handler that saves and requeues the job.
    """
    parts = getattr(handler, "signal_handlers", None)
    if parts is None:
        return handler
    replaced = {"_sigterm_notifier_fn": lambda: None, HANDLER: at_requeue_signal}

    def run(number: int, frame: Any) -> None:
        for part in parts:
            instead = replaced.get(getattr(part, "__name__", ""))
            if instead is not None:
                instead()
            elif callable(part):
                part(number, frame)

    return run


def with_requeue_signal(trainer: Any, config: CheckpointConfig) -> CheckpointConfig:
    """The settings with the signal among ``save_on_signals`` at which Lightning would requeue the job, if it would."""
    number = _signal_of(trainer)
    if number is None or number.name in config.save_on_signals:
        return config
    taken = signal.getsignal(number) not in (None, signal.SIG_DFL)  # Lightning leaves it to that handler then
    if taken or threading.current_thread() is not threading.main_thread():
        return config
    return dataclasses.replace(config, save_on_signals=(*config.save_on_signals, number.name))


def requeue_save_path(trainer: Any) -> Path:
    """The file from which a job goes on that was requeued by Lightning."""
    return Path(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)).absolute()


def requeue_resume_path(trainer: Any) -> Path | None:
    """The file from which Lightning goes on if it is given none, after it has requeued a job; None where there is none."""
    path = trainer._checkpoint_connector._hpc_resume_path
    return Path(path).absolute() if path is not None else None


def requeue(trainer: Any) -> None:
    """Let Lightning finish the loggers and requeue the job, as its handler does, without the save that it makes there."""
    number = _signal_of(trainer)
    if number is None:
        return
    with Patch(trainer, {"save_checkpoint": lambda *_, **__: None}):  # everything is committed
        getattr(trainer._signal_connector, HANDLER)(number, None)


def _signal_of(trainer: Any) -> signal.Signals | None:
    environment = trainer._accelerator_connector.cluster_environment
    if not getattr(environment, "auto_requeue", False):
        return None
    return signal.Signals(environment.requeue_signal)
