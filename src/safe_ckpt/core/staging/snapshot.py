"""The plan of a snapshot: where in the shared buffer each file lies, what is copied there, and what the writer makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safe_ckpt.core.formats.file_plan import FilePlan, WriteTask
from safe_ckpt.core.formats.manifest import RECORD_NAME
from safe_ckpt.core.staging.buffer import SharedBuffer
from safe_ckpt.core.staging.copy import StagingCopy
from safe_ckpt.core.staging.device_copies import TensorCopy
from safe_ckpt.core.staging.overlap import OverlapPlan
from safe_ckpt.core.staging.progress import FIRST_BYTE
from safe_ckpt.core.storage.direct_io import PAGE


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A snapshot to be taken.

    Attributes:
        tasks: what to write once it is, file by file.
        copy: fills the shared buffer.
    """

    tasks: Sequence[WriteTask]
    copy: StagingCopy


def arena_bytes(images: Sequence[FilePlan]) -> int:
    """How much of a shared buffer the images take."""
    return FIRST_BYTE + sum(_rounded(image.length) for image in images)


def lay_out(
    images: Sequence[FilePlan],
    buffer: SharedBuffer,
    folder: str,
    manifest: Mapping[str, Any],
    *,
    name: str = "",
    overlap_plan: OverlapPlan | None = None,
) -> Snapshot:
    """Make room for everything and fill in all but the tensors.

    Args:
        images: the planned files.
        buffer: where to; holds nothing else.
        folder: the staging directory that the files will be written to.
        manifest: goes into files that carry their manifest inside.
        name: of the checkpoint, for messages.
        overlap_plan: which tensors may be copied later; None for none.

    Raises:
        NotEnoughSpaceError: the machine has not that much memory left.
    """
    buffer.reserve(arena_bytes(images))
    memory = buffer.memory
    moves: list[TensorCopy] = []
    tasks = list_tasks(images, folder, manifest)
    for image, task in zip(images, tasks, strict=True):
        base = task.offset
        for offset, data in image.pieces:
            memory[base + offset : base + offset + len(data)] = data
        for offset, tensor in image.tensors:
            deferred = overlap_plan is not None and overlap_plan.covers(tensor)
            moves.append(TensorCopy(offset=base + offset, tensor=tensor, deferred=deferred))
    end = max((task.offset + task.length for task in tasks), default=FIRST_BYTE)
    detector = overlap_plan.detector() if overlap_plan is not None and any(move.deferred for move in moves) else None
    return Snapshot(tasks=tasks, copy=StagingCopy(name, buffer, moves, end, detector))


def list_tasks(images: Sequence[FilePlan], folder: str, manifest: Mapping[str, Any]) -> list[WriteTask]:
    """What is to be written, with the places in a shared buffer that would hold it all."""
    tasks: list[WriteTask] = []
    base = FIRST_BYTE
    for image in images:
        single = image.records is not None and image.manifest is not None
        tasks.append(
            WriteTask(
                path=f"{folder}/{image.path}",
                offset=base,
                length=image.length,
                records=image.records,
                manifest_name=RECORD_NAME,
                manifest={**manifest, **(image.manifest or {})} if single else {"format": "safe_ckpt-part"},
            )
        )
        base += _rounded(image.length)
    return tasks


def take(images: Sequence[FilePlan], buffer: SharedBuffer, folder: str, manifest: Mapping[str, Any]) -> list[WriteTask]:
    """Copy everything into the shared buffer at once. When this returns the caller may change whatever it likes.

    Raises:
        NotEnoughSpaceError: the machine has not that much memory left.
    """
    snapshot = lay_out(images, buffer, folder, manifest)
    snapshot.copy.run()
    if snapshot.copy.error is not None:
        raise snapshot.copy.error
    return list(snapshot.tasks)


def _rounded(size: int) -> int:
    return -(-size // PAGE) * PAGE
