"""``save_state``: from an Accelerator to a request of the core."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safe_ckpt.accelerate import contents, strategies
from safe_ckpt.accelerate.dataloaders import KEY, Loaders
from safe_ckpt.accelerate.directories import ADAPTER, CheckpointDirectory, Target
from safe_ckpt.adapters import (
    Content,
    Destination,
    Engine,
    Facts,
    FilePlan,
    OnCommit,
    OverlapPlan,
    SaveHandle,
    SaveRequest,
    Snapshot,
    Unplanned,
    plan,
)

if TYPE_CHECKING:
    from safe_ckpt.adapters import ShardPlanner


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to save. See ``Handle.save_state``. ``shards`` plans what every rank has a part of; None for nothing.

    ``arguments`` are for DeepSpeed.
    """

    safe_serialization: bool
    metrics: Mapping[str, Any]
    step: int | None
    overlap: bool
    shards: ShardPlanner | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


def save(
    engine: Engine,
    places: CheckpointDirectory,
    loaders: Loaders,
    accelerator: Any,
    output_dir: str | os.PathLike[str] | None,
    options: Options,
) -> tuple[Path, SaveHandle]:
    """Take a snapshot and have it written. Every rank calls this. Returns where it will be, and the handle.

    Raises:
        SafeCheckpointError: see ``Handle.save_state``.
    """
    hooks = accelerator._save_model_state_pre_hook
    target = places.target(output_dir, hooks=bool(hooks))
    try:
        handle = engine.save(_request(engine, places, accelerator, loaders, target, options))
    except BaseException:
        if target.begun is not None and engine.rank == 0:
            target.place.workspace.drop_pending(target.key)
        raise
    if not handle.skipped:
        accelerator.project_configuration.iteration = target.number + 1
    return target.path, handle


def plain_optimizers(accelerator: Any) -> list[Any]:
    """The optimizers without Accelerate's wrapper."""
    return [getattr(optimizer, "optimizer", optimizer) for optimizer in accelerator._optimizers]


def _unsharded(
    accelerator: Any, loaders: Loaders, target: Target, options: Options
) -> tuple[list[FilePlan], dict[str, str]]:
    """The files that one rank writes by itself, and what must be equal on all ranks for that."""
    apart = options.shards is not None or bool(strategies.engines_of(accelerator))
    models = [] if apart else accelerator._models
    states = [accelerator.get_state_dict(model, unwrap=False) for model in models]
    if target.begun is not None:
        for hook in list(accelerator._save_model_state_pre_hook.values()):
            hook(accelerator._models, states, str(target.begun))
    shared = contents.shared_states(accelerator)
    planned = contents.images(
        accelerator,
        states,
        shared,
        safe_serialization=options.safe_serialization,
        besides={KEY: loaders.states(accelerator._dataloaders)},
        sharded=apart,
    )
    return planned, contents.view(accelerator, shared)


def _request(
    engine: Engine, places: CheckpointDirectory, accelerator: Any, loaders: Loaders, target: Target, options: Options
) -> SaveRequest:
    step = target.step if options.step is None else options.step
    planned: list[FilePlan] = []
    metrics: dict[str, float] = {}
    view: dict[str, str] = {}
    error: Exception | None = None
    try:
        plan.check_step(step)
        metrics = plan.checked_metrics(options.metrics)
        planned, view = _unsharded(accelerator, loaders, target, options)
    except Exception as problem:  # whatever a hook or a state_dict() raises: the other ranks must learn of it
        error = problem
    if options.shards is not None:
        parts, error = strategies.images(engine, options.shards, accelerator, error)
        planned = [*planned, *parts]
    nested = strategies.collect_engines(engine, accelerator, options.arguments)
    if nested is not None:
        planned, error = [*planned, *nested.images], error or nested.error
    content: Content
    if error is not None:
        content = Unplanned(error=error)
    else:
        overlap = options.overlap and bool(planned)
        content = Snapshot(
            files=planned,
            copies=nested.copies if nested is not None else (),
            folders=nested.folders if nested is not None else strategies.folders(accelerator),
            overlap=(OverlapPlan(accelerator._models, plain_optimizers(accelerator)) or None) if overlap else None,
        )
    return SaveRequest(
        destination=Destination(workspace=target.place.workspace, path=target.path, kind="directory"),
        content=content,
        facts=Facts(
            step=step if isinstance(step, int) else -1,
            metrics=metrics,
            notes={"adapter": ADAPTER, "iteration": target.number, **(nested.notes if nested is not None else {})},
        ),
        must_match=view,
        on_commit=OnCommit(
            prefilled=target.begun, carry=lambda _: True, catalog=target.place.ledger, retention=places.retention
        ),
    )
