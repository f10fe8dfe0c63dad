"""``save_checkpoint``: from a DeepSpeed engine to a request of the core."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safe_ckpt.adapters import Engine, SaveHandle, file_plan, presence
from safe_ckpt.adapters.directories import WEIGHTS, HeldDirectories
from safe_ckpt.adapters.requests import Content, Destination, Facts, OnCommit, Pointer, SaveRequest, Snapshot, Unplanned
from safe_ckpt.deepspeed import arguments, directories, nvme
from safe_ckpt.deepspeed.capture import Captured, capture, capture_weights
from safe_ckpt.errors import DirectoryError

_EXECUTABLE = 0o755


def save(
    core: Engine,
    held: directories.CheckpointDirectory,
    engine: Any,
    save_dir: object,
    tag: object,
    client_state: Mapping[str, Any],
    *,
    save_latest: bool,
    exclude_frozen_parameters: bool,
) -> SaveHandle:
    """Take a snapshot and have it written as ``tag`` in ``save_dir``. Every rank calls this.

    Raises:
        SafeCheckpointError: see ``Handle.save_checkpoint``.
    """
    options = {"save_latest": save_latest, "exclude_frozen_parameters": exclude_frozen_parameters}
    top, tag = agree_place(core, "save_checkpoint", save_dir, tag, options)
    path = top / tag
    place = held.hold(top, tag)
    parts = nvme.agree(core, engine)
    captured = capture(engine, tag, client_state, exclude_frozen_parameters=exclude_frozen_parameters)
    content: Content
    if captured.error is not None:
        content = Unplanned(error=captured.error)
    elif parts is not None:
        content = Snapshot(files=captured.images, copies=parts.copies, folders=parts.folders)
    else:
        content = Snapshot(files=captured.images)
    return core.save(
        SaveRequest(
            destination=Destination(workspace=place.workspace, path=path, kind="directory"),
            content=content,
            facts=Facts(
                step=engine.global_steps,
                notes={
                    "adapter": directories.ADAPTER,
                    "latest": save_latest,
                    "tag": tag,
                    nvme.NOTE: {"": list(parts.notes)} if parts is not None else {},
                },
            ),
            on_commit=OnCommit(
                carry=lambda name: not directories.is_state(name),
                pointers=_pointers(captured, top, tag, save_latest=save_latest),
                catalog=place.ledger,
                retention=held.retention,
            ),
        )
    )


def save_weights(
    core: Engine,
    workspaces: HeldDirectories,
    engine: Any,
    save_dir: object,
    save_filename: object,
    *,
    exclude_frozen_parameters: bool,
) -> SaveHandle | None:
    """Write what ``save_16bit_model`` writes, as one file that is replaced as a whole. Every rank calls this.

    Returns:
        None when DeepSpeed's settings say that nothing is written.

    Raises:
        SafeCheckpointError: see ``Handle.save_16bit_model``.
    """
    found: list[Path] = []

    def look() -> dict[str, object]:
        found.append(arguments.checked_file(save_dir, save_filename))
        return {"path": found[0], "exclude_frozen_parameters": exclude_frozen_parameters}

    arguments.agree(core, "save_16bit_model", look, lambda: _refuse_directory(found[0]))
    (path,) = found
    captured = capture_weights(engine, path.name, exclude_frozen_parameters=exclude_frozen_parameters)
    if captured.result is False:  # as its settings have it, so on every rank
        return None
    return core.save(
        SaveRequest(
            destination=Destination(workspace=workspaces.hold(path), path=path, kind="file"),
            content=Unplanned(error=captured.error)
            if captured.error is not None
            else Snapshot(files=[file_plan.single(image, path.name) for image in captured.images]),
            facts=Facts(step=engine.global_steps, notes={"adapter": WEIGHTS}),
            patient=True,
        )
    )


def _refuse_directory(path: Path) -> None:
    if presence.is_directory(path):
        raise DirectoryError(path=str(path), message="is a directory where a file goes", rank=0, code=errno.EISDIR)


def agree_place(
    core: Engine, kind: str, save_dir: object, tag: object, options: Mapping[str, object]
) -> tuple[Path, str]:
    """Where a tag goes, checked and the same on all ranks. Every rank calls this.

    Returns:
        The directory that the caller named, and the tag.

    Raises:
        ConfigError: ``save_dir`` or ``tag`` is none, on any rank.
        DesyncError: the ranks differ.
        DirectoryError: something stands there that must not be replaced.
    """
    found: list[tuple[Path, str]] = []

    def look() -> dict[str, object]:
        found.append((arguments.checked_directory(save_dir, "save_dir"), arguments.checked_tag(tag)))
        path = found[0][0] / found[0][1]
        directories.CheckpointDirectory.settle_above(path)
        return {"path": path, **options}

    arguments.agree(core, kind, look, lambda: directories.refuse_what_stands_there(*found[0]))
    return found[0]


def _pointers(captured: Captured, top: Path, tag: str, *, save_latest: bool) -> list[Pointer]:
    """What lies beside the tags: the scripts first, ``latest`` last."""
    found = [Pointer(path=top / name, data=data, mode=_EXECUTABLE) for name, data in captured.scripts.items()]
    if save_latest:
        found.append(Pointer(path=top / arguments.LATEST, data=tag.encode()))
    return found
