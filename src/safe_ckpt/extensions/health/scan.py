"""The numbers of a file, looked at piece by piece while its bytes are in the processor's cache.

Two comparisons of whole numbers tell for a piece that all its floats are finite, and which are the extremes: among positive
floats, and among negative ones, the order of the floats is that of their bits. Only a piece that is not finite is looked at
closely. Runs where the bytes are hashed: in the writer process, or in a thread that writes. Needs numpy.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from safe_ckpt.extensions.health.regions import FLOATS, Region

_MOST = float(np.finfo(np.float64).max)
_TINY = 1e-25  # below it squares of float32 may have become zero
_SMALL_BYTES = 16 << 10
_NUMBERS = 128 << 10  # at a time: what is made of them stays in the cache, too


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """The way in which the numbers of one type are read.

    Attributes:
        signed: the whole numbers of the same width.
        unsigned: the same.
        odd: the magnitude from which on a number is not finite.
        mantissa: how many bits it has; None where numpy reads the type itself.
        bias: of the exponent.
        zero_is_nan: whether NaN is what would be a negative zero.
    """

    signed: Any
    unsigned: Any
    odd: int
    mantissa: int | None = None
    bias: int = 0
    zero_is_nan: bool = False

    @property
    def magnitude(self) -> int:
        """All bits but the sign."""
        return int(np.iinfo(self.signed).max)


_KINDS = {
    "float64": _Kind(signed=np.int64, unsigned=np.uint64, odd=0x7FF0000000000000),
    "float32": _Kind(signed=np.int32, unsigned=np.uint32, odd=0x7F800000),
    "float16": _Kind(signed=np.int16, unsigned=np.uint16, odd=0x7C00, mantissa=10, bias=15),
    "bfloat16": _Kind(signed=np.int16, unsigned=np.uint16, odd=0x7F80, mantissa=7, bias=127),
    # The OCP's 8-bit specification, and arXiv:2206.02915 for the ``fnuz`` types, which have no infinity.
    "float8_e4m3fn": _Kind(signed=np.int8, unsigned=np.uint8, odd=0x7F, mantissa=3, bias=7),
    "float8_e5m2": _Kind(signed=np.int8, unsigned=np.uint8, odd=0x7C, mantissa=2, bias=15),
    "float8_e4m3fnuz": _Kind(signed=np.int8, unsigned=np.uint8, odd=0x80, mantissa=3, bias=8, zero_is_nan=True),
    "float8_e5m2fnuz": _Kind(signed=np.int8, unsigned=np.uint8, odd=0x80, mantissa=2, bias=16, zero_is_nan=True),
}


@dataclass(kw_only=True)
class _Sick:
    """A tensor with numbers that are not finite."""

    name: str
    numbers: int
    nan: int = 0
    inf: int = 0
    pattern: Any = field(default_factory=xxhash.xxh3_64)


@dataclass(kw_only=True)
class _Small:
    """Small tensors of one type in a row: of each the region, and where it begins."""

    data: bytearray = field(default_factory=bytearray)
    rows: list[tuple[Region, int]] = field(default_factory=list)


class Scan:
    """The scan of one file.

    Args:
        regions: what is looked at, by offset.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = regions
        self._next = 0
        self._numbers = 0
        self._squares = 0.0
        self._most = -math.inf
        self._least = math.inf
        self._largest = (-1.0, "")
        self._sick: dict[str, _Sick] = {}
        self._cut = b""
        self._small: dict[str, _Small] = {}

    def take(self, at: int, piece: memoryview) -> None:
        """Look at bytes of the file, which come in order.

        Args:
            at: where the first of them lies.
            piece: the bytes.
        """
        if self._next == len(self._regions) or self._regions[self._next].offset >= at + len(piece):
            return
        with np.errstate(all="ignore"):  # numbers that are too large for a sum of squares
            self._take(at, piece)

    def _take(self, at: int, piece: memoryview) -> None:
        regions, end = self._regions, at + len(piece)
        while self._next < len(regions) and regions[self._next].offset < end:
            region = regions[self._next]
            size, last = FLOATS[region.dtype], region.offset + region.length
            begin, stop = max(region.offset, at), min(last, end)
            if region.length <= _SMALL_BYTES:
                self._gather(region, piece[begin - at : stop - at], begins=begin == region.offset, ends=last <= end)
                if last > end:
                    return
                self._next += 1
                continue
            if self._cut:  # a number whose first bytes came with the piece before
                missing = size - len(self._cut)
                if stop - begin < missing:
                    self._cut += bytes(piece[begin - at : stop - at])
                    return
                begin += missing
                self._look(region, memoryview(self._cut + bytes(piece[: begin - at])), begin - size)
            whole = stop - (stop - region.offset) % size
            for start in range(begin, whole, _NUMBERS * size):
                self._look(region, piece[start - at : min(start + _NUMBERS * size, whole) - at], start)
            self._cut = bytes(piece[whole - at : stop - at]) if last > end else b""
            if last > end:
                return
            self._next += 1

    def facts(self) -> dict[str, Any]:
        """The facts that were found, as JSON-able data. ``layout`` is a digest of names and sizes."""
        self._look_at_small_ones()
        layout = xxhash.xxh3_64("\n".join(f"{one.name} {one.length}" for one in self._regions).encode())
        seen = self._most >= self._least
        return {
            "tensors": len(self._regions),
            "numbers": self._numbers,
            "norm": math.sqrt(self._squares),
            "most": self._most if seen else None,
            "least": self._least if seen else None,
            "largest": self._largest[1],
            "layout": layout.hexdigest(),
        }

    def sick(self) -> list[dict[str, Any]]:
        """The tensors with numbers that are not finite: name, how many numbers, NaN and Inf, and a digest of where they are."""
        self._look_at_small_ones()
        return [{**vars(one), "pattern": one.pattern.hexdigest()} for one in self._sick.values()]

    def _gather(self, region: Region, piece: memoryview, *, begins: bool, ends: bool) -> None:
        """Put small ones together: a look at a few numbers takes as long as one at thousands."""
        small = self._small.setdefault(region.dtype, _Small())
        if begins:
            small.rows.append((region, len(small.data)))
        small.data += piece
        if ends and len(small.data) > _NUMBERS * FLOATS[region.dtype]:
            self._look_at_small_ones()

    def _look_at_small_ones(self) -> None:
        gathered, self._small = self._small, {}
        with np.errstate(all="ignore"):
            for dtype, small in gathered.items():
                whole = memoryview(bytes(small.data))
                name = self._largest_of(dtype, whole, small)
                if name is not None:
                    self._look(Region(name, dtype, 0, len(whole)), whole, 0)
                    continue
                ends = [begin for _, begin in small.rows[1:]] + [len(whole)]
                for (region, begin), end in zip(small.rows, ends, strict=True):
                    self._look(region, whole[begin:end], region.offset)

    def _largest_of(self, dtype: str, whole: memoryview, small: _Small) -> str | None:
        """The tensor with the number of the largest magnitude; None if some are not finite."""
        kind = _KINDS[dtype]
        bits = np.frombuffer(whole, kind.unsigned)
        magnitudes = bits & kind.unsigned(kind.magnitude)
        place = int(magnitudes.argmax())
        if int(magnitudes[place]) >= kind.odd or (kind.zero_is_nan and kind.magnitude + 1 in bits):
            return None
        begins = [begin for _, begin in small.rows]
        return small.rows[bisect.bisect_right(begins, place * FLOATS[dtype]) - 1][0].name

    def _look(self, region: Region, piece: memoryview, at: int) -> None:
        self._numbers += len(piece) // FLOATS[region.dtype]
        kind = _KINDS[region.dtype]
        unsigned = np.frombuffer(piece, kind.unsigned)
        signed = unsigned.view(kind.signed)
        high, low = int(signed.max()), int(unsigned.max())
        negative = low > kind.magnitude
        odd = high >= kind.odd or low & kind.magnitude >= kind.odd  # without a negative one both are the same
        if odd or (kind.zero_is_nan and int(signed.min()) < -kind.magnitude):
            self._look_closely(region, unsigned, kind, at)
            return
        # The largest of all numbers if there is a positive one, else the negative one with the smallest magnitude.
        most = high if high >= 0 else int(unsigned.min())
        least = low if negative else int(signed.min())
        ends = _as_floats(np.array([most, least], kind.unsigned), region.dtype, kind)
        squares = _squares(_as_floats(unsigned, region.dtype, kind, signs=False))
        self._note(region, float(ends[0]), float(ends[1]), squares)

    def _look_closely(self, region: Region, bits: Any, kind: _Kind, at: int) -> None:
        magnitudes = bits & kind.unsigned(kind.magnitude)
        if kind.zero_is_nan:
            odd = nan = bits == kind.unsigned(kind.magnitude + 1)
        else:
            odd = magnitudes >= kind.unsigned(kind.odd)
            # The first of them is Inf; ``e4m3fn`` has none.
            nan = odd if kind.odd == kind.magnitude else odd & (magnitudes != kind.unsigned(kind.odd))
        self._note_sick(region, odd, nan, at)
        numbers = _as_floats(bits[~odd], region.dtype, kind)
        if len(numbers):
            self._note(region, float(numbers.max()), float(numbers.min()), _squares(numbers))

    def _note(self, region: Region, most: float, least: float, squares: float) -> None:
        self._most, self._least = max(self._most, most), min(self._least, least)
        self._squares = min(self._squares + squares, _MOST)
        if (size := max(most, -least)) > self._largest[0]:
            self._largest = size, region.name

    def _note_sick(self, region: Region, odd: Any, nan: Any, at: int) -> None:
        """Note which numbers of a tensor are not finite, and how."""
        size = FLOATS[region.dtype]
        if region.name not in self._sick:
            self._sick[region.name] = _Sick(name=region.name, numbers=region.length // size)
        sick, there = self._sick[region.name], np.flatnonzero(odd)
        nans = int(np.count_nonzero(nan))
        sick.nan += nans
        sick.inf += len(there) - nans
        # Of the places, and not of the pieces: the same however the file is cut.
        sick.pattern.update(((there + (at - region.offset) // size) * 2 + nan[there]).astype("<i8").tobytes())


def _as_floats(bits: Any, dtype: str, kind: _Kind, *, signs: bool = True) -> Any:
    """The numbers, which are finite. Those of a narrow type become float32: the bits are put to their places in it.

    A power of two then corrects the exponent, also that of subnormal numbers.
    """
    if kind.mantissa is None:
        return bits.view(dtype)
    numbers = (bits & kind.unsigned(kind.magnitude)).astype(np.uint32)
    numbers <<= np.uint32(23 - kind.mantissa)
    found = numbers.view(np.float32)
    if kind.bias != 127:
        found *= np.float32(2.0 ** (127 - kind.bias))
    if signs:
        found[bits > kind.unsigned(kind.magnitude)] *= -1
    return found


def _squares(numbers: Any) -> float:
    found = float(np.dot(numbers, numbers))
    if math.isfinite(found) and (found > _TINY or not numbers.any()):
        return found
    wide = numbers.astype(np.float64)
    return min(float(np.dot(wide, wide)), _MOST)
