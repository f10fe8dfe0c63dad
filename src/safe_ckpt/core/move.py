"""One tensor on its way into an arena."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class Move:
    """One tensor and where its bytes go.

    Attributes:
        offset: in the arena.
        tensor: any shape, type, strides and device; its elements are written in the order of its shape.
        deferred: it stays as it is until the gate opens, so it may be copied later.
    """

    offset: int
    tensor: torch.Tensor
    deferred: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        return self.tensor.numel() * self.tensor.element_size()


def place(move: Move, memory: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy one tensor to where it goes in ``memory``, in the order of its shape, whatever its strides."""
    target = memory[move.offset : move.offset + move.size]
    if move.tensor.dtype is not torch.uint8:
        target = target.view(move.tensor.dtype)
    target.view(move.tensor.shape).copy_(move.tensor, non_blocking=non_blocking)
