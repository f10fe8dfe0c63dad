"""What a Trainer saves: its own checkpoint, with what the ranks add to it for an exact continuation, planned as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safe_ckpt.core import layout
from safe_ckpt.core.engine import Engine
from safe_ckpt.core.layout import Image
from safe_ckpt.lightning import continuation
from safe_ckpt.lightning.io import SafeCheckpointIO


def images(
    engine: Engine, trainer: Any, io: SafeCheckpointIO, path: Path, *, weights_only: bool | None, whole: bool
) -> tuple[list[Image], Exception | None]:
    """The planned file, on rank 0; what went wrong, where it did. Nothing is raised before all ranks know of it.

    Args:
        engine: where the ranks meet; every rank calls this.
        trainer: what to save.
        io: the I/O in its strategy.
        path: the file's final name.
        weights_only: as in ``Trainer.save_checkpoint``.
        whole: whether the generators and loaders of all ranks belong to it.
    """
    mine, failure = "", None
    if whole:
        try:
            mine = continuation.to_text(continuation.capture(trainer))
        except Exception as problem:  # a loader of the user's that cannot tell where it is
            failure = problem
    found, error = dump(trainer, io, path, weights_only)
    error = failure or error
    texts: dict[int, str] = {}
    if whole:
        engine.agree("ranks' states", {}, answer=mine, decide=texts.update)
    if found is None or error is not None:
        return [], error
    try:
        checkpoint = dict(found)
        if texts and all(texts.values()):
            checkpoint[continuation.KEY] = continuation.assemble(texts)
        image = layout.torch_image(path.name, checkpoint, strict=False, key="checkpoint")
    except Exception as problem:
        return [], problem
    return [layout.single(image, path.name)], None


def dump(
    trainer: Any, io: SafeCheckpointIO, path: Path, weights_only: bool | None
) -> tuple[dict[str, Any] | None, Exception | None]:
    """What the strategy would write, on the rank that would write it; or what a hook of the user's raised."""
    with io.catching() as box:
        try:
            # What Trainer.save_checkpoint does, without its barrier: that has no way to learn of a failed rank.
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only)
            trainer.strategy.save_checkpoint(checkpoint, str(path))
        except Exception as problem:  # on this rank alone perhaps; all will learn of it
            return None, problem
    return box.checkpoint, None


def numbers(trainer: Any) -> dict[str, float]:
    """The metrics that have been logged, as far as they are numbers."""
    found = {}
    for name, value in trainer.callback_metrics.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            continue
    return found
