"""Numbers, sizes, times and foreign text as people read them. Pure functions."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import datetime, tzinfo
from typing import Any

_MOST_CHARACTERS = 1000
_SPACES = str.maketrans("\n\t\r", "   ")
_HARMFUL = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Categories of Unicode: control characters, marks of format, surrogates, private ones, ends of lines and paragraphs."""
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_NUMBER_AND_UNIT = re.compile(r"(?<=\d) (?=\S)")
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?$", re.IGNORECASE)
_AGES = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"), (1.0, "second"))


def clean(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Text of unknown origin, fit for a terminal and a page: one line, at most ``most`` characters, nothing that acts.

    Control characters, escape sequences, lone surrogates and marks that turn the direction of writing become visible or
    spaces.
    """
    cut = text[: most + 1]
    spaced = cut.translate(_SPACES)
    shown = "".join("�" if unicodedata.category(one) in _HARMFUL else one for one in spaced)
    return shown if len(cut) <= most else shown[:most] + "…"


def unbroken(text: str) -> str:
    """Text in which no line breaks between a number and what it counts."""
    return _NUMBER_AND_UNIT.sub("\N{NO-BREAK SPACE}", text)


def grouped(count: int) -> str:
    """20000 -> "20 000", with a space that does not break."""
    return f"{count:,}".replace(",", "\N{NO-BREAK SPACE}")


def counted(count: int, noun: str) -> str:
    """3, "save" -> "3 saves"; 1, "save" -> "1 save"."""
    return f"{grouped(count)} {noun}{'' if count == 1 else 's'}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """The names with commas between them; of more than ``most`` the first ones: ``a, b and 3 more``."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def duration(seconds: float | None) -> str:
    """0.0123 -> "12.3 ms"; nothing for None."""
    if seconds is None:
        return ""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs" if seconds else "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    for size_s, unit in ((60.0, "min"), (3600.0, "h")):
        if seconds < 120 * size_s:
            return f"{seconds / size_s:.3g} {unit}"
    return f"{seconds / 86400:.3g} days"


def age(seconds: float) -> str:
    """125 -> "2 minutes"; below a second "a moment". Rounded down."""
    for size_s, noun in _AGES:
        if seconds >= size_s:
            return counted(int(seconds // size_s), noun)
    return "a moment"


def bytes_text(count: float | None) -> str:
    """1536 -> "1.5 KiB"; nothing for None."""
    if count is None:
        return ""
    unit = 0
    while count >= 1024 and unit < len(_BYTES) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.1f} {_BYTES[unit]}"


def bytes_from(text: str) -> int:
    """Bytes: "1.5KiB" -> 1536, "5GB" -> 5000000000; 0 for text that is no size."""
    match = _SIZE.match(text.strip())
    if match is None:
        return 0
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))


def percent(share: float) -> str:
    """0.00312 -> "0.31 %"."""
    points = share * 100
    if 0 < points < 0.01:
        return "less than 0.01 %"
    return f"{points:.2g} %" if points < 10 else f"{points:.0f} %"


def rate(gbps: float | None) -> str:
    """1.234 -> "1.23 GB/s", 0.456 -> "456 MB/s" (powers of ten); nothing for None."""
    if gbps is None:
        return ""
    return f"{gbps:.3g} GB/s" if gbps >= 0.9995 else f"{gbps * 1e3:.3g} MB/s"


def clock(at: float, zone: tzinfo | None = None) -> str:
    """Seconds since the epoch -> "2025-11-21 14:02:33" in ``zone``, None for that of this machine."""
    try:
        return datetime.fromtimestamp(at, tz=zone).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # before the year 1, or after 9999
        return "?"


def metrics_text(metrics: Mapping[str, Any], most: int | None = None) -> str:
    """``loss=0.1, accuracy=0.9``; of more than ``most`` the first ones: ``loss=0.1, +3``."""
    shown = [f"{key}={_number_text(value)}" for key, value in list(metrics.items())[:most]]
    return ", ".join(shown if len(shown) == len(metrics) else [*shown, f"+{len(metrics) - len(shown)}"])


def _number_text(value: Any) -> str:
    try:
        return f"{value:g}"
    except (TypeError, ValueError, OverflowError):  # a manifest of another tool
        return str(value)[:80]
