"""The numbers of a tensor, mapped from its file: memory is taken only where a tensor lies in several parts. Needs torch."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from safe_ckpt.core.formats.dtypes import ITEM_BYTES
from safe_ckpt.errors import UnsupportedFormatError
from safe_ckpt.tools.inspection.pickle_objects import Opaque, Storage, Tensor
from safe_ckpt.tools.inspection.tensors import Entry, TensorPiece, describe

_BLOCK = 4 << 20  # elements that are compared at a time
_MOST_PAIRS = 4_000_000
_UNORDERED = ("builtins.set", "builtins.frozenset")
_NESTED = (dict, list, tuple, Opaque)
_MOST_REPEATED_BYTES = 1 << 30  # of a tensor that is larger than its file, since strides of 0 repeat what is there


class Mapped:
    """The files of a checkpoint, mapped when they are first needed. Private: nothing that is done to a tensor reaches them.

    Args:
        scratch: a folder on a disk for tensors that lie in several parts and are put together; None for memory.
    """

    def __init__(self, scratch: Path | None = None) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._scratch = scratch
        self._count = itertools.count()

    def tensor(self, entry: Entry) -> torch.Tensor:
        """The whole tensor.

        Raises:
            UnsupportedFormatError: the checkpoint does not have its bytes, or not as plain numbers.
            OSError: the file could not be mapped.
        """
        dtype = getattr(torch, entry.dtype, None)
        if not isinstance(dtype, torch.dtype) or not entry.pieces:
            raise UnsupportedFormatError(path=entry.name, message=f"{entry.dtype} {entry.note} cannot be read".strip())
        if len(entry.pieces) == 1 and entry.pieces[0].shape == entry.shape:
            return self._part(entry.pieces[0], dtype)
        if sum(math.prod(piece.shape) for piece in entry.pieces) != math.prod(entry.shape):
            raise UnsupportedFormatError(path=entry.name, message="parts of it are missing, or overlap")
        whole = self._room(entry, dtype)
        for piece in entry.pieces:
            place = whole
            for axis, (start, size) in enumerate(zip(piece.starts, piece.shape, strict=True)):
                place = place.narrow(axis, start, size)
            place.copy_(self._part(piece, dtype))
        return whole

    def _room(self, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(entry.shape)
        if self._scratch is None or not count:
            return torch.empty(entry.shape, dtype=dtype, device="cpu")
        file = self._scratch / f"{next(self._count)}"
        return torch.from_file(str(file), shared=True, size=count, dtype=dtype).view(entry.shape)

    def _part(self, piece: TensorPiece, dtype: torch.dtype) -> torch.Tensor:
        if 0 in piece.shape:
            return torch.empty(piece.shape, dtype=dtype, device="cpu")
        count = 1 + sum(step * (size - 1) for step, size in zip(piece.stride, piece.shape, strict=True))
        bytes_there, room = count * dtype.itemsize, self._map(piece.file)
        if piece.offset + bytes_there > len(room):
            raise UnsupportedFormatError(path=str(piece.file), message="was cut off meanwhile")
        if math.prod(piece.shape) * dtype.itemsize > max(bytes_there, _MOST_REPEATED_BYTES):
            raise UnsupportedFormatError(path=str(piece.file), message="it is larger than any that was computed with")
        flat = torch.frombuffer(room, dtype=dtype, count=count, offset=piece.offset)
        return flat.as_strided(piece.shape, piece.stride)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as stream:
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]


def difference(first: torch.Tensor, second: torch.Tensor) -> float:
    """The largest absolute difference of two tensors of one shape; 0 if every element is equal, NaN to NaN included.

    Infinity where one has NaN, or an infinity, that the other has not.
    """
    largest = 0.0
    one, other = first.reshape(-1), second.reshape(-1)
    for start in range(0, one.numel(), _BLOCK):
        largest = max(largest, _block(one[start : start + _BLOCK], other[start : start + _BLOCK]))
    return largest


def _block(one: torch.Tensor, other: torch.Tensor) -> float:
    plain = one.dtype == other.dtype and str(one.dtype).removeprefix("torch.") in ITEM_BYTES
    if plain and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)):
        return 0.0
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    equal = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs()
    apart = torch.where(equal, torch.zeros_like(apart), torch.nan_to_num(apart, nan=math.inf, posinf=math.inf))
    return float(apart.max())


def same(one: object, other: object) -> bool:
    """Whether they are equal in type and value, NaN to NaN included. Values that are too large to compare count as different.

    Of a tensor deep within an object of an unknown class only type and shape are compared.
    """
    stack: list[tuple[Any, Any]] = [(one, other)]
    seen: set[tuple[int, int]] = set()  # what contains itself is compared once
    for _ in range(_MOST_PAIRS):
        if not stack:
            return True
        first, second = stack.pop()
        if isinstance(first, _NESTED):
            if (id(first), id(second)) in seen:
                continue
            seen.add((id(first), id(second)))
        below = _below(first, second)
        if below is None:
            return False
        stack += below
    return False


def _below(one: Any, other: Any) -> Iterable[tuple[Any, Any]] | None:
    """The pairs that are still to be compared; None when it is clear already that the two differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        alike = list(map(_text, one)) == list(map(_text, other))
        return list(zip(one.values(), other.values(), strict=True)) if alike else None
    if isinstance(one, Opaque) and isinstance(other, Opaque):
        return _within(one, other)
    if type(one) is not type(other):
        return None
    if isinstance(one, list | tuple):
        return list(zip(one, other, strict=True)) if len(one) == len(other) else None
    if isinstance(one, Tensor | Storage):
        return [] if _facts(one) == _facts(other) else None
    return [] if one == other or (one != one and other != other) else None  # noqa: PLR0124 - NaN


def _within(one: Opaque, other: Opaque) -> list[tuple[Any, Any]] | None:
    if one.made_by != other.made_by or len(one.items) != len(other.items):
        return None
    pairs = [(one.args, other.args), (one.state, other.state)]
    unordered = str(one.made_by) in _UNORDERED
    rows = (sorted(row, key=describe) if unordered else row for row in (one.items, other.items))
    return pairs + list(zip(*rows, strict=True))


def _text(key: object) -> str | bytes:
    return key if isinstance(key, str | bytes) else describe(key)


def _facts(value: Tensor | Storage) -> tuple[Any, ...]:
    if isinstance(value, Storage):
        return (value.dtype, value.count)
    return (value.dtype, value.shape, value.offset, value.stride)
