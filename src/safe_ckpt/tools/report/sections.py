"""The sections of the page, from the timeline to the list of all saves. Pure; an empty one where there is nothing to say."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import tzinfo

from safe_ckpt import text
from safe_ckpt.text import bytes_text
from safe_ckpt.tools.inspection.listing import Row
from safe_ckpt.tools.report import charts
from safe_ckpt.tools.report.charts import Bar
from safe_ckpt.tools.report.history import UNCOMMITTED, History, Save
from safe_ckpt.tools.report.html import Html, join, table, tag
from safe_ckpt.tools.report.summary import Totals

_MOST_FAILURES = 30
_MOST_NOTICES = 60
_MOST_SAVES = 200
_MOST_EXISTING = 100
_KINDS = {"respawned": "new writer", "stoprequested": "asked to stop"}
_NUMBER = re.compile(r"\d+")
_MARKS = "A cross is a save that failed, a dotted line the beginning of a new run."


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a page is about.

    Attributes:
        directory: as the user knows it.
        made_at: when the page is made, seconds since the epoch.
        existing: the checkpoints that are there now.
        problem: what kept some from being listed; "" for nothing.
        zone: of the times on the page; None for that of this machine.
    """

    directory: str
    made_at: float
    existing: Sequence[Row] = ()
    problem: str = ""
    zone: tzinfo | None = None


def timeline(history: History, subject: Subject) -> Html:
    """The runs, with the times of their saves and events."""
    return _section("Timeline", charts.timeline(history, subject.zone)) if history.runs else join()


def stalls(history: History, figures: Totals) -> Html:
    """How long saves held training, and how much work was at risk between them."""
    note = f"How long the call to save held training. {_MARKS}"
    held = charts.chart("Stall per save", note, _series(history, "stall_s"), "seconds", "longest")
    note = "What a kill just before the commit would have cost, counted from the save before it."
    risk = charts.chart("Work at risk", note, _series(history, "at_risk_s"), "seconds", "longest")
    if not held and not risk:
        return join()
    spanned = f"{text.duration(figures.stall_s)} of {text.duration(figures.spanned_s)}"
    lost = f"Between the first save of a run and its last, saves held training for {spanned}."
    return _section("Stalls", tag("p", lost), held, risk)


def throughput(history: History) -> Html:
    """How fast bytes came to the disk."""
    note = "Bytes written by the time until they are durable; 1 GB is 10⁹ bytes."
    speed = charts.chart("Throughput of rank 0", note, _series(history, "gbps"), "gbps", "slowest")
    note = "From the call to save to the commit."
    until = charts.chart("Until durable", note, _series(history, "total_s", committed=True), "seconds", "longest")
    return _section("Throughput", speed, until) if speed or until else join()


def failures(history: History, subject: Subject) -> Html:
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
        rows.append((text.clock(last.ended, subject.zone), saves, count, last.phase, _why(last)))
    some = _some([save for group in shown for save in group], failed, "failure")
    joined = " Failures in a row that differ in numbers only are one entry." if len(alike) < len(failed) else ""
    intro = f"{some}. A failed save leaves earlier checkpoints as they are.{joined}"
    return _listed("Failures", intro, ("when", "save", "saves", "phase", "what happened"), rows)


def retention(history: History, figures: Totals) -> Html:
    """The checkpoints that retention deleted, and how much the disk held."""
    note = "The new checkpoint and those kept until then, as far as the events tell."
    values = _series(history, "kept_bytes", committed=True)
    held = charts.chart("On the disk at each commit", note, values, "bytes", "largest")
    removed = f"{text.counted(figures.removed, 'checkpoint')} removed, {bytes_text(figures.freed_bytes)} freed."
    return _section("Retention", tag("p", removed), held)


def existing(subject: Subject) -> Html:
    """The checkpoints that are there now."""
    rows = []
    for row in subject.existing[:_MOST_EXISTING]:
        step = "" if row.step is None else str(row.step)
        created = f"{row.created_at[:19].replace('T', ' ')} UTC" if row.created_at else ""
        metrics = ", ".join(f"{key} {_short(value)}" for key, value in row.metrics.items())
        state = f"{row.state}: {row.reason}" if row.reason else row.state
        rows.append(
            [text.clean(cell) for cell in (row.name, step, created, bytes_text(row.size_bytes), metrics, state)]
        )
    problem = f"Not all could be listed: {text.clean(subject.problem)}"
    parts = [tag("p", problem, class_="bad-text")] if subject.problem else []
    if rows:
        parts.append(tag("p", "From their manifests; their bytes were not read. To check them: safe-ckpt verify."))
        columns = ("name", "step", "created", "size", "metrics", "state")
        parts.append(table("Checkpoints that are there now", columns, rows))
    else:
        parts.append(tag("p", "No checkpoint."))
    return _section("There now", *parts)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def notices(history: History, subject: Subject) -> Html:
    """Resumes, quarantines, new writer processes, signals."""
    shown = history.notices[: -_MOST_NOTICES - 1 : -1]
    rows = []
    for notice in shown:
        what, step = _KINDS.get(notice.kind, notice.kind), "" if notice.step is None else str(notice.step)
        rows.append((text.clock(notice.at, subject.zone), what, step, text.duration(notice.seconds), notice.text))
    intro = f"{_some(shown, history.notices, 'event')}."
    return _listed("Resumes and mishaps", intro, ("when", "what", "step", "took", "more"), rows)


def all_saves(history: History, subject: Subject) -> Html:
    """A table of all saves, with the figures of the charts."""
    if not history.saves:
        return join()
    shown = history.saves[: -_MOST_SAVES - 1 : -1]
    rows = []
    for save in shown:
        times = (text.duration(save.stall_s), text.duration(save.total_s))
        figures = (*times, text.rate(save.gbps), bytes_text(save.size_bytes))
        rows.append((text.clock(save.ended, subject.zone), _label(save), save.outcome, *figures))
    columns = ("when", "save", "outcome", "stall", "until durable", "throughput", "size")
    summary = tag("summary", _some(shown, history.saves, "save"))
    return _section("Saves in figures", tag("details", summary, table("Saves", columns, rows)))


def _listed(title: str, intro: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    return _section(title, *([tag("p", intro), table(title, columns, rows)] if rows else [tag("p", "None.")]))


def _section(title: str, *children: str) -> Html:
    return tag("section", tag("h2", title), *children)


def _label(save: Save) -> str:
    return f"step {save.step}" if save.step is not None and not save.weights_only else save.name or "a save"


def _why(save: Save) -> str:
    unknown = "outcome unknown: " if save.outcome == "outcome unknown" else ""
    return f"{unknown}{save.error or 'its run ended before the save did'}"


def _cause(save: Save) -> tuple[object, ...]:
    failed = save.outcome in UNCOMMITTED
    return (save.run, save.outcome, save.phase, _NUMBER.sub("#", save.error)) if failed else ()


def _series(history: History, value: str, *, committed: bool = False) -> list[Bar]:
    """A bar for each save; with ``committed`` those that failed have no value."""
    bars, run = [], history.saves[0].run if history.saves else 0
    for save in history.saves:
        known = None if committed and save.outcome in UNCOMMITTED else getattr(save, value)
        failed = int(save.outcome in ("failed", "interrupted"))
        bars.append(Bar(label=_label(save), value=known, failed=failed, resumed=save.run != run))
        run = save.run
    return bars


def _some(shown: Sequence[object], of: Sequence[object], noun: str) -> str:
    last = f"The last {len(shown)} of " if len(shown) < len(of) else ""
    return f"{last}{text.counted(len(of), noun)}, newest first"
