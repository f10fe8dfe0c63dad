"""Which rank sends which part of which tensor in which round of a gather. Values in, values out.

What travels is a chunk: a contiguous piece of a rank's part. Parts are cut along their first dimension that is longer than one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from safe_ckpt.core.sharding.dtensor import Piece
from safe_ckpt.errors import StateError


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One part that travels.

    Attributes:
        tensor: its place in the order of tensors.
        rank: who sends it.
        begin: where it begins in the sender's part.
        sizes: its shape.
        at: where it begins in the whole tensor.
        size_bytes: as it travels.
    """

    tensor: int
    rank: int
    begin: tuple[int, ...]
    sizes: tuple[int, ...]
    at: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class GatherPlan:
    """The plan of a gather.

    Attributes:
        rounds: what travels together, in order.
        ends: for every tensor how many rounds must be over before it is complete.
        own: for every tensor what the writing rank has of it itself.
    """

    rounds: Sequence[Sequence[Chunk]]
    ends: Sequence[int]
    own: Sequence[Sequence[Piece]] = field(default_factory=list)

    def share(self, rank: int) -> list[list[tuple[int, tuple[int, ...], tuple[int, ...]]]]:
        """Return what ``rank`` sends, round by round: tensor, beginning, sizes."""
        return [[(one.tensor, one.begin, one.sizes) for one in chunks if one.rank == rank] for chunks in self.rounds]


def plan(
    names: Sequence[str],
    shapes: Sequence[Sequence[int]],
    item_bytes: Sequence[int],
    parts: Mapping[int, Sequence[Sequence[Piece]]],
    most_bytes: int,
    late: Sequence[bool] = (),
) -> GatherPlan:
    """Plan the gather of whole tensors to rank 0.

    Args:
        names: of the tensors, in their order.
        shapes: of the whole tensors.
        item_bytes: bytes of one element of each as it travels.
        parts: for every rank and tensor what it has; a part that several ranks have is sent by the lowest of them.
        most_bytes: of one round, as long as a single row of a part is not longer.
        late: for every tensor whether it must not travel before it is its turn; none when empty.

    Raises:
        StateError: the parts do not make up a whole tensor.
    """
    rounds: list[list[Chunk]] = []
    ends: list[int] = []
    own: list[Sequence[Piece]] = []
    filled = 0
    for index, name in enumerate(names):
        owners = _owners(name, index, shapes[index], parts)
        own.append([piece for rank, piece in owners if rank == 0])
        if late and late[index]:
            filled = most_bytes
        for rank, piece in owners:
            if rank == 0:
                continue
            for inner, part in _cut(piece.sizes, item_bytes[index], most_bytes):
                size = math.prod(part) * item_bytes[index]
                if not rounds or filled + padded(size) > most_bytes:
                    rounds.append([])
                    filled = 0
                at, begin = _moved(piece.offsets, inner), _moved(piece.begin, inner)
                rounds[-1].append(Chunk(tensor=index, rank=rank, begin=begin, sizes=part, at=at, size_bytes=size))
                filled += padded(size)
        ends.append(len(rounds))
    return GatherPlan(rounds=rounds, ends=ends, own=own)


def padded(size_bytes: int) -> int:
    """The room that a chunk takes in the buffer, so that the next one is aligned for every type."""
    return -(-size_bytes // 16) * 16


def _moved(begin: Sequence[int], by: Sequence[int]) -> tuple[int, ...]:
    return tuple(one + other for one, other in zip(begin, by, strict=True))


def _owners(
    name: str, index: int, shape: Sequence[int], parts: Mapping[int, Sequence[Sequence[Piece]]]
) -> list[tuple[int, Piece]]:
    owners: dict[tuple[int, ...], tuple[int, Piece]] = {}
    for rank in sorted(parts):
        for piece in parts[rank][index]:
            if 0 not in piece.sizes:
                owners.setdefault(piece.offsets, (rank, piece))
    whole = math.prod(shape)
    covered = sum(math.prod(piece.sizes) for _, piece in owners.values())
    if covered != whole:
        raise StateError(key=name, message=f"the ranks together have {covered} of its {whole} elements")
    return sorted(owners.values(), key=lambda owner: owner[1].offsets)


def _cut(sizes: Sequence[int], item_bytes: int, most_bytes: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a part into chunks of at most ``most_bytes``, in the order of its memory."""
    whole = tuple(sizes)
    if math.prod(whole) * item_bytes <= most_bytes:
        return [((0,) * len(whole), whole)]
    along = next((dim for dim, size in enumerate(whole) if size > 1), None)
    if along is None:
        return [((0,) * len(whole), whole)]
    row = math.prod(whole[along + 1 :]) * item_bytes
    step = max(1, most_bytes // max(row, 1))
    spans: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for start in range(0, whole[along], step):
        part = (*whole[:along], min(step, whole[along] - start), *whole[along + 1 :])
        begin = tuple(start if dim == along else 0 for dim in range(len(whole)))
        inner = _cut(part, item_bytes, most_bytes) if step == 1 and row > most_bytes else [((0,) * len(whole), part)]
        spans += [(tuple(a + b for a, b in zip(begin, more, strict=True)), size) for more, size in inner]
    return spans
