"""``register``: registers an Accelerator, and ends an earlier registration of the same object or project."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safe_ckpt.accelerate.handle import Handle, check, check_names
from safe_ckpt.adapters.handle import begin
from safe_ckpt.adapters.spool import is_url, spooled
from safe_ckpt.config import CheckpointConfig, ConfigLike
from safe_ckpt.events import Hook

logger = logging.getLogger(__name__)
_registered: weakref.WeakSet[Handle] = weakref.WeakSet()


def register(accelerator: Any, config: ConfigLike | None = None, *, hooks: Iterable[Hook] = ()) -> Handle:
    """Make an Accelerator's checkpoints safe and asynchronous. Every rank calls this, before or after ``prepare()``.

    ``save_state``, ``load_state``, ``save_model``, ``end_training`` and ``free_memory`` of this one object are replaced until
    ``handle.remove()``. A copy of it, such as the one that a spawned worker gets, is a stock one.

    An earlier registration in this process is ended first, as when a notebook's cell is run again: that of the same
    Accelerator, and that of another one for the same project directory, whose ``save_state`` raises from then on. Settings or
    an Accelerator that are refused change nothing. Where another error ends this, the Accelerator is not registered, and as it
    was. An address as ``project_dir`` stands there again when the registration is removed.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        config: settings, equal on all ranks: a ``CheckpointConfig``, a mapping of its keys, or the path of a YAML file. None
            reads the file that ``SAFE_CKPT_CONFIG`` names, or takes the defaults.
        hooks: called with what happens; see ``safe_ckpt.events``.

    Returns:
        The handle, to wait for what is in flight and to take it all back.

    Raises:
        ConfigError: a setting is not allowed, or the Accelerator's kind of training is not covered.
        DirectoryError: the directory of the checkpoints cannot be used.
        DirectoryInUseError: a live job holds it.
        DesyncError: the ranks were given different settings.
        RendezvousTimeout: some ranks did not call this.

    Example:
        ```python
        project = ProjectConfiguration("runs/accelerate", automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=project)
        register(accelerator)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.save_state(metrics={"loss": 0.25})  # returns when the copy is taken
        accelerator.load_state()  # the newest valid checkpoint
        accelerator.end_training()
        ```
    """
    settings = begin(accelerator, config, _check)
    project = accelerator.project_configuration
    for other in list(_registered):
        other._leave(project)
    local: dict[str, str] = {}
    if project.project_dir is not None and is_url(project.project_dir, "project_dir"):
        folder, settings = spooled(str(project.project_dir), settings, key="ProjectConfiguration.project_dir")
        local["project_dir"] = str(folder)
        if project.logging_dir == project.project_dir:
            local["logging_dir"] = _logs_beside(folder, accelerator)
    if project.automatic_checkpoint_naming:
        _end_earlier(local.get("project_dir", accelerator.project_dir))
    handle = Handle(accelerator, settings, hooks=hooks, project=local)
    _registered.add(handle)
    return handle


def _check(accelerator: Any, settings: CheckpointConfig) -> None:
    check(accelerator, settings)
    check_names(accelerator, settings)


def _logs_beside(local: Path, accelerator: Any) -> str:
    """Where trackers write on this host: their files are none of a checkpoint's, and few of them take an address."""
    logs = local.with_name(f"{local.name}-logs")
    if accelerator.log_with:
        logger.warning("trackers write to %s, which is not mirrored: set logging_dir to have it elsewhere", logs)
    return str(logs)


def _end_earlier(project_dir: str) -> None:
    """End the registration of another Accelerator for the same project, as when a notebook's cell is run again."""
    for handle in list(_registered):
        other = handle.project
        if other is None or handle.closed:
            continue
        if os.path.realpath(other) == os.path.realpath(project_dir):
            logger.warning("the registration of an earlier Accelerator for %s ends: this one takes its place", other)
            handle.end()


@dataclass(frozen=True)
class SafeCheckpointPlugin:
    """``register`` as an object that can be passed around.

    Attributes:
        config: see ``register``.
        hooks: the same.

    Example:
        ```python
        plugin = SafeCheckpointPlugin(config=CheckpointConfig(retention=Retention(keep_last=3)))
        accelerator = Accelerator(cpu=True, project_dir="runs/accelerate")
        handle = plugin.register(accelerator)
        handle.remove()
        ```
    """

    config: ConfigLike | None = None
    hooks: Sequence[Hook] = ()

    def register(self, accelerator: Any) -> Handle:
        """See ``safe_ckpt.accelerate.register``."""
        return register(accelerator, self.config, hooks=self.hooks)
