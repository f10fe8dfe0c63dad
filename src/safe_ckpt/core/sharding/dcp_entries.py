"""The bytes of ``torch.distributed.checkpoint``'s files, laid out before a byte is copied.

A ``.distcp`` file is a row of entries, each as ``torch.save`` writes one object. Everything around a tensor's elements is known
from its type and shape alone, but for the CRC-32: that is left 0, as ``torch.save`` itself does under ``skip_data`` and as no
reader of torch's looks at it. So rank 0 can say where the entries of every rank will lie, and the file is filled in and written
like any other. The digests that count, of the whole files, are in our manifest.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from safe_ckpt.core.formats import zip_archive
from safe_ckpt.core.formats.torch_archive import STORAGES
from safe_ckpt.core.formats.zip_archive import Record
from safe_ckpt.core.storage.direct_io import PAGE

_ALIGNMENT = 64
_PAGE_ALIGNED_FROM = 64 << 10


@dataclass(frozen=True)
class Envelope:
    """The bytes around the elements of a contiguous tensor.

    Attributes:
        head: the bytes in front.
        tail: the bytes behind.
        alignment: where the entry must begin for its elements to be aligned.
        length: of the entry.
    """

    head: bytes
    tail: bytes
    alignment: int
    length: int


@functools.lru_cache(maxsize=1 << 16)
def envelope(dtype: torch.dtype, shape: tuple[int, ...]) -> Envelope:
    """The envelope for tensors of this type and shape."""
    size = math.prod(shape) * dtype.itemsize
    buffer = io.BytesIO()
    _Pickler(buffer, dtype, shape).dump(_Tensor())
    head, records = b"", []
    for name, data in (("data.pkl", buffer.getvalue()), ("byteorder", sys.byteorder.encode()), ("version", b"3\n")):
        record = _place(name, len(data), len(head))
        head += zip_archive.local_header(record) + data + zip_archive.descriptor(0, record.size)
        records.append(record)
    elements = _place("data/0", size, len(head))
    head += zip_archive.local_header(elements)
    records.append(elements)
    crcs = dict.fromkeys((record.name for record in records), 0)
    tail = zip_archive.descriptor(0, size) + zip_archive.closing(records, crcs, elements.end, comment_bytes=0)
    alignment = PAGE if size >= _PAGE_ALIGNED_FROM else _ALIGNMENT
    return Envelope(head=head, tail=tail, alignment=alignment, length=len(head) + size + len(tail))


def behind(at: int, alignment: int = _ALIGNMENT) -> int:
    """The first offset from ``at`` on at which an entry may begin."""
    return -(-at // alignment) * alignment


def _place(name: str, size: int, at: int) -> Record:
    return zip_archive.place_record(f"archive/{name}", size, at)


class _Tensor:
    """Stands for the tensor in the pickle."""


class _Storage:
    """Stands for its storage."""


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        super().__init__(buffer, protocol=2)
        self._dtype, self._shape = dtype, shape

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if type(obj) is not _Storage:
            return None
        elements = math.prod(self._shape)
        if self._dtype in STORAGES:
            return "storage", STORAGES[self._dtype], "0", "cpu", elements
        return "storage", torch.UntypedStorage, "0", "cpu", elements * self._dtype.itemsize

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not _Tensor:
            return NotImplemented
        strides = [math.prod(max(size, 1) for size in self._shape[dim + 1 :]) for dim in range(len(self._shape))]
        facts: tuple[Any, ...] = (_Storage(), 0, self._shape, tuple(strides), False, OrderedDict())
        if self._dtype in STORAGES:
            return torch._utils._rebuild_tensor_v2, facts
        return torch._utils._rebuild_tensor_v3, (*facts, self._dtype)
