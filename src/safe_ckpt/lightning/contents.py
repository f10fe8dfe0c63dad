"""The files of a Trainer's save: its own checkpoint, with the states that the ranks add for an exact continuation.

In Lightning forward and backward run inside ``optimizer.step``, as its closure; the optimizer gate waits behind the closure.
A module or a callback may change parameters in between, unnoticed. So ``"auto"`` takes snapshots eagerly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from safe_ckpt.adapters import Attempt, Engine, FilePlan, Planned, pickles, torch_file
from safe_ckpt.adapters.extras import OverlapPlan, file_plan, open_coordinator
from safe_ckpt.adapters.strategy import Sharded, Whole
from safe_ckpt.config import CheckpointConfig
from safe_ckpt.layouts.table import META
from safe_ckpt.lightning import loop_state, strategies
from safe_ckpt.lightning.checkpoint_io import SafeCheckpointIO
from safe_ckpt.lightning.directories import NO_DATA

UNEXAMINED = tuple(f"{part}.*" for part in ("callbacks", "loops", "lr_schedulers", "hyper_parameters", loop_state.KEY))
"""Of a checkpoint: a score that is infinite before the first validation is no sign that training went bad."""
_SWAPPERS = frozenset({"StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging", "ModelPruning"})


class SaverOfTrainer(Protocol):
    """The parts of a saver that plan a Trainer's save; see ``TrainerSaver`` for the attributes."""

    trainer: Any
    engine: Engine
    config: CheckpointConfig
    io: SafeCheckpointIO
    noted: loop_state.NotedStates
    reads_freely: bool
    sharded: Sharded


def planned(saver: SaverOfTrainer, path: Path, *, weights_only: bool | None, whole: bool) -> Planned:
    """The planned files of this rank, or what went wrong. Nothing is raised before all ranks know of it.

    Args:
        saver: of the Trainer; every rank calls this.
        path: the file's final name.
        weights_only: as in ``Trainer.save_checkpoint``.
        whole: whether the generators and loaders of all ranks belong to it.
    """
    attempt, engine, trainer = Attempt(), saver.engine, saver.trainer
    checkpoint = _whole_checkpoint(saver, path, attempt, weights_only=weights_only, whole=whole)
    form = strategies.form_of(trainer.strategy)
    if form is not None and form.engine:
        arguments = strategies.for_engine(trainer.strategy, checkpoint or {})
        return strategies.engine_of(engine, trainer.strategy).plan(arguments, attempt)
    if form is not None and form.sharded:
        return _sharded(saver, form, checkpoint, attempt, resumes=not weights_only)

    def files_of(complete: Mapping[str, Any]) -> list[FilePlan]:
        return [file_plan.single(_file(saver, path.name, complete, resumes=not weights_only), path.name)]

    if form is not None and form.gathers:
        given = checkpoint or {}
        parts = {name: given[name] for name in strategies.IN_PARTS if name in given}
        model = trainer.strategy.model
        gathers = Whole(engine, lambda found: files_of({**given, **strategies.whole_states(found, model)}))
        return gathers.plan(parts, attempt)
    files: list[FilePlan] = []
    if checkpoint is not None and attempt.error is None:
        with attempt:
            files = files_of(checkpoint)
    return Planned(files=files, error=attempt.error)


def _whole_checkpoint(
    saver: SaverOfTrainer, path: Path, attempt: Attempt, *, weights_only: bool | None, whole: bool
) -> dict[str, Any] | None:
    """The Trainer's checkpoint, on rank 0 with what belongs to the ranks, where the ``whole`` is wanted."""
    own, text, checkpoint, several = None, "", None, saver.engine.coordinator.size > 1
    if whole:
        with attempt:  # a loader of the user's may not know where it is
            own = loop_state.capture(saver.trainer, saver.noted)
            text = pickles.to_text(own, key="the state of the data loaders") if several else ""
    with attempt:
        checkpoint = _dump(saver, path, weights_only)
    kept: dict[str, Any] = {"version": 1, "ranks": [own] if own is not None else []}
    if whole and several:
        texts: dict[int, str] = {}
        saver.engine.agree("ranks' states", local=lambda: text, decide=texts.update)
        with attempt:
            kept = loop_state.assemble_notes(texts)
    if checkpoint is not None and kept["ranks"] and attempt.error is None:
        checkpoint = {**checkpoint, loop_state.KEY: kept}
    return checkpoint


def _file(saver: SaverOfTrainer, name: str, checkpoint: Mapping[str, Any], *, resumes: bool) -> FilePlan:
    """A file of Lightning's; warns of what a resume from it will refuse, where it ``resumes`` at all."""
    file = torch_file(name, checkpoint, key="checkpoint")
    if resumes and not saver.reads_freely:
        pickles.warn_if_no_data(file.pieces[-1][1], "checkpoint", NO_DATA)
    return file


def _sharded(
    saver: SaverOfTrainer, form: strategies.Form, checkpoint: dict[str, Any] | None, attempt: Attempt, *, resumes: bool
) -> Planned:
    states: dict[str, Any] = {}
    files: list[FilePlan] = []
    with attempt:
        states, rest = strategies.split(checkpoint or {"state_dict": {}}, form)
        if saver.engine.rank == 0 and attempt.error is None:
            files.append(_file(saver, META, rest, resumes=resumes))
    shards = saver.sharded.plan({"": states}, attempt, {"": saver.trainer.lightning_module})
    return Planned.joined([Planned(files=files), shards])


def _dump(saver: SaverOfTrainer, path: Path, weights_only: bool | None) -> dict[str, Any] | None:
    """Return what the strategy would write; None on ranks that would not write. A hook of the user's may raise anything."""
    trainer = saver.trainer
    form = strategies.form_of(trainer.strategy)
    if form is not None:
        checkpoint = strategies.dump(trainer, form, weights_only)
        return checkpoint if form.sharded or form.gathers or trainer.is_global_zero else None
    caught: list[dict[str, Any]] = []
    with saver.io.saving_to(caught):
        # What Trainer.save_checkpoint does, without its barrier: that has no way to learn of a failed rank.
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only)
        trainer.strategy.save_checkpoint(checkpoint, str(path))
    return caught[-1] if caught else None


def numbers(trainer: Any) -> dict[str, float]:
    """The metrics that have been logged, as far as they are numbers."""
    metrics = {}
    for name, value in trainer.callback_metrics.items():
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            metrics[str(name)] = float(value)
    return metrics


def overlap_plan(trainer: Any, mode: Literal["auto", "eager", "overlapped"]) -> OverlapPlan | None:
    """Plan what may be copied after ``save`` has returned; None for nothing.

    Args:
        trainer: in ``fit``.
        mode: ``CheckpointConfig.snapshot``. Also with ``"overlapped"`` snapshots are taken eagerly if a callback is present
            that is known to change parameters between steps (SWA, EMA, pruning), with DeepSpeed and with FSDP 1, which has
            the parameters in memory that it frees and fills again.
    """
    kinds = {base.__name__ for one in (*trainer.callbacks, trainer.strategy) for base in type(one).__mro__}
    if mode != "overlapped" or kinds & {*_SWAPPERS, "FSDPStrategy"} or hasattr(trainer.strategy, "deepspeed_engine"):
        return None
    return OverlapPlan([trainer.lightning_module], trainer.optimizers) or None


def save_after_fit(saver: SaverOfTrainer, path: Path, *, weights_only: bool | None) -> None:
    """Save without an engine: rank 0 writes in this process, and the others wait for the outcome. Every rank calls this.

    Raises:
        SafeCheckpointError: it failed, with the same error on every rank.
    """
    checkpoint: dict[str, Any] | None = None

    def take() -> None:
        nonlocal checkpoint
        checkpoint = _dump(saver, path, weights_only)

    def write(_: object) -> None:
        if checkpoint is not None:
            saver.io.save_checkpoint(checkpoint, path)

    coordinator = open_coordinator(None, saver.config.timeouts)
    try:
        limit_s, values = saver.config.timeouts.lengthy_s, {"path": path}
        phase = f"saving {path.name}"
        coordinator.agree("save", timeout_s=limit_s, must_match=values, local=take, decide=write, phase=phase)
    finally:
        coordinator.release(keep=True)
