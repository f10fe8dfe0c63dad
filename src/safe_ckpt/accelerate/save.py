"""``save_state``: from an Accelerator to a request of the core."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safe_ckpt.accelerate import contents, strategies
from safe_ckpt.accelerate.dataloaders import KEY, Loaders
from safe_ckpt.accelerate.directories import ADAPTER, CheckpointDirectory, Target
from safe_ckpt.adapters import Attempt, Engine, FilePlan, OnCommit, Planned, SaveHandle
from safe_ckpt.adapters.directories import folder_for_others
from safe_ckpt.adapters.planning import OverlapPlan, check_step, checked_metrics, know_models


@dataclass(frozen=True, kw_only=True)
class Context:
    """What saves and loads of one registered Accelerator work with.

    Attributes:
        engine: where the ranks meet.
        accelerator: what is saved.
        directories: those that are held.
        loaders: its stateful loaders.
        shards: plans what every rank has a part of; None for nothing.
    """

    engine: Engine
    accelerator: Any
    directories: CheckpointDirectory
    loaders: Loaders
    shards: strategies.ShardedStates | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to save. See ``Handle.save_state``; ``arguments`` are for DeepSpeed."""

    safe_serialization: bool
    metrics: Mapping[str, Any]
    step: int | None
    arguments: Mapping[str, Any]


def save(context: Context, output_dir: str | os.PathLike[str] | None, options: Options) -> tuple[Path, SaveHandle]:
    """Take a snapshot and have it written. Every rank calls this. Returns where it will be, and the handle.

    Raises:
        SafeCheckpointError: see ``Handle.save_state``.
    """
    hooks = context.accelerator._save_model_state_pre_hook
    target = context.directories.target(output_dir, hooks=bool(hooks))
    with contextlib.ExitStack() as stack:
        folder = None
        if target.hooks:
            workspace = target.directory.workspace
            folder = stack.enter_context(folder_for_others(context.engine, workspace, target.path))
        handle = _save(context, target, folder, options)
    if not handle.skipped:
        context.accelerator.project_configuration.iteration = target.number + 1
    return target.path, handle


def _save(context: Context, target: Target, folder: Path | None, options: Options) -> SaveHandle:
    accelerator = context.accelerator
    step = target.step if options.step is None else options.step
    metrics: dict[str, float] = {}
    files: list[FilePlan] = []
    must_match: dict[str, str] = {}
    attempt = Attempt()
    with attempt:  # a hook or a state_dict() of the user's may raise anything
        check_step(step)
        metrics = checked_metrics(options.metrics)
        files, must_match = _unsharded(context, folder, options)
    shards = context.shards.plan(attempt) if context.shards is not None else Planned()
    engines = strategies.collect_engines(context.engine, accelerator, options.arguments)
    planned = Planned.joined([Planned(files=files, error=attempt.error), shards, engines])
    know_models(context.engine, lambda: accelerator._models)
    overlap = None
    if context.engine.config.snapshot == "overlapped" and planned.files:
        overlap = OverlapPlan(accelerator._models, strategies.plain_optimizers(accelerator)) or None
    return target.directory.save(
        context.engine,
        target.path,
        planned.content(overlap=overlap),
        step=step if isinstance(step, int) else -1,
        metrics=metrics,
        notes={"adapter": ADAPTER, "iteration": target.number, **planned.notes},
        must_match=must_match,
        on_commit=OnCommit(prefilled=folder, carry=lambda _: True, retention=context.directories.retention),
    )


def _unsharded(context: Context, folder: Path | None, options: Options) -> tuple[list[FilePlan], dict[str, str]]:
    """The files that one rank writes by itself, and what must be equal on all ranks for that."""
    accelerator = context.accelerator
    apart = context.shards is not None or bool(strategies.engines_of(accelerator))
    states = [accelerator.get_state_dict(model, unwrap=False) for model in ([] if apart else accelerator._models)]
    if folder is not None:
        for hook in list(accelerator._save_model_state_pre_hook.values()):
            hook(accelerator._models, states, str(folder))
    shared = contents.shared_states(accelerator)
    files = contents.files(
        accelerator,
        states,
        shared,
        safe_serialization=options.safe_serialization,
        besides={KEY: context.loaders.states(accelerator._dataloaders)},
        sharded=apart,
    )
    return files, contents.must_match(accelerator, shared)
