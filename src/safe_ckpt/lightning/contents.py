"""What a Trainer saves: its own checkpoint, with what the ranks add to it for an exact continuation, planned as files.

In Lightning forward and backward run inside ``optimizer.step``, as its closure, and the optimizer gate waits behind the
closure. Whatever else a module or a callback does to parameters in between cannot be known from outside: ``"auto"`` is eager.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safe_ckpt.adapters import Engine, FilePlan, OverlapPlan, file_plan, reraise, torch_archive
from safe_ckpt.adapters.planned import Planned
from safe_ckpt.errors import CoordinationError
from safe_ckpt.lightning import loop_state, strategies
from safe_ckpt.lightning.checkpoint_io import SafeCheckpointIO

if TYPE_CHECKING:
    from safe_ckpt.adapters import ShardPlanner

_SWAPPERS = frozenset({"StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging", "ModelPruning"})


def planned(
    engine: Engine,
    trainer: Any,
    io: SafeCheckpointIO,
    path: Path,
    *,
    weights_only: bool | None,
    whole: bool,
    broken_off: dict[str, Any] | None = None,
    shards: ShardPlanner | None = None,
) -> Planned:
    """The planned files of this rank; what went wrong, where it did. Nothing is raised before all ranks know of it.

    Args:
        engine: where the ranks meet; every rank calls this.
        trainer: what to save.
        io: the I/O in its strategy.
        path: the file's final name.
        weights_only: as in ``Trainer.save_checkpoint``.
        whole: whether the generators and loaders of all ranks belong to it.
        broken_off: what the generators were where this epoch was broken off; None where it was not.
        shards: plans what every rank has a part of; None where the checkpoint is one file.
    """
    mine = functools.partial(loop_state.capture, trainer, broken_off) if whole else None
    found, error = _whole_checkpoint(engine, trainer, io, path, weights_only, mine)
    form = strategies.layout_of(trainer.strategy)
    if form is not None and form.engine:
        return _of_an_engine(engine, trainer, found, error)
    if shards is not None and form is not None:
        images, error = _sharded(engine, form, shards, found, error)
        return Planned(images=images, error=error)
    if form is not None and form.gathers:
        found, error = _gathered(engine, trainer, found, error)
    if found is None or error is not None:
        return Planned(error=error)
    try:
        image = torch_archive.torch_image(path.name, found, strict=False, key="checkpoint")
    except Exception as problem:
        return Planned(error=problem)
    return Planned(images=[file_plan.single(image, path.name)])


def _of_an_engine(engine: Engine, trainer: Any, checkpoint: dict[str, Any] | None, error: Exception | None) -> Planned:
    try:
        return strategies.collect_engine(engine, trainer.strategy, checkpoint, error)
    except CoordinationError:
        raise
    except Exception as problem:  # the same on all ranks
        return Planned(error=error or problem)


def _whole_checkpoint(
    engine: Engine,
    trainer: Any,
    io: SafeCheckpointIO,
    path: Path,
    weights_only: bool | None,
    capture: Callable[[], dict[str, Any]] | None,
) -> tuple[dict[str, Any] | None, Exception | None]:
    """The Trainer's checkpoint, on rank 0 with what belongs to the ranks, if they ``capture`` anything."""
    mine, failure = "", None
    if capture is not None:
        try:
            mine = loop_state.to_text(capture())
        except Exception as problem:  # a loader of the user's that cannot tell where it is
            failure = problem
    found, error = dump(trainer, io, path, weights_only)
    texts: dict[int, str] = {}
    if capture is not None:
        engine.agree("ranks' states", local=lambda: mine, decide=texts.update)
    if found is None or failure is not None or error is not None:
        return found, failure or error
    found = dict(found)
    try:
        if texts and all(texts.values()):
            found[loop_state.KEY] = loop_state.assemble(texts)
    except Exception as problem:
        error = problem
    return found, error


def _sharded(
    engine: Engine,
    form: strategies.Layout,
    shards: ShardPlanner,
    checkpoint: dict[str, Any] | None,
    error: Exception | None,
) -> tuple[list[FilePlan], Exception | None]:
    try:
        states, rest = strategies.split(checkpoint or {"state_dict": {}}, form)
        found = [strategies.meta_image(rest)] if engine.rank == 0 and error is None else []
    except Exception as problem:
        states, found, error = {}, [], error or problem
    try:
        return [*found, *shards.images({"": states}, error)], None
    except CoordinationError:
        raise
    except Exception as problem:  # the same on all ranks
        return [], problem


def _gathered(
    engine: Engine, trainer: Any, checkpoint: dict[str, Any] | None, error: Exception | None
) -> tuple[dict[str, Any] | None, Exception | None]:
    try:
        engine.agree("gather", local=reraise(error), phase="planning the save")
    except CoordinationError:
        raise
    except Exception as problem:  # the same on all ranks
        return None, error or problem
    try:
        return strategies.whole(engine, trainer, checkpoint or {}), None
    except Exception as problem:
        return None, problem


def dump(
    trainer: Any, io: SafeCheckpointIO, path: Path, weights_only: bool | None
) -> tuple[dict[str, Any] | None, Exception | None]:
    """What the strategy would write, on the ranks that would write it; or what a hook of the user's raised."""
    form = strategies.layout_of(trainer.strategy)
    if form is not None:
        try:
            checkpoint = strategies.dump(trainer, form, weights_only)
        except Exception as problem:  # on this rank alone perhaps; all will learn of it
            return None, problem
        return checkpoint if form.sharded or form.gathers or trainer.is_global_zero else None, None
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


def overlap_plan(trainer: Any, mode: Literal["auto", "eager", "overlapped"]) -> OverlapPlan | None:
    """What may be copied after ``save`` has returned; None for nothing.

    Args:
        trainer: in ``fit``.
        mode: ``CheckpointConfig.snapshot``. Also with ``"overlapped"`` nothing is deferred beside callbacks that are known to
            change parameters between steps, nor with DeepSpeed.
    """
    kinds = {base.__name__ for callback in trainer.callbacks for base in type(callback).__mro__}
    if mode != "overlapped" or kinds & _SWAPPERS or hasattr(trainer.strategy, "deepspeed_engine"):
        return None
    return OverlapPlan([trainer.lightning_module], trainer.optimizers) or None
