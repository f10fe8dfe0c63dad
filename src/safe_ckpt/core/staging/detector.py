"""Notices tensors that changed while they were being copied, although nothing should have changed them.

A safety net under the gate, not the guarantee: version counters tell of in-place operations, samples of most edits through
``.data``, which counters do not show.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SAMPLE_BYTES = 64


class MutationDetector:
    """Remembers versions and samples of tensors as they are now.

    Args:
        tensors: what to watch, each with the name to give in messages. Names need not be unique.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._seen = [(name, tensor, tensor._version, _sample(tensor)) for name, tensor in tensors]

    def changed(self) -> str:
        """The name of a tensor that is not what it was; empty when there is none."""
        for name, tensor, version, sample in self._seen:
            if tensor._version != version or _sample(tensor) != sample:
                return name
        return ""


def _sample(tensor: torch.Tensor) -> bytes:
    """Some bytes at the start, in the middle and at the end; none of a tensor that is not in host memory."""
    if not tensor.is_cpu or not tensor.is_contiguous():
        return b""
    start, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    if size <= 3 * _SAMPLE_BYTES:
        return ctypes.string_at(start, size)
    places = (0, size // 2, size - _SAMPLE_BYTES)
    return b"".join(ctypes.string_at(start + place, _SAMPLE_BYTES) for place in places)
