"""Axes: units that fit and ticks at round numbers, from zero. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SECONDS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = tuple((1024.0**power, unit) for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB"), (0, "B")))
_RATES = ((1.0, "GB/s"), (1e-3, "MB/s"), (1e-6, "kB/s"))
UNITS = {"seconds": _SECONDS, "bytes": _BYTES, "gbps": _RATES}
_ROUND = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_FAR_ABOVE = 4.0


@dataclass(frozen=True, kw_only=True)
class Scale:
    """From zero to ``top`` (in the unit of the values), with ticks as (value, label)."""

    top: float
    unit: str
    ticks: tuple[tuple[float, str], ...]

    def share(self, value: float) -> float:
        """0 at the bottom, 1 at the top and above."""
        return min(1.0, max(0.0, value / self.top))


def fit(values: Sequence[float], quantity: str) -> Scale:
    """The scale of a chart of ``values``, which are "seconds", "bytes" or "gbps".

    It reaches the largest, unless a few stick out so far that the others would be nothing beside them: then it ends above
    the others. Whoever draws says which bars are cut off.
    """
    ordered = sorted(values)
    largest = ordered[-1] if ordered else 0.0
    usual = ordered[int(0.95 * (len(ordered) - 1))] if ordered else 0.0
    reach = largest if largest <= _FAR_ABOVE * usual or usual <= 0 else 1.5 * usual
    sizes = UNITS[quantity]
    factor, unit = next((pair for pair in sizes if reach >= pair[0]), sizes[-1])
    step = round_up(max(reach / factor, 1e-9) / 2)
    ticks = tuple(
        (number * step * factor, f"{number * step:g}" + (f" {unit}" if number == 2 else "")) for number in (0, 1, 2)
    )
    return Scale(top=2 * step * factor, unit=unit, ticks=ticks)


def round_up(value: float) -> float:
    """The next round number: one or two digits of it are not zero."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(digit * power for digit in _ROUND if digit * power >= value * (1 - 1e-9))
