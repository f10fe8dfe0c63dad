"""``save_checkpoint``: from a DeepSpeed engine to a request of the core."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safe_ckpt.core.engine import Engine
from safe_ckpt.core.named import refuse
from safe_ckpt.core.operation import Pointer, Request, SaveHandle
from safe_ckpt.deepspeed import places, swapping
from safe_ckpt.deepspeed.capture import Captured, capture
from safe_ckpt.errors import ConfigError

_EXECUTABLE = 0o755


def save(
    core: Engine,
    held: places.Places,
    engine: Any,
    save_dir: str | os.PathLike[str],
    tag: str,
    client_state: Mapping[str, Any],
    *,
    save_latest: bool,
    exclude_frozen_parameters: bool,
) -> SaveHandle:
    """Take a snapshot and have it written as ``tag`` in ``save_dir``. Every rank calls this.

    Raises:
        SafeCheckpointError: see ``Handle.save_checkpoint``.
    """
    path = Path(os.path.abspath(save_dir)) / tag
    view = {"path": path, "save_latest": save_latest, "exclude_frozen_parameters": exclude_frozen_parameters}
    core.agree("save_checkpoint", view, decide=lambda _: _refuse(save_dir, path, tag))
    place = held.hold(path.parent)
    parts = swapping.agree(core, engine)
    captured = capture(engine, path.name, client_state, exclude_frozen_parameters=exclude_frozen_parameters)
    return core.save(
        Request(
            root=place.root,
            path=path,
            kind="directory",
            step=engine.global_steps,
            images=captured.images,
            copies=parts.copies if parts is not None else (),
            folders=parts.folders if parts is not None else (),
            error=captured.error,
            notes={
                "adapter": places.ADAPTER,
                "latest": save_latest,
                swapping.NOTE: {"": list(parts.notes)} if parts is not None else {},
            },
            retain=lambda new: held.retain(place, new),
            carry=lambda name: not places.is_state(name),
            pointers=_pointers(captured, path, save_latest=save_latest),
        )
    )


def _refuse(save_dir: str | os.PathLike[str], path: Path, tag: str) -> None:
    if not os.fspath(save_dir):
        raise ConfigError(key="save_checkpoint: save_dir", message="expected a directory, got an empty name")
    places.checked_tag(tag)
    if places.stock_problem(path):
        refuse(path, places.ADAPTER, empty=True)


def _pointers(captured: Captured, path: Path, *, save_latest: bool) -> list[Pointer]:
    """What lies beside the tags: the scripts first, ``latest`` last."""
    folder = path.parent
    found = [Pointer(path=folder / name, data=data, mode=_EXECUTABLE) for name, data in captured.scripts.items()]
    if save_latest:
        found.append(Pointer(path=folder / places.LATEST, data=path.name.encode()))
    return found
