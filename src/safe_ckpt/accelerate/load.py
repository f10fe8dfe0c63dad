"""``load_state``: which checkpoint, verified and agreed by all ranks, before Accelerate reads it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import utils

from safe_ckpt.accelerate import contents
from safe_ckpt.accelerate.dataloaders import KEY
from safe_ckpt.accelerate.directories import BY_NAME, AcceleratorSaver, found_at, names_below, next_number
from safe_ckpt.accelerate.strategies import plain_optimizers, scaler_apart
from safe_ckpt.adapters.extras import absolute, keeping_types, names_in, not_found, one_resume, presence
from safe_ckpt.adapters.planning import go_on
from safe_ckpt.adapters.saver import manifest_of
from safe_ckpt.adapters.spool import refuse_url
from safe_ckpt.errors import ConfigError, NoValidCheckpointError, UnsupportedFormatError
from safe_ckpt.text import listed

if TYPE_CHECKING:
    from safe_ckpt import CheckpointInfo

logger = logging.getLogger(__name__)


def load(
    saver: AcceleratorSaver,
    input_dir: str | os.PathLike[str] | None,
    restore: Callable[[str], None],
    arguments: Mapping[str, Any],
) -> None:
    """Restore the checkpoint at ``input_dir``, or the newest valid one. Every rank calls this.

    Args:
        saver: of the registered Accelerator.
        input_dir: which one; None for the newest valid one.
        restore: reads a checkpoint and applies it.
        arguments: further ones of ``load_state``, which ``restore`` gives to DeepSpeed.

    Raises:
        SafeCheckpointError: see ``Handle.load_state``.
    """
    begun, engine = time.monotonic(), saver.engine
    if input_dir is None:
        path = _newest(saver)
    else:
        refuse_url(input_dir, "load_state: input_dir")
        path = absolute(input_dir)
        saver.fetch_path(path)
        engine.agree("load_state", must_match={"path": path}, decide=lambda _: _expect(path))
        saver.verify(path)
    _apply(saver, path, restore, arguments)
    if input_dir is not None:
        saver.resumed(path, begun)
    _go_on_counting(saver, path)


def load_if_any(
    saver: AcceleratorSaver,
    directory: str | os.PathLike[str] | None,
    restore: Callable[[str], None],
    arguments: Mapping[str, Any],
) -> CheckpointInfo | None:
    """Restore the newest valid checkpoint, if there is one. Every rank calls this.

    Args:
        saver: see ``load``.
        directory: where the checkpoints are, or one of them; None for those that Accelerate names.
        restore: see ``load``.
        arguments: see ``load``.

    Returns:
        What was restored; None on a fresh run.

    Raises:
        SafeCheckpointError: see ``Handle.resume``.
    """
    begun = time.monotonic()
    if directory is None:
        info = _newest_if_any(saver)
    else:
        refuse_url(directory, "resume: directory")
        info = _newest_in(saver, absolute(directory))
    if info is not None:
        _apply(saver, info.file_path, restore, arguments)
        if directory is not None:
            saver.resumed(info.file_path, begun)
        _go_on_counting(saver, info.file_path)
    return info


def _apply(saver: AcceleratorSaver, path: Path, restore: Callable[[str], None], arguments: Mapping[str, Any]) -> None:
    """Restore what was verified."""
    engine, accelerator = saver.engine, saver.accelerator
    random_states = path / f"{utils.RNG_STATE_NAME}_{engine.rank}.pkl"
    is_known = presence.is_there(random_states)
    if not is_known:
        logger.warning("%s holds no random state of rank %d: it does not continue exactly there", path, engine.rank)

    def apply() -> None:
        states = utils.load(random_states) if is_known else {}
        loader_states = states.get(KEY, ())
        saver.loaders.refuse_unused(accelerator._dataloaders, loader_states)
        with scaler_apart(accelerator, path):
            restore(str(path))
        contents.restore_other_devices(states)
        saver.loaders.resume(accelerator._dataloaders, loader_states)

    with saver.parts.loading(path, arguments), keeping_types(plain_optimizers(accelerator)):
        one_resume.apply(engine, apply, path, BY_NAME)
    go_on(engine, lambda: accelerator._models)


def _go_on_counting(saver: AcceleratorSaver, path: Path) -> None:
    project = saver.accelerator.project_configuration
    own = project.iteration
    project.iteration = saver.engine.agree(
        "iteration", must_match={"path": path}, decide=lambda _: max(own, _next(saver, path))
    )


def _newest(saver: AcceleratorSaver) -> Path:
    home = saver.for_load()
    info = saver.newest(home, lambda: saver.loadable(home))
    if info is None:
        message = "there is no checkpoint: save one first, or let handle.resume() begin a fresh run"
        raise NoValidCheckpointError(path=str(home.held.path), message=message)
    return info.file_path


def _newest_if_any(saver: AcceleratorSaver) -> CheckpointInfo | None:
    home = saver.hold_automatic()
    if home is None:
        message = (
            "is missing: without automatic_checkpoint_naming give the directory that the checkpoints are in, such as "
            '"out" for out/step_90'
        )
        raise ConfigError(key="resume: directory", message=message)
    return saver.newest(home, lambda: saver.loadable(home))


def _newest_in(saver: AcceleratorSaver, directory: Path) -> CheckpointInfo | None:
    if saver.config.mirror.url is not None:
        message = (
            "a directory of checkpoints that you name yourself is not looked for in the mirror: load_state(path) is"
        )
        raise ConfigError(key="resume: directory", message=message)
    return saver.newest_beside(directory, lambda: found_at(directory))


def _expect(path: Path) -> None:
    if not presence.is_directory(path):
        raise not_found(path, names_in(path.parent))
    if names := names_below(path):
        message = f"is a directory for checkpoints, and no checkpoint; name one of them: {listed(names)}"
        raise UnsupportedFormatError(path=str(path), message=message)


def _next(saver: AcceleratorSaver, path: Path) -> int:
    """The number of the save that comes next: never one that is in use."""
    if (folder := saver.automatic()) is not None:
        return next_number(folder)
    manifest = manifest_of(path)
    return int(manifest.notes.get("iteration", -1)) + 1 if manifest is not None else 0
