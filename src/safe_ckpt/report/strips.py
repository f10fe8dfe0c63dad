"""The timeline: one strip per run, all on one scale of elapsed time, with a mark for everything that happened. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import tzinfo

from safe_ckpt.report.charts import CROSS, failures, shape
from safe_ckpt.report.history import UNCOMMITTED, History, Notice, Run, Save
from safe_ckpt.report.html import Html, join, tag
from safe_ckpt.text import clock, counted, duration, unbroken

_MOST_RUNS = 12
_MOST_MARKS = 200  # per strip, of what did not go well
_HEIGHT, _MIDDLE, _ABOVE = 36, 22, 6
_PLACES = 1000  # along a strip
_TRIANGLE, _DIAMOND, _SQUARE = "M-4 -5L5 0L-4 5Z", "M0 -5L5 0L0 5L-5 0Z", "M-4 -4H4V4H-4Z"
_SHAPES = {"resumed": (_TRIANGLE, "resume"), "stoprequested": (_SQUARE, "notice")}
_OTHER = (_DIAMOND, "notice")


def timeline(history: History, zone: tzinfo | None) -> Html:
    """The last runs, newest last."""
    runs = history.runs[-_MOST_RUNS:]
    longest_s = max((run.seconds for run in runs), default=0.0) or 1.0
    saves = {run.number: [save for save in history.saves if save.run == run.number] for run in runs}
    notices = {run.number: [notice for notice in history.notices if notice.run == run.number] for run in runs}
    rows = [_row(run, saves[run.number], notices[run.number], longest_s, zone) for run in runs]
    hidden = len(history.runs) - len(runs)
    before = [tag("p", f"{counted(hidden, 'earlier run')} not drawn; the figures above count them.")] if hidden else []
    axis = tag("div", tag("span", "start of the run"), tag("span", f"{duration(longest_s)} later"), class_="ends")
    return join(*before, tag("ol", *rows, class_="runs"), axis, _legend())


def _row(run: Run, saves: Sequence[Save], notices: Sequence[Notice], longest_s: float, zone: tzinfo | None) -> Html:
    committed = [save for save in saves if save.outcome == "committed"]
    bad = [save for save in saves if save.outcome in UNCOMMITTED]
    unknown = sum(save.outcome == "outcome unknown" for save in bad)
    outcomes = [counted(len(committed), "save")]
    outcomes += [f"{len(bad) - unknown} not committed"] if len(bad) > unknown else []
    outcomes += [f"{unknown} with an unknown outcome"] if unknown else []
    outcome = ", ".join(outcomes)
    facts = [clock(run.begun, zone)[:16], duration(run.seconds), outcome]
    if run.world_size:
        facts.append(counted(run.world_size, "rank"))
    if run.host:
        facts.append(f"host {run.host}")
    heading = tag("p", tag("strong", f"Run {run.number}"), " ", tag("span", " · ".join(map(unbroken, facts))))
    strip = tag(
        "svg",
        tag("rect", width="100%", height=12, y=_MIDDLE - 6, rx=3, class_="track"),
        _ticks(run, committed),
        *failures([(_x(run, save.ended), f"{save.name}: {save.outcome}") for save in bad[-_MOST_MARKS:]], _MIDDLE),
        *(_mark(run, notice) for notice in notices[-_MOST_MARKS:]),
        width=f"{max(2.0, 100 * run.seconds / longest_s):.4g}%",
        height=_HEIGHT,
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
    return tag("svg", drawn, y=_MIDDLE - 10, width="100%", height=20, viewBox="0 0 1000 20", preserveAspectRatio="none")


def _x(run: Run, at: float) -> str:
    return f"{100 * _place(run, at):.4g}%"


def _mark(run: Run, notice: Notice) -> Html:
    path, class_ = _SHAPES.get(notice.kind, _OTHER)
    # A run begins with its resume: what else happened then would lie below that mark.
    y = _MIDDLE if notice.kind == "resumed" else _ABOVE
    return shape(_x(run, notice.at), y, path, class_, f"{notice.kind}: {notice.text}")


def _marks_in_words(notices: Sequence[Notice]) -> str:
    kinds: dict[str, int] = {}
    for notice in notices:
        kinds[notice.kind] = kinds.get(notice.kind, 0) + 1
    return ", ".join(f"{kind} {counted(count, 'time')}" for kind, count in kinds.items())


def _legend() -> Html:
    entries = (
        ("M0 -8V8", "ticks", "committed"),
        (CROSS, "failed", "failed, interrupted or unknown"),
        (_TRIANGLE, "resume", "resumed"),
        (_DIAMOND, "notice", "quarantine, new writer"),
        (_SQUARE, "notice", "asked to stop"),
    )
    items = []
    for path, class_, text in entries:
        inside = tag("path", d=path, class_="ticks") if class_ == "ticks" else tag("path", d=path)
        mark = tag("svg", inside, x="8", y=8, class_=f"mark {class_}", overflow="visible")
        items.append(tag("li", tag("svg", mark, width=16, height=16, aria_hidden="true"), text))
    return tag("ul", *items, class_="legend")
