"""One self-contained page: no script, nothing from elsewhere, and a policy in it that forbids both. Pure.

``page.html`` has its words and elements, ``drawings.html`` its charts, tables and timeline; what they show is worked out here.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from importlib import resources
from typing import Any, Literal

import jinja2

from safe_ckpt import text
from safe_ckpt.ledger import words
from safe_ckpt.ledger.account import Account, account
from safe_ckpt.ledger.history import UNCOMMITTED, History, RunHistory, SaveHistory
from safe_ckpt.text import bytes_text, counted, duration, rate
from safe_ckpt.tools.inspection.listing import Row
from safe_ckpt.tools.report import restart, summary
from safe_ckpt.tools.report.restart import Restart

CSS = resources.files("safe_ckpt.tools.report").joinpath("page.css").read_text(encoding="utf-8")
_MOST_FAILURES, _MOST_NOTICES, _MOST_SAVES, _MOST_EXISTING = 30, 60, 200, 100
_BAD_STATES = ("unhealthy", "damaged", "quarantined", "unreadable")
_KINDS = {"respawned": "new writer", "stoprequested": "asked to stop"}
_NUMBER = re.compile(r"\d+")
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
_MOST_RUNS = 12
_MOST_MARKS = 200  # per strip, of what did not go well
_PLACES = 1000  # along a strip


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The subject of a page.

    Attributes:
        directory: as the user knows it.
        made_at: when the page is made, seconds since the epoch.
        existing: the checkpoints that are there now.
        problem: what kept some from being listed; "" for nothing.
        zone: of the times on the page; None for that of this machine.
        restart: what a restart would take; None where nobody looked.
    """

    directory: str
    made_at: float
    existing: Sequence[Row] = ()
    problem: str = ""
    zone: tzinfo | None = None
    restart: Restart | None = None


def _harmless(value: object) -> object:
    """Make a printed value fit for a page. It is escaped later. A macro's output, and the style sheet, are HTML already."""
    if hasattr(value, "__html__"):
        return value
    return f"{value:.6g}" if isinstance(value, float) else text.clean(str(value), 4000)


TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("safe_ckpt.tools.report", ""),
    autoescape=True,
    finalize=_harmless,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters.update(
    bytes=bytes_text,
    clock=text.clock,
    counted=counted,
    duration=duration,
    grouped=text.grouped,
    percent=text.percent,
    rate=rate,
    unbroken=text.unbroken,
)


def render(history: History, subject: Subject) -> str:
    """The whole page."""
    figures = summary.total(history)
    runs = history.runs[-_MOST_RUNS:]
    longest_s = max((run.seconds for run in runs), default=0.0) or 1.0
    made = datetime.fromtimestamp(subject.made_at, tz=subject.zone).astimezone(subject.zone)
    others = ((figures.unknown, "unknown"), (figures.interrupted, "cut short"), (figures.in_flight, "in flight"))
    unfinished = [f"{figures.failed} failed", *(f"{count} {what}" for count, what in others if count)]
    told, there = account(history, subject.made_at), subject.restart
    uncommitted = figures.failed + figures.unknown + figures.interrupted
    versions = next((run.versions for run in reversed(history.runs) if run.versions), {})
    return TEMPLATES.get_template("page.html").render(
        history=history,
        subject=subject,
        figures=figures,
        css=CSS,
        digest=base64.b64encode(hashlib.sha256(CSS.encode()).digest()).decode(),
        zone=made.strftime("UTC%z"),
        headline=restart.sentence(there, subject.made_at) if there is not None else summary.verdict(figures),
        passed_over=there.passed_over if there is not None else (),
        is_well=not uncommitted and (there.well if there is not None else figures.committed > 0),
        sentences=[
            *([summary.verdict(figures)] if there is not None else []),
            *summary.sentences(figures, subject.made_at),
        ],
        ledger=words.summed_up(told),
        **_losses(told, subject),
        unfinished=", ".join(unfinished),
        strips=[_strip(run, history, longest_s, subject.zone, told) for run in runs],
        hidden_runs=len(history.runs) - len(runs),
        longest_s=longest_s,
        versions=", ".join(f"{name} {number}" for name, number in versions.items()),
        series={value: _series(history, value) for value in ("stall_s", "at_risk_s", "gbps")},
        committed={value: _series(history, value, committed=True) for value in ("total_s", "kept_bytes")},
        **_failures(history, subject),
        **_notices(history, subject),
        **_saves(history, subject),
        existing=_existing(subject),
    )


def _listing(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """A table; a column without any content is left out."""
    used = [number for number in range(len(columns)) if any(row[number] for row in rows)]
    return {"columns": [columns[number] for number in used], "rows": [[row[number] for number in used] for row in rows]}


def _failures(history: History, subject: Subject) -> dict[str, Any]:
    """Every failure with its text; the last ones where there are many."""
    failed = [save for save in history.saves if save.outcome in UNCOMMITTED]
    alike = [list(group) for cause, group in itertools.groupby(history.saves, key=_cause) if cause]
    shown = alike[: -_MOST_FAILURES - 1 : -1]
    rows = []
    for group in shown:
        last = group[-1]
        several = len(group) > 1
        saves = f"{_label(group[0])} to {_label(last)}" if several else _label(last)
        count = str(len(group)) if several else ""
        unknown = "outcome unknown: " if last.outcome == "outcome unknown" else ""
        why = f"{unknown}{summary.why(last)}"
        rows.append((text.clock(last.ended, subject.zone), saves, count, last.phase, why))
    some = _some([save for group in shown for save in group], failed, "failure")
    joined = " Failures in a row that differ in numbers only are one entry." if len(alike) < len(failed) else ""
    intro = f"{some}. A failed save leaves earlier checkpoints as they are.{joined}"
    listing = _listing(("when", "save", "saves", "phase", "what happened"), rows)
    return {"failures": listing, "failures_intro": intro}


def _existing(subject: Subject) -> dict[str, Any]:
    """The checkpoints that are there now."""
    rows = []
    for row in subject.existing[:_MOST_EXISTING]:
        step = "" if row.step is None else str(row.step)
        created = _moment(row.created_at, subject.zone)
        shown = {key: f"{one:.4g}" if isinstance(one, int | float) else str(one) for key, one in row.metrics.items()}
        metrics = ", ".join(f"{key} {one}" for key, one in shown.items())
        state = f"{row.state}: {row.reason}" if row.reason else row.state
        rows.append(
            [text.clean(cell) for cell in (row.name, step, created, bytes_text(row.size_bytes), metrics, state)]
        )
    bad = [number for number, row in enumerate(subject.existing[:_MOST_EXISTING]) if row.state in _BAD_STATES]
    return {**_listing(("name", "step", "created", "size", "metrics", "state"), rows), "bad": bad}


def _moment(written: str | None, zone: tzinfo | None) -> str:
    """A manifest's moment in the zone of the page; as it stands there where it is none."""
    try:
        return text.clock(datetime.fromisoformat(written or "").timestamp(), zone)
    except (ValueError, OverflowError):
        return written or ""


def _losses(told: Account, subject: Subject) -> dict[str, Any]:
    """The costs of the ends of runs."""
    shown = told.losses[: -_MOST_FAILURES - 1 : -1]
    rows = [(text.clock(one.at.least, subject.zone), *words.cells(one)) for one in shown]
    columns = ("when", "run", "how", "training lost", "steps lost", "after the last commit", "resumed after")
    return {"losses": _listing(columns, rows), "losses_intro": f"{_some(shown, told.losses, 'interruption')}."}


def _notices(history: History, subject: Subject) -> dict[str, Any]:
    """Resumes, quarantines, new writer processes, signals."""
    shown = history.notices[: -_MOST_NOTICES - 1 : -1]
    rows = []
    for notice in shown:
        what, step = _KINDS.get(notice.kind, notice.kind), "" if notice.step is None else str(notice.step)
        rows.append((text.clock(notice.at, subject.zone), what, step, duration(notice.seconds), notice.text))
    listing = _listing(("when", "what", "step", "took", "more"), rows)
    return {"notices": listing, "notices_intro": f"{_some(shown, history.notices, 'event')}."}


def _saves(history: History, subject: Subject) -> dict[str, Any]:
    """All saves, with the figures of the charts."""
    shown = history.saves[: -_MOST_SAVES - 1 : -1]
    rows = [(text.clock(s.ended, subject.zone), _label(s), s.outcome, *summary.figures_of(s)) for s in shown]
    listing = _listing(("when", "save", "outcome", "stall", "until durable", "throughput", "size"), rows)
    return {"saves": listing, "saves_intro": _some(shown, history.saves, "save")}


def _label(save: SaveHistory) -> str:
    return f"step {save.step}" if save.step is not None and not save.weights_only else save.name or "a save"


def _cause(save: SaveHistory) -> tuple[object, ...]:
    failed = save.outcome in UNCOMMITTED
    return (save.run, save.outcome, save.phase, _NUMBER.sub("#", save.error)) if failed else ()


def _some(shown: Sequence[object], of: Sequence[object], noun: str) -> str:
    last = f"The last {len(shown)} of " if len(shown) < len(of) else ""
    return f"{last}{counted(len(of), noun)}, newest first"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A scale from zero to ``top`` (in the unit of the values), with ticks as (value, label)."""

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


def plot(
    title: str, note: str, values: Sequence[Bar], quantity: str, worst: Literal["longest", "slowest", "largest"]
) -> dict[str, Any] | None:
    """A figure of bars with a caption that describes it in words; None without any value.

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
        return None
    axis, say, slots = fit(known, quantity), _SHOWN[quantity], max(len(bars), _FEWEST_SLOTS)
    cut = [f"{bar.label} with {say(bar.value)}" for bar in bars if bar.value is not None and bar.value > axis.top]
    remarks = [note]
    if each > 1:
        remarks.append(f"A bar stands for {each} saves and shows the {worst} of them.")
    if cut:
        remarks.append(f"Cut off at the top, marked with a triangle: {text.listed(cut, most=3)}.")
    failures = [
        (
            f"{100 * (number + 0.5) / slots:.4g}%",
            f"{bar.label}: failed" if bar.failed == 1 else f"around {bar.label}: {bar.failed} failed",
        )
        for number, bar in enumerate(bars)
        if bar.failed
    ]
    return {
        "title": title,
        "axis": axis,
        "bars": bars,
        "say": say,
        "slots": slots,
        "range": f"{len(bars)} bars from {say(min(known))} to {say(max(known))}",
        "said": " ".join(remarks),
        "failures": failures,
        "first": values[0].label,
        "last": values[-1].label,
        "few": len(values) < _FEWEST_SLOTS,
    }


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


def _series(history: History, value: str, *, committed: bool = False) -> list[Bar]:
    """A bar for each save; with ``committed`` those that failed have no value."""
    bars, run = [], history.saves[0].run if history.saves else 0
    for save in history.saves:
        known = None if committed and save.outcome in UNCOMMITTED else getattr(save, value)
        failed = int(save.outcome in ("failed", "interrupted"))
        bars.append(Bar(label=_label(save), value=known, failed=failed, resumed=save.run != run))
        run = save.run
    return bars


def _strip(run: RunHistory, history: History, longest_s: float, zone: tzinfo | None, told: Account) -> dict[str, Any]:
    """A run on the timeline, on one scale of elapsed time with the others, with a mark for every event."""
    saves = [save for save in history.saves if save.run == run.number]
    notices = [notice for notice in history.notices if notice.run == run.number]
    committed = [save for save in saves if save.outcome == "committed"]
    bad = [save for save in saves if save.outcome in UNCOMMITTED]
    unknown = sum(save.outcome == "outcome unknown" for save in bad)
    outcomes = [counted(len(committed), "save")]
    outcomes += [f"{len(bad) - unknown} not committed"] if len(bad) > unknown else []
    outcomes += [f"{unknown} with an unknown outcome"] if unknown else []
    facts = [text.clock(run.begun, zone)[:16], duration(run.seconds), ", ".join(outcomes)]
    if run.world_size:
        facts.append(counted(run.world_size, "rank"))
    if run.host:
        facts.append(f"host {run.host}")
    cost = [words.of_loss(loss).partition(" ")[2].partition(" ")[2] for loss in told.losses if loss.run == run.number]
    places = sorted({round(_place(run, save.ended) * _PLACES) for save in committed})
    kinds = Counter(notice.kind for notice in notices)
    return {
        "number": run.number,
        "facts": facts,
        "cost": cost[0] if cost else "",
        "width": f"{max(2.0, 100 * run.seconds / longest_s):.4g}%",
        "ticks": "".join(f"M{place} 0V20" for place in places),
        "failures": [(_x(run, save.ended), f"{save.name}: {save.outcome}") for save in bad[-_MOST_MARKS:]],
        "notices": [(_x(run, notice.at), notice) for notice in notices[-_MOST_MARKS:]],
        "marks": ", ".join(f"{kind} {counted(count, 'time')}" for kind, count in kinds.items()),
    }


def _place(run: RunHistory, at: float) -> float:
    return min(1.0, max(0.0, (at - run.begun) / run.seconds)) if run.seconds else 0.0


def _x(run: RunHistory, at: float) -> str:
    return f"{100 * _place(run, at):.4g}%"


TEMPLATES.globals.update(HEIGHT=_HEIGHT, GROUND=_HEIGHT - _BELOW, PLACES=_PLACES, plot=plot)
