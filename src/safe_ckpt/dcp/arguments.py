"""Arguments of ``save``, ``async_save`` and ``load``: which may be given, and which are refused by name."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from safe_ckpt.adapters.spool import refuse_url
from safe_ckpt.core.home.home import HIDDEN, HIDDEN_TOO
from safe_ckpt.core.storage.objects.place import absolute
from safe_ckpt.errors import ConfigError, DirectoryError, RestoreError, StateError

LATEST = "latest"
"""As the last part of ``checkpoint_id``, where nothing has this name: the newest in the directory above."""
_EXPORT = "for HuggingFaceStorageWriter's layout use Checkpointer.export"


@contextlib.contextmanager
def named_rank(rank: int, size: int) -> Iterator[None]:
    """Add the rank to what is refused in here, where there are several: all of them raise it."""
    try:
        yield
    except (ConfigError, RestoreError) as error:
        if size == 1:
            raise
        raise dataclasses.replace(error, message=f"{error.message} (rank {rank})") from None


def path_of(checkpoint_id: str | os.PathLike[str] | None, call: str) -> Path:
    """The absolute path that ``checkpoint_id`` names.

    Raises:
        ConfigError: it was not given, or is the address of an object store.
    """
    if checkpoint_id is None or not os.fspath(checkpoint_id):
        raise ConfigError(key=f"{call}: checkpoint_id", message="is missing: give the path of the checkpoint's folder")
    refuse_url(checkpoint_id, f"{call}: checkpoint_id")
    return absolute(checkpoint_id)


def target_of(path: Path) -> Path:
    """Where a save puts a checkpoint: behind a link, where ``path`` is one. The link stays.

    Raises:
        ConfigError: another save of safe_ckpt makes that folder, such as ``publishing``.
        DirectoryError: it contains the working directory, or the root of the file system.
    """
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    if not {HIDDEN, HIDDEN_TOO}.isdisjoint(path.parts):
        message = (
            f"{str(path)!r} is in a folder that becomes a checkpoint by itself, as that of safe_ckpt.publishing: save there "
            "with torch.distributed.checkpoint's own save, or leave publishing out and name the final folder"
        )
        raise ConfigError(key="checkpoint_id", message=message)
    if Path.cwd().is_relative_to(os.path.realpath(path)):
        message = "this process works in it, so it cannot be replaced by a checkpoint: name a folder below it"
        raise DirectoryError(path=str(path), message=message)
    return path


def check_state(state_dict: object) -> None:
    """Refuse what is no state dict.

    Raises:
        StateError: it is none.
    """
    if not isinstance(state_dict, dict):
        kind = type(state_dict).__name__
        raise StateError(key="state_dict", message=f"expected a dict of names to values, got {kind}")


def check_saving(storage_writer: object, planner: object, *, use_collectives: bool) -> None:
    """Refuse what cannot be honoured in a save.

    Raises:
        ConfigError: names the argument and says what to do instead.
    """
    if storage_writer is not None:
        kind = type(storage_writer).__name__
        message = f"{kind} writes by itself: leave it out and give checkpoint_id=PATH; {_EXPORT}"
        raise ConfigError(key="storage_writer", message=message)
    if not use_collectives:
        message = (
            "the ranks always agree here, through a store and without collectives, on one .metadata: leave it out; where a "
            "rank has a state of its own give no_dist=True and a checkpoint_id of its own"
        )
        raise ConfigError(key="use_collectives", message=message)
    if planner is None:
        return
    if type(planner) is not DefaultSavePlanner:
        kind = type(planner).__name__
        message = f"{kind} cannot be honoured: change the state dict before you save it, and leave planner out"
        raise ConfigError(key="planner", message=message)
    given = {name: getattr(planner, name, True) for name in ("flatten_state_dict", "flatten_sharded_tensors")}
    if off := sorted(name for name, value in given.items() if not value):
        raise ConfigError(key="planner", message=f"{', '.join(off)}=False is not supported: leave it out")


def check_loading(storage_reader: object, planner: Any) -> None:
    """Refuse what cannot be honoured in a load.

    Raises:
        ConfigError: names the argument and says what to do instead.
    """
    if storage_reader is not None:
        kind = type(storage_reader).__name__
        message = f"{kind} reads by itself: leave it out and give checkpoint_id=PATH, or load with torch's own load"
        raise ConfigError(key="storage_reader", message=message)
    if planner is None:
        return
    kind = type(planner).__name__
    if not isinstance(planner, DefaultLoadPlanner):
        message = f"{kind} does not derive from DefaultLoadPlanner: derive from it, or load with torch's own load"
        raise ConfigError(key="planner", message=message)
    if type(planner).create_global_plan is not DefaultLoadPlanner.create_global_plan:
        message = f"{kind}.create_global_plan wants the plans of all ranks: load with torch's own load"
        raise ConfigError(key="planner", message=message)
