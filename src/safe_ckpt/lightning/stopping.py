"""Ending ``fit`` after a signal: at once, in order, and with nothing saved after the checkpoint that was made for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from safe_ckpt.lightning import stand_ins

STOPPED_NAME = "stopped"


def end_fit(trainer: Any) -> None:
    """Let ``fit`` return after this batch, without the validation that Lightning would run before."""
    fit_loop = trainer.fit_loop
    fit_loop.min_epochs = None  # else Lightning trains on until they are reached
    fit_loop.epoch_loop.min_steps = None
    stand_ins.put(fit_loop.epoch_loop, "_should_check_val_fx", lambda _: False)
    trainer.should_stop = True


def restore(trainer: Any) -> None:
    """Take back what ``end_fit`` put into the loops; harmless without it."""
    stand_ins.take_away(trainer.fit_loop.epoch_loop, "_should_check_val_fx")


def without_lightnings(handler: Any, without: Mapping[str, Callable[[], None]]) -> Any:
    """A signal handler without what Lightning would do in it. What the user had installed stays.

    For SIGTERM Lightning issues a broadcast from within the handler, which waits for ranks that are somewhere else, and makes
    the loop raise before anything is saved. Stopping in agreement takes its place.

    Args:
        handler: what is installed.
        without: names of further parts that are left out, with what is called in their place.
    """
    parts = getattr(handler, "signal_handlers", None)
    if parts is None:
        return handler
    stand_ins = {"_sigterm_notifier_fn": _do_nothing, **without}

    def run(number: int, frame: Any) -> None:
        for part in parts:
            stand_in = stand_ins.get(getattr(part, "__name__", ""))
            if stand_in is not None:
                stand_in()
                continue
            if callable(part):
                part(number, frame)

    return run


def _do_nothing() -> None:
    """In the place of a part that is left out."""
