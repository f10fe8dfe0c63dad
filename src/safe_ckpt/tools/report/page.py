"""One self-contained page: no script, nothing from elsewhere, and a policy in it that forbids both. Pure."""

from __future__ import annotations

import base64
import hashlib
from datetime import datetime
from importlib import resources

from safe_ckpt import text
from safe_ckpt.text import bytes_text
from safe_ckpt.tools.report import sections, summary
from safe_ckpt.tools.report.history import History
from safe_ckpt.tools.report.html import Html, tag
from safe_ckpt.tools.report.sections import Subject
from safe_ckpt.tools.report.summary import Totals

CSS = resources.files("safe_ckpt.tools.report").joinpath("page.css").read_text(encoding="utf-8")


def render(history: History, subject: Subject) -> str:
    """The whole page."""
    figures = summary.total(history)
    parts = [
        _header(figures, subject),
        _tiles(figures),
        sections.timeline(history, subject),
        sections.stalls(history, figures),
        sections.throughput(history),
        sections.failures(history, subject),
        sections.retention(history, figures),
        sections.existing(subject),
        sections.notices(history, subject),
        sections.all_saves(history, subject),
        _footer(history),
    ]
    body = tag("body", tag("main", *parts))
    return f"<!DOCTYPE html>\n{tag('html', _head(subject), body, lang='en')}\n"


def _head(subject: Subject) -> Html:
    digest = base64.b64encode(hashlib.sha256(CSS.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="referrer", content="no-referrer"),
        tag("title", f"Checkpoints of {subject.directory}"),
        tag("style", Html(CSS)),
    )


def _header(figures: Totals, subject: Subject) -> Html:
    made = text.clock(subject.made_at, subject.zone)
    zone = datetime.fromtimestamp(subject.made_at, tz=subject.zone).astimezone(subject.zone).strftime("UTC%z")
    good = figures.failed + figures.unknown == 0 and figures.committed > 0
    class_, path, label = ("bad", "M15 8V16.5M15 22V22.1", "not all is well")
    if good:
        class_, path, label = ("good", "M8 15.5L13 20.5L22.5 10", "all saves were committed")
    drawn = (tag("circle", cx=15, cy=15, r=15, class_=class_), tag("path", d=path, class_="sign"))
    sign = tag("svg", *drawn, viewBox="0 0 30 30", role="img", aria_label=label)
    return tag(
        "header",
        tag("p", "Checkpoints of ", tag("code", subject.directory), f", seen {made} ({zone})", class_="where"),
        tag("div", sign, tag("h1", summary.verdict(figures)), class_="verdict"),
        tag("p", " ".join(summary.sentences(figures, subject.made_at)), class_="lead"),
    )


def _tiles(figures: Totals) -> Html:
    others = ((figures.unknown, "unknown"), (figures.interrupted, "cut short"), (figures.in_flight, "in flight"))
    unfinished = [f"{figures.failed} failed", *(f"{count} {what}" for count, what in others if count)]
    share = f"{text.percent(figures.stall_share)} of the time" if figures.stall_share is not None else ""
    tiles = (
        ("Saves committed", text.grouped(figures.committed), ", ".join(unfinished)),
        ("Median stall", text.duration(figures.median_stall_s), _worst("longest", figures.longest_stall_s, share)),
        ("Durable after", text.duration(figures.median_total_s), _worst("median; longest", figures.longest_total_s)),
        ("Median throughput", text.rate(figures.median_gbps), f"of rank 0; slowest {text.rate(figures.slowest_gbps)}"),
        ("Most work at risk", text.duration(figures.at_risk_s), f"usually {text.duration(figures.median_at_risk_s)}"),
        ("Removed", text.grouped(figures.removed), f"by retention; {bytes_text(figures.freed_bytes)} freed"),
    )
    return tag("dl", *(_tile(*facts) for facts in tiles), class_="tiles")


def _tile(name: str, figure: str, more: str) -> Html:
    big = tag("dd", figure or "not recorded", class_="figure")
    small = tag("dd", text.unbroken(more) if figure else "", class_="more")
    return tag("div", tag("dt", name), big, small, class_="tile")


def _worst(word: str, seconds: float | None, beside: str = "") -> str:
    longest = f"{word} {text.duration(seconds)}" if seconds is not None else ""
    return ", ".join(filter(None, (longest, beside)))


def _footer(history: History) -> Html:
    read = [f"Read from events.jsonl: {text.counted(history.events, 'event')}."]
    if history.earlier:
        read.append("Older ones were not read and are not counted here.")
    if history.skipped:
        read.append(f"Skipped, since they are no events: {text.counted(history.skipped, 'line')}.")
    read.append("Only rank 0 records: stalls and throughput are its own. Times are those of its clock.")
    versions = next((run.versions for run in reversed(history.runs) if run.versions), {})
    made = ", ".join(f"{name} {number}" for name, number in versions.items())
    return tag("footer", tag("p", " ".join(read)), *([tag("p", f"Last run with {made}.")] if made else []))
