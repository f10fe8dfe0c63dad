"""``load_state``: which checkpoint, verified and agreed by all ranks, before Accelerate reads it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate import utils

from safe_ckpt.accelerate.dataloaders import KEY, Loaders
from safe_ckpt.accelerate.directories import CheckpointDirectory, next_number
from safe_ckpt.adapters import Engine, presence
from safe_ckpt.adapters.directories import (
    MANIFEST_NAME,
    newest,
    read_manifest,
    resume,
    verify,
    warn_if_foreign,
)
from safe_ckpt.errors import NoValidCheckpointError

logger = logging.getLogger(__name__)


def load(
    engine: Engine,
    places: CheckpointDirectory,
    loaders: Loaders,
    accelerator: Any,
    input_dir: str | os.PathLike[str] | None,
    restore: Callable[[Path], None],
) -> Path:
    """Restore the checkpoint at ``input_dir``, or the newest valid one. Every rank calls this. Returns which one it was.

    Args:
        engine: where the ranks meet.
        places: the directories that are held.
        loaders: the loaders that are to go on where they were.
        accelerator: what is restored.
        input_dir: which one; None for the newest valid one.
        restore: reads a checkpoint and applies it.

    Raises:
        SafeCheckpointError: see ``Handle.load_state``.
    """
    if input_dir is None:
        path = _newest(engine, places)
    else:
        path = Path(os.path.abspath(os.path.expanduser(input_dir)))
        engine.agree("load_state", must_match={"path": path}, decide=lambda _: _expect(path))
        verify(engine, path)
    warn_if_foreign(engine, path)
    if not presence.is_there(path / f"{utils.RNG_STATE_NAME}_{engine.rank}.pkl"):
        logger.warning("%s holds no random state of rank %d: it does not continue exactly there", path, engine.rank)

    def apply() -> None:
        restore(path)
        loaders.resume(accelerator._dataloaders, _loader_states(path, engine.rank))

    resume.apply(engine, apply)
    own = accelerator.project_configuration.iteration
    number = engine.agree("iteration", must_match={"path": path}, decide=lambda _: max(own, _next(places, path)))
    accelerator.project_configuration.iteration = number
    return path


def _newest(engine: Engine, places: CheckpointDirectory) -> Path:
    place = places.for_load()
    chosen = newest(engine, place, lambda: places.candidates(place))
    if chosen is None:
        message = "there is no checkpoint: save one first, or do not load on a fresh run"
        raise NoValidCheckpointError(path=str(place.workspace.path), message=message)
    return chosen.path


def _expect(path: Path) -> None:
    if not presence.is_directory(path):
        raise NoValidCheckpointError(path=str(path), message="there is no such directory")


def _loader_states(path: Path, rank: int) -> list[Any]:
    file = path / f"{utils.RNG_STATE_NAME}_{rank}.pkl"
    return list(utils.load(file).get(KEY, ())) if presence.is_there(file) else []


def _next(places: CheckpointDirectory, path: Path) -> int:
    """The number of the save that comes next: never one that is in use."""
    if (folder := places.automatic()) is not None:
        return next_number(folder)
    notes: Mapping[str, Any] = read_manifest(path).notes if presence.is_there(path / MANIFEST_NAME) else {}
    return int(notes.get("iteration", -1)) + 1
