"""Charts drawn as SVG that stretches to any width while its text stays readable: bars per save, and the timeline. Pure.

A bar chart has one bar per save, on an axis from zero with ticks at round numbers. The timeline has one strip per run, all
on one scale of elapsed time, with a mark for every event.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import tzinfo
from typing import Literal

from safe_ckpt.text import bytes_text, clock, counted, duration, listed, rate, unbroken
from safe_ckpt.tools.report.history import UNCOMMITTED, History, Notice, Run, Save
from safe_ckpt.tools.report.html import Html, join, tag

_MOST_BARS = 90
_FEWEST_SLOTS = 30
_HEIGHT = 150
_ABOVE, _BELOW = 12, 6  # pixels above the plot and below it
_SHOWN: dict[str, Callable[[float | None], str]] = {"seconds": duration, "bytes": bytes_text, "gbps": rate}
_SECONDS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = tuple((1024.0**power, unit) for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB"), (0, "B")))
_RATES = ((1.0, "GB/s"), (1e-3, "MB/s"), (1e-6, "kB/s"))
UNITS = {"seconds": _SECONDS, "bytes": _BYTES, "gbps": _RATES}
_ROUND = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_FAR_ABOVE = 4.0
_CROSS = "M-3.5 -3.5L3.5 3.5M-3.5 3.5L3.5 -3.5"
_MOST_RUNS = 12
_MOST_MARKS = 200  # per strip, of what did not go well
_STRIP_HEIGHT, _STRIP_MIDDLE, _STRIP_TOP = 36, 22, 6
_PLACES = 1000  # along a strip
_TRIANGLE, _DIAMOND, _SQUARE = "M-4 -5L5 0L-4 5Z", "M0 -5L5 0L0 5L-5 0Z", "M-4 -4H4V4H-4Z"
_SHAPES = {"resumed": (_TRIANGLE, "resume"), "stoprequested": (_SQUARE, "notice")}
_OTHER = (_DIAMOND, "notice")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """From zero to ``top`` (in the unit of the values), with ticks as (value, label)."""

    top: float
    unit: str
    ticks: tuple[tuple[float, str], ...]

    def y(self, value: float) -> float:
        """The height of a value in pixels, counted from above; that of the top for all above it."""
        share = min(1.0, max(0.0, value / self.top))
        return _HEIGHT - _BELOW - share * (_HEIGHT - _BELOW - _ABOVE)


def fit(values: Sequence[float], quantity: str) -> Scale:
    """The scale of a chart of ``values``, which are "seconds", "bytes" or "gbps".

    It reaches the largest, unless a few stick out so far that the others would be nothing beside them: then it ends above
    the others. The chart names the bars that are cut off.
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
    """A figure with a caption that describes it in words.

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
    axis, say = fit(known, quantity), _SHOWN[quantity]
    cut = [f"{bar.label} with {say(bar.value)}" for bar in bars if bar.value is not None and bar.value > axis.top]
    remarks = [note]
    if each > 1:
        remarks.append(f"A bar stands for {each} saves and shows the {worst} of them.")
    if cut:
        remarks.append(f"Cut off at the top, marked with a triangle: {listed(cut, most=3)}.")
    said = " ".join(remarks)
    in_words = f"{title}, {axis.unit}. {len(bars)} bars from {say(min(known))} to {say(max(known))}. {said}"
    plot = tag("svg", *_grid(axis), *_marks(bars, axis, say), class_="plot", height=_HEIGHT, width="100%")
    drawn = tag("div", _labels(axis), plot, class_="chart", role="img", aria_label=in_words)
    heading = tag("h3", title, " ", tag("span", axis.unit, class_="unit"))
    return tag("figure", tag("figcaption", heading, tag("p", said)), drawn, _ends(values))


def _binned(values: Sequence[Bar], worst: str) -> tuple[list[Bar], int]:
    """At most ``_MOST_BARS`` bars, and how many saves each of them stands for."""
    each = max(1, math.ceil(len(values) / _MOST_BARS))
    choose = min if worst == "slowest" else max
    bars = []
    for start in range(0, len(values), each):
        group = values[start : start + each]
        known = [bar for bar in group if bar.value is not None]
        chosen = choose(known, key=lambda bar: bar.value or 0.0) if known else group[0]
        failed, resumed = sum(bar.failed for bar in group), any(bar.resumed for bar in group)
        bars.append(replace(chosen, failed=failed, resumed=resumed))
    return bars, each


def _labels(axis: Scale) -> Html:
    texts = [tag("text", label, x=54, y=axis.y(value) + 4, text_anchor="end") for value, label in axis.ticks]
    return tag("svg", *texts, class_="axis", width=62, height=_HEIGHT)


def _grid(axis: Scale) -> list[Html]:
    heights = [(axis.y(value), "grid" if value else "zero") for value, _ in axis.ticks]
    return [tag("line", x1="0", x2="100%", y1=y, y2=y, class_=class_) for y, class_ in heights]


def _marks(bars: Sequence[Bar], axis: Scale, say: Callable[[float | None], str]) -> list[Html]:
    slots = max(len(bars), _FEWEST_SLOTS)
    columns, crosses = [], []
    for number, bar in enumerate(bars):
        left, middle = f"{100 * number / slots:.4g}%", f"{100 * (number + 0.5) / slots:.4g}%"
        if bar.resumed:
            columns.append(tag("line", x1=left, x2=left, y1=0, y2=_HEIGHT - _BELOW, class_="resumed"))
        if bar.value is not None:
            height = max(1.0, _HEIGHT - _BELOW - axis.y(bar.value))
            x, width = f"{100 * (number + 0.09) / slots:.4g}%", f"{82 / slots:.4g}%"
            title = tag("title", f"{bar.label}: {say(bar.value)}")
            columns.append(tag("rect", title, x=x, y=_HEIGHT - _BELOW - height, width=width, height=height))
            if bar.value > axis.top:
                columns.append(_shape(middle, _ABOVE - 6, "M-4 4L0 -4L4 4Z", "cut"))
        if bar.failed:
            what = f"{bar.label}: failed" if bar.failed == 1 else f"around {bar.label}: {bar.failed} failed"
            crosses.append((middle, what))
    return [*columns, *_failures(crosses, _HEIGHT - _BELOW - 7)]


def _failures(places: Sequence[tuple[str, str]], y: float) -> list[Html]:
    """A cross at each place, with its text. What sets them off from what is below comes first: none hides its neighbour."""
    halos = [_shape(x, y, _CROSS, "halo") for x, _ in places]
    return [*halos, *(_shape(x, y, _CROSS, "failed", title) for x, title in places)]


def _shape(x: str, y: float, path: str, class_: str, title: str = "") -> Html:
    """A mark of fixed size at a place that moves with the width."""
    titles = [tag("title", title)] if title else []
    return tag("svg", tag("path", *titles, d=path), x=x, y=y, class_=f"mark {class_}", overflow="visible")


def _ends(values: Sequence[Bar]) -> Html:
    first, last = values[0].label, values[-1].label
    if len(values) >= _FEWEST_SLOTS:
        return tag("div", tag("span", first), tag("span", last), class_="ends")
    return tag("div", tag("span", first), tag("span", f"to {last}"), class_="ends few")


def timeline(history: History, zone: tzinfo | None) -> Html:
    """The last runs, newest last."""
    runs = history.runs[-_MOST_RUNS:]
    longest_s = max((run.seconds for run in runs), default=0.0) or 1.0
    rows = [_row(run, history, longest_s, zone) for run in runs]
    hidden = len(history.runs) - len(runs)
    before = [tag("p", f"{counted(hidden, 'earlier run')} not drawn; the figures above count them.")] if hidden else []
    axis = tag("div", tag("span", "start of the run"), tag("span", f"{duration(longest_s)} later"), class_="ends")
    return join(*before, tag("ol", *rows, class_="runs"), axis, _legend())


def _row(run: Run, history: History, longest_s: float, zone: tzinfo | None) -> Html:
    saves = [save for save in history.saves if save.run == run.number]
    notices = [notice for notice in history.notices if notice.run == run.number]
    committed = [save for save in saves if save.outcome == "committed"]
    bad = [save for save in saves if save.outcome in UNCOMMITTED]
    unknown = sum(save.outcome == "outcome unknown" for save in bad)
    outcomes = [counted(len(committed), "save")]
    outcomes += [f"{len(bad) - unknown} not committed"] if len(bad) > unknown else []
    outcomes += [f"{unknown} with an unknown outcome"] if unknown else []
    facts = [clock(run.begun, zone)[:16], duration(run.seconds), ", ".join(outcomes)]
    if run.world_size:
        facts.append(counted(run.world_size, "rank"))
    if run.host:
        facts.append(f"host {run.host}")
    heading = tag("p", tag("strong", f"Run {run.number}"), " ", tag("span", " · ".join(map(unbroken, facts))))
    failures = [(_x(run, save.ended), f"{save.name}: {save.outcome}") for save in bad[-_MOST_MARKS:]]
    strip = tag(
        "svg",
        tag("rect", width="100%", height=12, y=_STRIP_MIDDLE - 6, rx=3, class_="track"),
        _ticks(run, committed),
        *_failures(failures, _STRIP_MIDDLE),
        *(_mark(run, notice) for notice in notices[-_MOST_MARKS:]),
        width=f"{max(2.0, 100 * run.seconds / longest_s):.4g}%",
        height=_STRIP_HEIGHT,
        role="img",
        aria_label=f"Run {run.number}: {'; '.join(facts)}. {_marks_in_words(notices)}",
    )
    return tag("li", heading, strip)


def _place(run: Run, at: float) -> float:
    return min(1.0, max(0.0, (at - run.begun) / run.seconds)) if run.seconds else 0.0


def _ticks(run: Run, committed: Sequence[Save]) -> Html:
    places = sorted({round(_place(run, save.ended) * _PLACES) for save in committed})
    path = "".join(f"M{place} 0V20" for place in places)
    # Stretched to the strip; the lines keep their width.
    drawn = tag("path", d=path, class_="ticks", vector_effect="non-scaling-stroke")
    box = {"viewBox": f"0 0 {_PLACES} 20", "preserveAspectRatio": "none"}
    return tag("svg", drawn, y=_STRIP_MIDDLE - 10, width="100%", height=20, **box)


def _x(run: Run, at: float) -> str:
    return f"{100 * _place(run, at):.4g}%"


def _mark(run: Run, notice: Notice) -> Html:
    path, class_ = _SHAPES.get(notice.kind, _OTHER)
    # A run begins with its resume: what else happened then would lie below that mark.
    y = _STRIP_MIDDLE if notice.kind == "resumed" else _STRIP_TOP
    return _shape(_x(run, notice.at), y, path, class_, f"{notice.kind}: {notice.text}")


def _marks_in_words(notices: Sequence[Notice]) -> str:
    kinds = Counter(notice.kind for notice in notices)
    return ", ".join(f"{kind} {counted(count, 'time')}" for kind, count in kinds.items())


def _legend() -> Html:
    entries = (
        ("M0 -8V8", "ticks", "committed"),
        (_CROSS, "failed", "failed, interrupted or unknown"),
        (_TRIANGLE, "resume", "resumed"),
        (_DIAMOND, "notice", "quarantine, new writer, bad numbers"),
        (_SQUARE, "notice", "asked to stop"),
    )
    items = []
    for path, class_, text in entries:
        mark = _shape("8", 8, path, class_)
        items.append(tag("li", tag("svg", mark, width=16, height=16, aria_hidden="true"), text))
    return tag("ul", *items, class_="legend")
