"""Figures as people read them."""

from __future__ import annotations

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_text(count: float | None) -> str:
    """1536 -> "1.5 KiB"; nothing for None."""
    if count is None:
        return ""
    unit = 0
    while count >= 1024 and unit < len(_BYTES) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.1f} {_BYTES[unit]}"
