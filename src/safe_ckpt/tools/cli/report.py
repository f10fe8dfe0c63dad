"""``safe-ckpt report`` and ``safe-ckpt watch``: how the saves of a run went, as one page or live in a terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from safe_ckpt.ledger import event_log
from safe_ckpt.ledger.history import History, Notice, SaveHistory, build_history
from safe_ckpt.text import clean, clock, duration, rate
from safe_ckpt.tools.cli.output import DAMAGED, AsJson, console, failing, local_directory, print_json, say, tell
from safe_ckpt.tools.inspection.listing import list_existing
from safe_ckpt.tools.report import page, summary
from safe_ckpt.tools.report.follow import Follower
from safe_ckpt.tools.report.opening import Opening, Openings, opening_of
from safe_ckpt.tools.report.page import Subject

AnyDirectory = Annotated[Path, typer.Argument(parser=local_directory, metavar="DIR")]
"""A directory, also one that may not be read: the command itself says so."""
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="Where the page goes; - for stdout.", dir_okay=False)
]
_SHOWN_SAVES = 10
_SHOWN_NOTICES = 4
_SHOWN_LOSSES = 5
_LIVE_LOSSES = 1
_STYLES = {
    "committed": "green",
    "failed": "bold red",
    "outcome unknown": "bold yellow",
    "interrupted": "red",
    "in flight": "yellow",
}

Once = Annotated[bool, typer.Option("--once", help="Print the present state and end.")]
Every = Annotated[float, typer.Option("--every", min=0.1, max=3600.0, metavar="SECONDS", help="How often to look.")]
_NAMES, _FIGURES = ("when", "", "save"), ("stall", "durable after", "throughput", "size")


def report(directory: AnyDirectory, output: Output = Path("report.html"), as_json: AsJson = False) -> None:
    """Write one self-contained page about the saves in DIR: timeline, stalls, throughput, failures, retention.

    It shows the last 20000 events of events.jsonl; nothing else is needed to read it. --json prints the same
    facts and writes no page.
    """
    with _reading(directory):
        files = event_log.find_events(directory)
        recording = event_log.read_events(files) if files else None
    if recording is None:
        say(nothing_in(directory))
        raise typer.Exit(DAMAGED)
    history, now = build_history(recording), time.time()
    head = opening_of(directory, history, now)
    if as_json:
        print_json({**head.as_data(), **as_data(history)})
        return
    existing, problem = list_existing(directory)
    subject = Subject(directory=str(directory), made_at=now, existing=existing, problem=problem, restart=head.restart)
    text = page.render(history, subject)
    if str(output) == "-":
        sys.stdout.buffer.write(text.encode())  # the page says that it is UTF-8, whatever this terminal is
        sys.stdout.buffer.flush()
        return
    with failing(f"{output} could not be written: ", ". Give another place with --output"):
        _replace(output, text)
    for one in (*head.headline(now), *head.ledger(_SHOWN_LOSSES)):
        tell(one)
    tell(f"{output}: {summary.verdict(summary.total(history))}")


def _reading(directory: Path) -> contextlib.AbstractContextManager[None]:
    return failing(f"the events of {directory} could not be read: ", ". Run this as a user who may read there")


def nothing_in(directory: Path) -> str:
    """The message where no events were recorded: why, and what to do."""
    why = "no job has saved there yet, record_events was off, or it is not the directory that the job saves to"
    return f"{directory} has no {event_log.EVENTS}: {why}. What is there: safe-ckpt list {directory}"


def as_data(history: History) -> dict[str, Any]:
    """The history and its totals, JSON-able."""
    return {"totals": dataclasses.asdict(summary.total(history)), **dataclasses.asdict(history)}


def _replace(output: Path, text: str) -> None:
    # A reader sees the old page or the new one, never half of it.
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, output)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def watch(directory: AnyDirectory, once: Once = False, every_s: Every = 1.0, as_json: AsJson = False) -> None:
    """Follow the saves of the job that writes to DIR. Ctrl-C ends it; the job does not notice.

    First comes what a restart would take now, then how the saves go and what crashes and saves have cost.
    Where stdout is no terminal, one line is printed per save. --json prints the present state as JSON and ends.
    """
    follower, heads = Follower(directory), Openings(directory)
    with contextlib.suppress(KeyboardInterrupt), _reading(directory):
        if as_json:
            told = follower.look() or History()
            print_json({**opening_of(directory, told, time.time()).as_data(), **as_data(told)})
        elif once:
            history, now = follower.look(), time.time()
            for line in lines(history, heads.look(history, now), directory, now):
                tell(line)
        elif sys.stdout.isatty():
            with Live(console=console(), auto_refresh=False) as live:
                while True:
                    history, now = follower.look(), time.time()
                    live.update(view(history, heads.look(history, now), directory, now), refresh=True)
                    time.sleep(every_s)
        else:
            _stream(follower, heads, every_s)


def _stream(follower: Follower, heads: Openings, every_s: float) -> None:
    printed: list[str] | None = None
    while True:
        history, now = follower.look(), time.time()
        happened = happenings(history) if history is not None else []
        first = printed is None
        new = (
            lines(history, heads.look(history, now), follower.directory, now)
            if first
            else after(happened, printed or [])
        )
        for line in new:
            tell(line)
        sys.stdout.flush()
        printed = happened or printed or []
        time.sleep(every_s)


def view(history: History | None, head: Opening | None, directory: Path, now: float) -> RenderableType:
    """The view of the terminal at ``now``, seconds since the epoch."""
    if history is None or head is None:
        return Text(f"{clean(str(directory))}: nothing recorded yet, waiting. Ctrl-C ends this.")
    figures = summary.total(history)
    parts: list[RenderableType] = [
        Text(clean(str(directory)), style="dim"),
        *(Text(line, style="bold green" if head.well else "bold red") for line in head.headline(now)),
        Text(summary.verdict(figures), style="bold red" if figures.failed + figures.unknown else "bold green"),
        Text(" ".join(summary.sentences(figures, now))),
        Text(_in_short(figures), style="dim"),
        *map(Text, head.ledger(_LIVE_LOSSES)),
    ]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in (*_NAMES, *_FIGURES):
        justify: JustifyMethod = "right" if column in _FIGURES else "left"
        table.add_column(column, justify=justify, no_wrap=column != "save")  # on a narrow screen long names break
    for save in history.saves[: -_SHOWN_SAVES - 1 : -1]:
        outcome = Text(save.outcome, style=_STYLES[save.outcome])
        table.add_row(_time(save.ended), outcome, *map(Text, (save.name, *summary.figures_of(save))))
    bad = [save for save in history.saves[-_SHOWN_SAVES:] if save.outcome in ("failed", "outcome unknown")]
    failed = [Text(f"{_time(save.ended)}  {save.name}: {save.error}", style="red") for save in bad[-2:]]
    notices = [Text(line_of_notice(notice), style="yellow") for notice in history.notices[: -_SHOWN_NOTICES - 1 : -1]]
    for block in ([table] if history.saves else [], failed, notices):
        parts += [Text(), *block] if block else []
    return Group(*parts)


def lines(history: History | None, head: Opening | None, directory: Path, now: float) -> list[str]:
    """The same in plain lines."""
    if history is None or head is None:
        return [nothing_in(directory)]
    figures = summary.total(history)
    sentences = " ".join([summary.verdict(figures), *summary.sentences(figures, now)])
    first = [*head.headline(now), sentences, _in_short(figures), *head.ledger(_LIVE_LOSSES)]
    return [*first, *happenings(history)[-_SHOWN_SAVES:]]


def happenings(history: History) -> list[str]:
    """One line for everything that is over, oldest first."""
    over = [(save.ended, line_of(save)) for save in history.saves if save.outcome != "in flight"]
    over += [(notice.at, line_of_notice(notice)) for notice in history.notices]
    return [line for _, line in sorted(over)]


def after(happened: list[str], printed: list[str]) -> list[str]:
    """The lines of ``happened`` that come after the last one that was printed already."""
    if printed and printed[-1] in happened:
        newest = len(happened) - happened[::-1].index(printed[-1])
        return happened[newest:]
    return happened


def line_of(save: SaveHistory) -> str:
    """The line of one save."""
    if save.outcome != "committed":
        return f"{clock(save.ended)}  {save.outcome}  {save.name}: {summary.why(save)}"
    held, total, speed, size = summary.figures_of(save)
    facts = (f"size {size}", f"stall {held}", f"durable after {total}", speed)
    return f"{clock(save.ended)}  committed  {save.name}: {', '.join(fact for fact in facts if not fact.endswith(' '))}"


def line_of_notice(notice: Notice) -> str:
    """The line of one resume or mishap."""
    return f"{clock(notice.at)}  {notice.kind}  {notice.text}"


def _time(at: float) -> str:
    return clock(at)[11:]


def _in_short(figures: summary.Totals) -> str:
    facts = (
        ("stall per save", duration(figures.median_stall_s)),
        ("durable after", duration(figures.median_total_s)),
        ("throughput", rate(figures.median_gbps)),
        ("most work at risk", duration(figures.at_risk_s)),
    )
    return ", ".join(f"{name} {fact}" for name, fact in facts if fact)
