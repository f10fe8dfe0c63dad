"""One chart: a bar per save, from zero, drawn here as SVG that stretches to any width while its text stays readable. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from safe_ckpt import text
from safe_ckpt.report import scale
from safe_ckpt.report.html import Html, join, tag
from safe_ckpt.text import bytes_text

_MOST_BARS = 90
_FEWEST_SLOTS = 30
_HEIGHT = 150
_ABOVE, _BELOW = 12, 6  # pixels above the plot and below it
_SHOWN: dict[str, Callable[[float | None], str]] = {
    "seconds": text.duration,
    "bytes": bytes_text,
    "gbps": text.rate,
}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A save: its value, or none; ``label`` says which; ``failed`` and ``resumed`` (a run begins with it) get marks."""

    label: str
    value: float | None
    failed: int = 0
    resumed: bool = False


def chart(
    title: str, note: str, values: Sequence[Bar], quantity: str, worst: Literal["longest", "slowest", "largest"]
) -> Html:
    """A figure with a caption that says in words what is to be seen.

    Args:
        title: what is drawn; the unit is added.
        note: one sentence below the title.
        values: one per save, oldest first.
        quantity: "seconds", "bytes" or "gbps".
        worst: which of several saves a bar stands for where there are too many.
    """
    bars, each = _binned(values, worst)
    known = [bar.value for bar in bars if bar.value is not None]
    if not known:
        return join()
    axis = scale.fit(known, quantity)
    say = _SHOWN[quantity]
    cut = [bar for bar in bars if bar.value is not None and bar.value > axis.top]
    remarks = [note]
    if each > 1:
        remarks.append(f"A bar stands for {each} saves and shows the {worst} of them.")
    if cut:
        remarks.append(f"Cut off at the top, marked with a triangle: {_listed(cut, say)}.")
    alternative = (
        f"{title}, {axis.unit}. {len(bars)} bars from {say(min(known))} to {say(max(known))}. {' '.join(remarks)}"
    )
    plot = tag(
        "div",
        _labels(axis),
        tag("svg", *_grid(axis), *_marks(bars, axis, say), class_="plot", height=_HEIGHT, width="100%"),
        class_="chart",
        role="img",
        aria_label=alternative,
    )
    caption = tag(
        "figcaption", tag("h3", title, " ", tag("span", axis.unit, class_="unit")), tag("p", " ".join(remarks))
    )
    return tag("figure", caption, plot, _ends(values))


def _binned(values: Sequence[Bar], worst: str) -> tuple[list[Bar], int]:
    each = max(1, -(-len(values) // _MOST_BARS))
    choose = min if worst == "slowest" else max
    bars = []
    for start in range(0, len(values), each):
        group = values[start : start + each]
        known = [bar for bar in group if bar.value is not None]
        standing = choose(known, key=lambda bar: bar.value or 0.0) if known else group[0]
        failed, resumed = sum(bar.failed for bar in group), any(bar.resumed for bar in group)
        bars.append(Bar(label=standing.label, value=standing.value, failed=failed, resumed=resumed))
    return bars, each


def _listed(cut: Sequence[Bar], say: Callable[[float | None], str]) -> str:
    shown = ", ".join(f"{bar.label} with {say(bar.value)}" for bar in cut[:3])
    return shown if len(cut) <= 3 else f"{shown} and {len(cut) - 3} more"


def _y(axis: scale.Scale, value: float) -> float:
    return _HEIGHT - _BELOW - axis.share(value) * (_HEIGHT - _BELOW - _ABOVE)


def _labels(axis: scale.Scale) -> Html:
    texts = [tag("text", label, x=54, y=_y(axis, value) + 4, text_anchor="end") for value, label in axis.ticks]
    return tag("svg", *texts, class_="axis", width=62, height=_HEIGHT)


def _grid(axis: scale.Scale) -> list[Html]:
    return [
        tag("line", x1="0", x2="100%", y1=_y(axis, value), y2=_y(axis, value), class_="zero" if value == 0 else "grid")
        for value, _ in axis.ticks
    ]


def _marks(bars: Sequence[Bar], axis: scale.Scale, say: Callable[[float | None], str]) -> list[Html]:
    slots = max(len(bars), _FEWEST_SLOTS)
    columns, crosses = [], []
    for number, bar in enumerate(bars):
        left, middle = f"{100 * number / slots:.4g}%", f"{100 * (number + 0.5) / slots:.4g}%"
        if bar.resumed:
            columns.append(tag("line", x1=left, x2=left, y1=0, y2=_HEIGHT - _BELOW, class_="resumed"))
        if bar.value is not None:
            height = max(1.0, _HEIGHT - _BELOW - _y(axis, bar.value))
            x, width = f"{100 * (number + 0.09) / slots:.4g}%", f"{82 / slots:.4g}%"
            told = tag("title", f"{bar.label}: {say(bar.value)}")
            columns.append(tag("rect", told, x=x, y=_HEIGHT - _BELOW - height, width=width, height=height))
            if bar.value > axis.top:
                columns.append(shape(middle, _ABOVE - 6, "M-4 4L0 -4L4 4Z", "cut"))
        if bar.failed:
            what = f"{bar.label}: failed" if bar.failed == 1 else f"around {bar.label}: {bar.failed} failed"
            crosses.append((middle, what))
    return [*columns, *failures(crosses, _HEIGHT - _BELOW - 7)]


CROSS = "M-3.5 -3.5L3.5 3.5M-3.5 3.5L3.5 -3.5"


def failures(places: Sequence[tuple[str, str]], y: float) -> list[Html]:
    """A cross at each place, with its text. What sets them off from what is below comes first: none hides its neighbour."""
    halos = [shape(x, y, CROSS, "halo") for x, _ in places]
    return [*halos, *(shape(x, y, CROSS, "failed", told) for x, told in places)]


def shape(x: str, y: float, path: str, class_: str, told: str = "") -> Html:
    """A mark of fixed size at a place that moves with the width."""
    title = [tag("title", told)] if told else []
    return tag("svg", tag("path", *title, d=path), x=x, y=y, class_=f"mark {class_}", overflow="visible")


def _ends(values: Sequence[Bar]) -> Html:
    first, last = values[0].label, values[-1].label
    full = len(values) >= _FEWEST_SLOTS
    return tag(
        "div", tag("span", first), tag("span", last if full else f"to {last}"), class_="ends" if full else "ends few"
    )
