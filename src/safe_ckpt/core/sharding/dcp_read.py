"""Reads tensors of DCP's files straight to where they go: with one copy, from the page cache, where verifying has left them.

That works for entries that lie as we lay them out (``formats.dcp``), and for parts of them that are one run of bytes. DCP's own
reader takes everything else: it unpickles each entry to memory of its own first.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType

from safe_ckpt.core.formats import dcp
from safe_ckpt.core.sharding.dcp_plan import METADATA
from safe_ckpt.core.storage.inside import checked_name, inside
from safe_ckpt.core.storage.presence import ShortReadError, opened

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
    from torch.futures import Future


def refuse_outside(folder: Path, metadata: Metadata) -> None:
    """Refuse to read files that are not in ``folder``: a reader joins what ``.metadata`` says of their places.

    Raises:
        HostileCheckpointError: one would lie elsewhere.
    """
    for file in {getattr(place, "relative_path", "") for place in (metadata.storage_data or {}).values()}:
        checked_name(file, folder, METADATA)


class StraightReader(FileSystemReader):
    """See above. Not a collective; used on the thread that trains."""

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **options: Any) -> None:
        """Take what ``.metadata`` says."""
        super().set_up_storage_reader(metadata, *args, **options)
        self._tensors = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what is planned.

        Raises:
            OSError: a file could not be read.
        """
        places = self.storage_data
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(places[item.storage_index].relative_path, []).append(item)
        rest: list[ReadItem] = []
        for name, items in by_file.items():
            with opened(inside(Path(self.path), name), os.O_RDONLY) as fd:
                in_order = sorted(items, key=lambda one: places[one.storage_index].offset)
                rest += [item for item in in_order if not self._read(fd, name, item, planner)]
        return super().read_data(dataclasses.replace(plan, items=rest), planner)

    def _read(self, fd: int, name: str, item: ReadItem, planner: LoadPlanner) -> bool:
        """Read one tensor, or return False where it does not lie as ours do."""
        place, known = self.storage_data[item.storage_index], self._tensors.get(item.storage_index.fqn)
        if item.type != LoadItemType.TENSOR or not isinstance(known, TensorStorageMetadata):
            return False
        if getattr(place, "transform_descriptors", None):
            return False
        sizes, dtype = _sizes_of(item, known), known.properties.dtype
        if sizes is None or (first := _first_element(item, sizes)) is None:
            return False
        around = dcp.envelope(dtype, sizes)
        if place.length != around.length or os.pread(fd, len(around.head), place.offset) != around.head:
            return False
        target = planner.resolve_tensor(item).detach()
        if target.dtype != dtype or target.shape != item.lengths:
            return False
        straight = target.is_cpu and target.is_contiguous() and not (target.is_conj() or target.is_neg())
        room = target if straight else torch.empty(tuple(item.lengths), dtype=dtype)
        _fill(fd, name, room, place.offset + len(around.head) + first * dtype.itemsize)
        if not straight:
            target.copy_(room)
        else:
            torch.autograd.graph.increment_version(target)
        planner.commit_tensor(item, target)
        return True


def _sizes_of(item: ReadItem, known: TensorStorageMetadata) -> tuple[int, ...] | None:
    """The shape of the entry that is read from."""
    wanted, hint = item.storage_index.offset, item.storage_index.index
    chunks = known.chunks
    if hint is not None and hint < len(chunks) and chunks[hint].offsets == wanted:
        return tuple(chunks[hint].sizes)
    return next((tuple(chunk.sizes) for chunk in chunks if wanted in (None, chunk.offsets)), None)


def _first_element(item: ReadItem, sizes: tuple[int, ...]) -> int | None:
    """Which element of an entry the wanted part begins with; None if the part is not one run of elements."""
    begin, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    if len(begin) != len(sizes) or lengths[1:] != sizes[1:] or any(begin[1:]):
        return None
    return begin[0] * math.prod(sizes[1:]) if begin else 0


def _fill(fd: int, name: str, tensor: torch.Tensor, offset: int) -> None:
    size, done = tensor.numel() * tensor.element_size(), 0
    if not size:
        return
    memory = memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
    while done < size:
        count = os.preadv(fd, [memory[done:]], offset + done)
        if not count:
            raise ShortReadError(name, offset + done)
        done += count
