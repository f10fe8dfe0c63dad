"""Under SLURM: the job goes back into the queue when everything is committed, not from within a signal handler.

With ``SLURMEnvironment(auto_requeue=True)``, which Lightning detects by itself, Lightning saves in the handler of SIGUSR1, on
every rank at another place in the middle of a step, and has SLURM end the job at once. Here that signal becomes one decision
of all ranks, as those of ``save_on_signals`` do, and Lightning's handler runs when ``fit`` is over, to requeue and no more.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safe_ckpt.config import CheckpointConfig
from safe_ckpt.lightning import stand_ins

HANDLER = "_slurm_sigusr_handler_fn"


def watching(trainer: Any, config: CheckpointConfig) -> CheckpointConfig:
    """The settings with the signal among ``save_on_signals`` at which Lightning would requeue the job, if it would."""
    number = _signal_of(trainer)
    if number is None or number.name in config.save_on_signals:
        return config
    taken = signal.getsignal(number) not in (None, signal.SIG_DFL)  # Lightning leaves it to that handler then
    if taken or threading.current_thread() is not threading.main_thread():
        return config
    return dataclasses.replace(config, save_on_signals=(*config.save_on_signals, number.name))


def save_path(trainer: Any) -> Path:
    """The file from which a job goes on that was requeued by Lightning."""
    return Path(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)).absolute()


def resume_path(trainer: Any) -> Path | None:
    """The file from which Lightning goes on if it is given none, after it has requeued a job; None where there is none."""
    found = trainer._checkpoint_connector._hpc_resume_path
    return Path(found).absolute() if found is not None else None


def requeue(trainer: Any) -> None:
    """Let Lightning finish the loggers and requeue the job, as its handler does, without the save that it makes there."""
    number = _signal_of(trainer)
    if number is None:
        return
    with stand_ins.within(trainer, "save_checkpoint", _is_saved):
        getattr(trainer._signal_connector, HANDLER)(number, None)


class Wish:
    """Whether this rank has got the signal to requeue.

    Attributes:
        made: it has.
    """

    def __init__(self) -> None:
        self.made = False

    def take_from(self, unwrap: Callable[..., Any]) -> Callable[[Any], Any]:
        """An ``unwrap`` for ``Preemption`` that notes the wish when Lightning's handler is among those left out."""

        def unwrapped(handler: Any) -> Any:
            return unwrap(handler, without={HANDLER: self._make})

        return unwrapped

    def _make(self) -> None:
        self.made = True


def _signal_of(trainer: Any) -> signal.Signals | None:
    environment = trainer._accelerator_connector.cluster_environment
    if not getattr(environment, "auto_requeue", False):
        return None
    return signal.Signals(environment.requeue_signal)


def _is_saved(*args: Any, **kwargs: Any) -> None:
    """Stands in for ``Trainer.save_checkpoint`` when everything is committed."""
