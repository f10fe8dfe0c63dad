"""Where the entries of one rank's files lie. That rank lays them out so, and rank 0 says it in ``.metadata``.

What is not trained goes to further files of the rank: such a file has the same bytes at every save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from safe_ckpt.core.formats import file_plan, hugging_face
from safe_ckpt.core.formats.file_plan import FilePlan
from safe_ckpt.core.sharding import dcp_entries
from safe_ckpt.core.sharding.dcp_entries import Envelope
from safe_ckpt.errors import StateError

if TYPE_CHECKING:
    import torch


def frozen_entries(plan: SavePlan, names: frozenset[str]) -> list[int]:
    """Which entries are tensors of these names; see ``hugging_face.is_named``."""
    rows = enumerate(plan.items) if names else ()
    tensors = ((number, item.index.fqn) for number, item in rows if item.type != WriteItemType.BYTE_IO)
    return [number for number, name in tensors if hugging_face.is_named(name, names)]


def entries(
    plan: SavePlan, kept: Sequence[int], frozen_apart: Sequence[int], lengths: Mapping[int, int]
) -> Iterator[tuple[WriteItem, int, int, int, int]]:
    """Where the entries of one rank lie: number in the plan, which file, offset, length."""
    ends, frozen = [0, 0], frozenset(frozen_apart)
    for number in kept:
        item, around = plan.items[number], None
        if item.type == WriteItemType.BYTE_IO:
            length = lengths[number]
        else:
            around = dcp_entries.envelope(*type_and_shape(item))
            length = around.length
        if number not in frozen:
            file = 0
        else:
            if ends[-1] and ends[-1] + length > file_plan.FROZEN_BYTES:
                ends.append(0)
            file = len(ends) - 1
        at = dcp_entries.behind(ends[file], around.alignment) if around is not None else dcp_entries.behind(ends[file])
        yield item, number, file, at, length
        ends[file] = at + length


def type_and_shape(item: WriteItem) -> tuple[torch.dtype, tuple[int, ...]]:
    """Type and shape of an entry that is a tensor."""
    if item.tensor_data is None:
        raise StateError(key=item.index.fqn, message="its planned entry describes no tensor")
    return item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes)


@dataclass(kw_only=True, eq=False)
class File:
    """A file while it is laid out."""

    pieces: list[tuple[int, bytes]] = field(default_factory=list)
    tensors: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    end: int = 0

    def add(self, name: str, tensor: torch.Tensor, at: int, around: Envelope) -> None:
        """A tensor, as the last entry so far."""
        begin = at + len(around.head)
        self.pieces += [(at, around.head), (self.end - len(around.tail), around.tail)]
        if tensor.numel():
            self.tensors.append((begin, tensor))
            self.names.append(name)

    def planned(self, path: str, changing: Iterable[tuple[int, bytes]], *, frozen: bool = False) -> FilePlan:
        """The file, with pieces besides that may be others next time."""
        return FilePlan(
            path=path,
            length=self.end,
            pieces=[*self.pieces, *changing],
            tensors=self.tensors,
            fixed=len(self.pieces),
            names=self.names,
            frozen=frozen,
        )


def file_of(rank: int, number: int = 0) -> str:
    """The name of a rank's file."""
    return f"__{rank}_{number}.distcp"


def under(folder: str, name: str) -> str:
    """The path of a file of an item."""
    return f"{folder}/{name}" if folder else name
