"""What a snapshot copies: from which memory to which places in the shared buffer.

Where a save has the tensors of the one before, in the same memory, the places and addresses are those that are known already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from safe_ckpt.core.staging.cuda import TensorCopy

PIECE_BYTES = 16 << 20  # the writer may begin after so many
_THREADS_FROM = 1 << 20  # below this torch's own copy costs more in dispatch than it gains by its threads

Piece = tuple[int | TensorCopy, int, int]
"""The address of memory, or a tensor that is copied in the way that its kind needs; its place in the shared buffer; bytes."""


def _is_away(move: TensorCopy) -> bool:
    return not move.tensor.is_cpu


@dataclass(frozen=True, kw_only=True, eq=False)
class CopyPlan:
    """Part of the tensors of a snapshot, in the order of their places.

    Attributes:
        rows: one for each tensor.
        moves: those of them that are not rows of plain addresses.
        held: what the addresses belong to. Not the tensors: they may be given other memory before the copy is over.
        on_host: whether all of them are in host memory.
    """

    rows: Sequence[Piece] = ()
    moves: Sequence[TensorCopy] = ()
    held: Sequence[object] = ()
    on_host: bool = True

    @classmethod
    def of(cls, moves: Sequence[TensorCopy], elsewhere: Callable[[TensorCopy], bool] = _is_away) -> CopyPlan:
        """Plan to copy ``moves``; ``elsewhere`` says of one that it is not in host memory."""
        rows: list[Piece] = []
        kept: list[TensorCopy] = []
        on_host = True
        for move in moves:
            size, away = move.size, elsewhere(move)
            on_host = on_host and not away
            if away or size >= _THREADS_FROM or not move.tensor.is_contiguous():
                kept.append(move)
                rows.append((move, move.offset, size))
            else:
                rows.append((move.tensor.data_ptr(), move.offset, size))
        return cls(rows=rows, moves=kept, held=_memory_of([move.tensor for move in moves]), on_host=on_host)

    @classmethod
    def joined(cls, plans: Sequence[CopyPlan]) -> CopyPlan:
        """One for several, whose places follow one another."""
        return cls(
            rows=list(chain.from_iterable(plan.rows for plan in plans)),
            moves=list(chain.from_iterable(plan.moves for plan in plans)),
            held=list(chain.from_iterable(plan.held for plan in plans)),
            on_host=all(plan.on_host for plan in plans),
        )

    @property
    def size_bytes(self) -> int:
        """Of all of them."""
        return sum(size for _, _, size in self.rows)

    def pieces(self, elsewhere: Callable[[TensorCopy], bool], *, one_thread: bool) -> deque[Piece]:
        """Cut into pieces that any thread may copy; whole where torch's own threads copy it."""
        if not self.moves and PIECE_BYTES >= _THREADS_FROM:
            return deque(self.rows)  # none is larger than a piece
        pieces: deque[Piece] = deque()
        for row in self.rows:
            source, offset, size = row
            if isinstance(source, int):
                address = source
            elif elsewhere(source) or not source.tensor.is_contiguous() or not one_thread:
                pieces.append(row)
                continue
            else:
                address = source.tensor.data_ptr()
            pieces.extend(
                (address + at, offset + at, min(PIECE_BYTES, size - at)) for at in range(0, size, PIECE_BYTES)
            )
        return pieces


def _memory_of(tensors: Sequence[torch.Tensor]) -> Sequence[object]:
    storage: Any = torch.Tensor.untyped_storage
    return list(map(storage, tensors))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Template:
    """A ``CopyPlan`` without its tensors.

    Attributes:
        rows: as there; of those that need the tensor, the place and the size count.
        odd: these: which row, and which of all tensors of the snapshot.
        deferred: whether they may be copied later.
        on_host: as there.
    """

    rows: Sequence[Piece]
    odd: Sequence[tuple[int, int]]
    deferred: bool
    on_host: bool

    @classmethod
    def of(cls, plan: CopyPlan, numbers: Sequence[int], *, deferred: bool) -> _Template:
        odd = [row for row, piece in enumerate(plan.rows) if not isinstance(piece[0], int)]
        rows = list(plan.rows)
        for row in odd:
            rows[row] = (0, *rows[row][1:])
        return cls(rows=rows, odd=[(row, numbers[row]) for row in odd], deferred=deferred, on_host=plan.on_host)

    def plan(self, tensors: Sequence[torch.Tensor], held: Sequence[object]) -> CopyPlan:
        rows, moves = list(self.rows), []
        for row, number in self.odd:
            _, offset, size = rows[row]
            move = TensorCopy(offset=offset, tensor=tensors[number].detach(), deferred=self.deferred)
            rows[row] = (move, offset, size)
            moves.append(move)
        return CopyPlan(rows=rows, moves=moves, held=held, on_host=self.on_host)


class KnownCopies:
    """The last snapshot's plans, file by file. One per pipeline, used on the thread that saves."""

    def __init__(self) -> None:
        self._templates: dict[object, tuple[_Template, _Template]] = {}
        self._used: set[object] = set()

    def recall(self, key: object, placed: Sequence[tuple[int, torch.Tensor]]) -> tuple[CopyPlan, CopyPlan] | None:
        """What of a file is copied now and what later, if its plan is known.

        Args:
            key: equal where all addresses and places are; None where that is not known.
            placed: its tensors, with their places in it.
        """
        templates = None if key is None else self._templates.get(key)
        if templates is None:
            return None
        self._used.add(key)
        tensors = [tensor for _, tensor in placed]
        now, later = templates
        held = _memory_of(tensors)
        return now.plan(tensors, held), later.plan(tensors, held if later.rows else ())

    def remember(self, key: object, plans: tuple[CopyPlan, CopyPlan], deferred: Sequence[bool]) -> None:
        """Keep a file's plans, without their tensors.

        Args:
            key: as above.
            plans: what is copied now and what later.
            deferred: which of its tensors are copied later.
        """
        if key is None:
            return
        self._used.add(key)
        numbers: tuple[list[int], list[int]] = [], []
        for number, is_later in enumerate(deferred):
            numbers[is_later].append(number)
        now, later = plans
        self._templates[key] = (
            _Template.of(now, numbers[0], deferred=False),
            _Template.of(later, numbers[1], deferred=True),
        )

    def forget_others(self) -> None:
        """Keep what the snapshot that was laid out just now has used."""
        self._templates = {key: found for key, found in self._templates.items() if key in self._used}
        self._used = set()
