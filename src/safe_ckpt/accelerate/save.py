"""``save_state``: from an Accelerator to a request of the core."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safe_ckpt.accelerate import contents, strategies
from safe_ckpt.accelerate.dataloaders import KEY
from safe_ckpt.accelerate.directories import AcceleratorSaver, Target
from safe_ckpt.adapters import Attempt, FilePlan, OnCommit, OpenSave, Planned
from safe_ckpt.adapters.extras import OverlapPlan, check_step, checked_metrics
from safe_ckpt.adapters.planning import note_models

logger = logging.getLogger(__name__)
_WITHIN_A_WINDOW = (
    "%s lacks the gradients that were accumulated since the last optimizer step, and so will each checkpoint that is saved "
    "between two: a resume goes on without them. Save where accelerator.sync_gradients is True"
)


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How to save. See ``Handle.save_state``; ``arguments`` are for DeepSpeed."""

    safe_serialization: bool
    metrics: Mapping[str, Any]
    step: int | None
    arguments: Mapping[str, Any]


def save(
    saver: AcceleratorSaver, output_dir: str | os.PathLike[str] | None, options: SaveOptions
) -> tuple[Path, OpenSave]:
    """Take a snapshot and have it written. Every rank calls this. Returns where it will be, and the handle.

    Raises:
        SafeCheckpointError: see ``Handle.save_state``.
    """
    target = saver.target(output_dir, hooks=bool(saver.accelerator._save_model_state_pre_hook))
    _warn_within_a_window(saver, target.path)
    with contextlib.ExitStack() as stack:
        folder = None
        if target.hooks:
            folder = stack.enter_context(saver.folder_for_others(target.home, target.path))
        handle = _save(saver, target, folder, options)
    if not handle.skipped:
        saver.accelerator.project_configuration.iteration = target.number + 1
    return target.path, handle


def _warn_within_a_window(saver: AcceleratorSaver, path: Path) -> None:
    accelerator = saver.accelerator
    within = accelerator.gradient_accumulation_steps > 1 and not accelerator.sync_gradients
    if within and saver.engine.rank == 0 and not saver.said_within_a_window:
        saver.said_within_a_window = True
        logger.warning(_WITHIN_A_WINDOW, path)


def _save(saver: AcceleratorSaver, target: Target, folder: Path | None, options: SaveOptions) -> OpenSave:
    accelerator = saver.accelerator
    step = target.step if options.step is None else options.step
    metrics: dict[str, float] = {}
    files: list[FilePlan] = []
    must_match: dict[str, str] = {}
    attempt = Attempt()
    with attempt:  # a hook or a state_dict() of the user's may raise anything
        check_step(step)
        metrics = checked_metrics(options.metrics)
        files, must_match = _unsharded(saver, folder, options)
    own = Planned(files=files, error=attempt.error)
    planned = Planned.joined([own, saver.parts.plan(attempt, options.arguments)])
    note_models(saver.engine, lambda: accelerator._models)
    overlap = None
    # The state dicts of FSDP 1 are copies already, and it moves its parameters about.
    copied = strategies.is_first_version(accelerator)
    if saver.engine.config.snapshot == "overlapped" and planned.files and not copied:
        overlap = OverlapPlan(accelerator._models, strategies.plain_optimizers(accelerator)) or None
    return saver.save(
        target.home,
        target.path,
        planned.payload(overlap=overlap),
        step=step if isinstance(step, int) else -1,
        metrics=metrics,
        notes={"iteration": target.number, **planned.notes},
        must_match=must_match,
        on_commit=OnCommit(prefilled=folder, keep_foreign=target.keep_foreign, retention=saver.retention),
    )


def _unsharded(
    saver: AcceleratorSaver, folder: Path | None, options: SaveOptions
) -> tuple[list[FilePlan], dict[str, str]]:
    """The files that one rank writes by itself, and what must be equal on all ranks for that."""
    accelerator = saver.accelerator
    apart = strategies.is_sharding(accelerator) or bool(strategies.engines_of(accelerator))
    states = [accelerator.get_state_dict(model, unwrap=False) for model in ([] if apart else accelerator._models)]
    if folder is not None:
        for hook in list(accelerator._save_model_state_pre_hook.values()):
            hook(accelerator._models, states, str(folder))
    places = saver.loaders.states(accelerator._dataloaders)
    shared = contents.shared_states(accelerator)
    files = contents.files(
        accelerator,
        states,
        shared,
        safe_serialization=options.safe_serialization,
        besides={KEY: places},
        sharded=apart,
    )
    return files, contents.must_match(accelerator, shared)
