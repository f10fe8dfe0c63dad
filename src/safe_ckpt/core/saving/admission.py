"""Whether a save may start: what every rank says about it, and what rank 0 makes of that. Values in, values out."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safe_ckpt.core.formats.manifest import Manifest
from safe_ckpt.core.saving.request import SaveHandle, SaveRequest
from safe_ckpt.core.storage.copier import FileCopy
from safe_ckpt.errors import DesyncError, from_wire, to_wire


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What the ranks agreed on.

    Attributes:
        manifest: of the save that may start; None when none may.
        writers: the ranks that write.
        needed_bytes: what all ranks together will write.
        earlier: the failed save that every rank reports instead: its ``op_id`` and ``error``.
    """

    manifest: Mapping[str, Any] | None = None
    writers: tuple[int, ...] = ()
    needed_bytes: int = 0
    earlier: Mapping[str, Any] | None = None


def answer(request: SaveRequest, unreported: SaveHandle | None, rank: int) -> dict[str, Any]:
    """What a rank says: how much it will write, why it cannot, and which earlier failure it knows of."""
    error, earlier = None, None
    if request.error is not None:
        error = to_wire(request.error, rank=rank, phase="planning the save")
    if unreported is not None and unreported.unreported is not None:
        failure = to_wire(unreported.unreported, rank=rank, phase="save")
        earlier = {"op_id": unreported.op_id, "error": failure}
    return {
        "bytes": sum(image.total_bytes for image in request.images) + new_bytes(request.copies),
        "writes": bool(request.images or request.copies) or request.parts is not None,
        "error": error,
        "same": dict(request.same),
        "earlier": earlier,
    }


def new_bytes(copies: Sequence[FileCopy]) -> int:
    """How many bytes are to be copied; what an earlier attempt left is not copied again."""
    return sum(copy.stamp.size_bytes for copy in copies)


def decide(request: SaveRequest, answers: Mapping[int, Any], *, busy: bool) -> dict[str, Any]:
    """Rank 0's decision, as ``Admission`` takes it.

    Args:
        request: rank 0's own.
        answers: what ``answer`` returned on every rank.
        busy: as many saves are in flight as may be, and this one is not to wait.

    Raises:
        SafeCheckpointError: the first rank's that cannot save.
        DesyncError: the ranks differ in what must be the same.
    """
    ranks = sorted(answers)
    for rank in ranks:
        if answers[rank]["error"]:
            raise from_wire(answers[rank]["error"])
    sharded = {str(rank): ", ".join(answers[rank].get("items", ["none"])) for rank in ranks}
    if len(set(sharded.values())) > 1:
        raise DesyncError(what="sharded items", values=sharded)
    for what in dict.fromkeys(key for rank in ranks for key in answers[rank]["same"]):
        values = {str(rank): str(answers[rank]["same"].get(what)) for rank in ranks}
        if len(set(values.values())) > 1:
            raise DesyncError(what=what, values=values)
    for rank in ranks:
        if answers[rank]["earlier"]:
            return {"earlier": answers[rank]["earlier"]}
    if busy:
        return {}
    manifest = Manifest(
        name=request.path.name,
        sequence=request.workspace.next_sequence(),
        step=request.step,
        op_id=uuid.uuid4().hex,
        world_size=len(ranks),
        metrics=dict(request.metrics),
        notes=dict(request.notes),
    )
    return {
        "manifest": manifest.to_json(),
        "writers": [rank for rank in ranks if answers[rank]["writes"]],
        "needed_bytes": sum(answers[rank]["bytes"] for rank in ranks),
    }
