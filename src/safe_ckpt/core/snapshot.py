"""The copy that is taken while training waits: from tensors, wherever they are, into the arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from safe_ckpt.core.arena import Arena
from safe_ckpt.core.layout import Image
from safe_ckpt.core.manifest import RECORD_NAME
from safe_ckpt.core.sink import FileTask
from safe_ckpt.core.zip_format import PAGE


def arena_bytes(images: Sequence[Image]) -> int:
    """How much of an arena the images take."""
    return sum(_rounded(image.length) for image in images)


def take(images: Sequence[Image], arena: Arena, folder: str, manifest: Mapping[str, Any]) -> list[FileTask]:
    """Copy everything into the arena. When this returns the caller may change whatever it likes.

    Args:
        images: the planned files.
        arena: where to; holds nothing else.
        folder: the staging directory that the files will be written to.
        manifest: goes into files that carry their manifest inside.

    Returns:
        What to write, for the writer.

    Raises:
        NotEnoughSpaceError: the machine has not that much memory left.
    """
    arena.reserve(arena_bytes(images))
    memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
    tasks, base = [], 0
    for image in images:
        for offset, data in image.pieces:
            arena.memory[base + offset : base + offset + len(data)] = data
        for offset, tensor in image.tensors:
            _copy(tensor, memory, base + offset)
        single = image.records is not None and image.manifest is not None
        tasks.append(
            FileTask(
                path=f"{folder}/{image.path}",
                offset=base,
                length=image.length,
                records=image.records,
                manifest_name=RECORD_NAME,
                manifest={**manifest, **(image.manifest or {})} if single else {"format": "safe_ckpt-part"},
            )
        )
        base += _rounded(image.length)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return tasks


def _copy(tensor: torch.Tensor, memory: torch.Tensor, offset: int) -> None:
    size = tensor.numel() * tensor.element_size()
    target = memory[offset : offset + size]
    if tensor.dtype is not torch.uint8:
        target = target.view(tensor.dtype)
    # The file holds the elements in the order of the logical shape, whatever the strides.
    target.view(tensor.shape).copy_(tensor)


def _rounded(size: int) -> int:
    return -(-size // PAGE) * PAGE
