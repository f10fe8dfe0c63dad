"""The zip archive that ``torch.load`` reads, as bytes. The writer process uses it too: no torch.

Layout of a file: payload records first, large ones at offsets that are multiples of 4096 (so that host memory can be the
file plan and be written past the page cache), then the small records, then our manifest, then the central directory.
Sizes are known in advance, CRC-32s are not: they stand in a data descriptor behind each payload, as ``torch.save`` does it.
The archive comment holds a digest of every byte before it, so a flip anywhere in the file is found, the central directory
included. Format: PKWARE APPNOTE.TXT 6.3.10.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import xxhash

from safe_ckpt.core.storage.direct_io import PAGE
from safe_ckpt.core.storage.reader import crc32

_SMALL_ALIGNMENT = 64
_PAGE_ALIGNED_FROM = 64 << 10
_LIMIT32 = 0xFFFFFFFF
_LIMIT16 = 0xFFFF
_FLAGS = 0x0808  # sizes and CRC follow the data; names are UTF-8
_DATE = (1 << 5) | 1  # 1980-01-01, the epoch of the format: equal content gives equal bytes
_ALIGNMENT_FIELD = 0xD935  # the extra field that zipalign uses for padding
COMMENT_PREFIX = b"safe_ckpt/1 xxh3-128 "
COMMENT_BYTES = len(COMMENT_PREFIX) + 32


class Record(NamedTuple):
    """Where one member of the archive lies in the file."""

    name: str
    header_offset: int
    data_offset: int
    size: int

    @property
    def end(self) -> int:
        """Offset behind the data descriptor."""
        return self.data_offset + self.size + (24 if self.size >= _LIMIT32 else 16)


class RecordDigest:
    """CRC-32 and xxh3-128 of one record."""

    def __init__(self) -> None:
        self.crc = 0
        self._hash = xxhash.xxh3_128()

    def update(self, piece: memoryview) -> None:
        """Take more bytes."""
        self.crc = crc32(piece, self.crc)
        self._hash.update(piece)

    def hexdigest(self) -> str:
        """The xxh3-128."""
        return self._hash.hexdigest()


def place_record(name: str, size: int, offset: int) -> Record:
    """Place a record whose header starts at ``offset``, padding the header so that the payload is aligned."""
    plain = offset + 30 + len(name.encode()) + (20 if size >= _LIMIT32 else 0)
    alignment = PAGE if size >= _PAGE_ALIGNED_FROM else _SMALL_ALIGNMENT
    data = -(-(plain + 6) // alignment) * alignment
    return Record(name=name, header_offset=offset, data_offset=data, size=size)


def local_header(record: Record) -> bytes:
    """The bytes from ``header_offset`` to ``data_offset``."""
    name = record.name.encode()
    large = record.size >= _LIMIT32
    size = _LIMIT32 if large else 0
    extra = struct.pack("<HHQQ", 1, 16, 0, 0) if large else b""
    padding = record.data_offset - record.header_offset - 30 - len(name) - len(extra)
    extra += struct.pack("<HHH", _ALIGNMENT_FIELD, padding - 4, PAGE) + bytes(padding - 6)
    version = 45 if large else 20
    head = struct.pack("<4s5H3I2H", b"PK\3\4", version, _FLAGS, 0, 0, _DATE, 0, size, size, len(name), len(extra))
    return head + name + extra


def descriptor(crc: int, size: int) -> bytes:
    """The data descriptor behind a payload."""
    return struct.pack("<4sIQQ" if size >= _LIMIT32 else "<4sIII", b"PK\7\10", crc, size, size)


def closing(
    records: Sequence[Record], crcs: Mapping[str, int], start: int, comment_bytes: int = COMMENT_BYTES
) -> bytes:
    """Central directory and end records, up to and excluding the comment. ``start`` is their offset in the archive."""
    directory = b"".join(_central(record, crcs[record.name]) for record in records)
    count, size = len(records), len(directory)
    wide = b""
    if count >= _LIMIT16 or start >= _LIMIT32 or size >= _LIMIT32:
        wide = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
        wide += struct.pack("<4sIQI", b"PK\6\7", 0, start + size, 1)
    count, size, start = min(count, _LIMIT16), min(size, _LIMIT32), min(start, _LIMIT32)
    return directory + wide + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, size, start, comment_bytes)


def _central(record: Record, crc: int) -> bytes:
    name = record.name.encode()
    wide = [value for value in (record.size, record.size, record.header_offset) if value >= _LIMIT32]
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size = min(record.size, _LIMIT32)
    version = 45 if wide else 20
    offset = min(record.header_offset, _LIMIT32)
    head = struct.pack("<4s6H3I", b"PK\1\2", version, version, _FLAGS, 0, 0, _DATE, crc, size, size)
    return head + struct.pack("<5H2I", len(name), len(extra), 0, 0, 0, 0, offset) + name + extra
