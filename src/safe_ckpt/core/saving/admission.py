"""Whether a save may start: what every rank says about it, and what rank 0 makes of that. Values in, values out."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from safe_ckpt.core.formats.manifest import Manifest
from safe_ckpt.core.saving.handle import SaveHandle
from safe_ckpt.core.saving.request import SaveRequest
from safe_ckpt.errors import to_wire


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
    """What a rank says: how much it will write, and which earlier failure it knows of.

    Raises:
        Exception: why it cannot.
    """
    if request.error is not None:
        raise request.error
    earlier = None
    if unreported is not None and unreported.unreported is not None:
        failure = to_wire(unreported.unreported, rank=rank, phase="save")
        earlier = {"op_id": unreported.op_id, "error": failure}
    return {
        "bytes": request.content.new_bytes,
        "writes": request.content.writes,
        "earlier": earlier,
    }


def decide(request: SaveRequest, answers: Mapping[int, Any], *, busy: bool) -> dict[str, Any]:
    """Rank 0's decision, as ``Admission`` takes it.

    Args:
        request: rank 0's own.
        answers: what ``answer`` returned on every rank.
        busy: as many saves are in flight as may be, and this one is not to wait.
    """
    ranks = sorted(answers)
    for rank in ranks:
        if answers[rank]["earlier"]:
            return {"earlier": answers[rank]["earlier"]}
    if busy:
        return {}
    manifest = Manifest(
        name=request.name,
        sequence=request.destination.workspace.next_sequence(),
        step=request.facts.step,
        op_id=uuid.uuid4().hex,
        world_size=len(ranks),
        metrics=dict(request.facts.metrics),
        notes=dict(request.facts.notes),
    )
    return {
        "manifest": manifest.to_json(),
        "writers": [rank for rank in ranks if answers[rank]["writes"]],
        "needed_bytes": sum(answers[rank]["bytes"] for rank in ranks),
    }
