"""Ending ``fit`` after a signal: at once, in order, and with nothing saved after the checkpoint that was made for it."""

from __future__ import annotations

from typing import Any

STOPPED_NAME = "stopped"


def end_fit(trainer: Any) -> None:
    """Let ``fit`` return after this batch, without the validation that Lightning would run before."""
    fit_loop = trainer.fit_loop
    fit_loop.min_epochs = None  # else Lightning trains on until they are reached
    fit_loop.epoch_loop.min_steps = None
    fit_loop.epoch_loop._should_check_val_fx = lambda _: False
    trainer.should_stop = True


def restore(trainer: Any) -> None:
    """Take back what ``end_fit`` put into the loops; harmless without it."""
    trainer.fit_loop.epoch_loop.__dict__.pop("_should_check_val_fx", None)


def without_notifier(handler: Any) -> Any:
    """A signal handler without the part that Lightning puts in front of it for SIGTERM.

    That part issues a broadcast from within the handler, which waits for ranks that are somewhere else, and makes the loop
    raise before anything is saved. Stopping in agreement takes its place. What the user had installed stays.
    """
    parts = getattr(handler, "signal_handlers", None)
    if parts is None:
        return handler
    kept = [part for part in parts if getattr(part, "__name__", "") != "_sigterm_notifier_fn"]

    def run(number: int, frame: Any) -> None:
        for part in kept:
            if callable(part):
                part(number, frame)

    return run
