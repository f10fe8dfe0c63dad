"""``safe-ckpt watch``: the saves of a running job, live in a terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from safe_ckpt import text
from safe_ckpt.cli.output import DAMAGED, AsJson, console, print_json, say, tell
from safe_ckpt.cli.report import AnyDirectory, as_data, nothing_in, unreadable
from safe_ckpt.report import summary
from safe_ckpt.report.follow import Follower
from safe_ckpt.report.history import History, Notice, Save
from safe_ckpt.text import bytes_text

_SHOWN_SAVES = 10
_SHOWN_NOTICES = 4
_STYLES = {
    "committed": "green",
    "failed": "bold red",
    "outcome unknown": "bold yellow",
    "interrupted": "red",
    "in flight": "yellow",
}

Once = Annotated[bool, typer.Option("--once", help="Print the present state and end.")]
Every = Annotated[float, typer.Option("--every", min=0.1, max=3600.0, metavar="SECONDS", help="How often to look.")]


def watch(directory: AnyDirectory, once: Once = False, every_s: Every = 1.0, as_json: AsJson = False) -> None:
    """Follow the saves of the job that writes to DIR. Ctrl-C ends it; the job does not notice.

    Where stdout is no terminal, one line is printed per save. --json prints the present state as JSON and ends.
    """
    follower = Follower(directory)
    try:
        if as_json:
            print_json(as_data(follower.look() or History()))
        elif once:
            for line in lines(follower.look(), directory, time.time()):
                tell(line)
        elif sys.stdout.isatty():
            _live(follower, every_s)
        else:
            _stream(follower, every_s)
    except KeyboardInterrupt:
        return
    except OSError as error:
        say(unreadable(directory, error))
        raise typer.Exit(DAMAGED) from None


def _live(follower: Follower, every_s: float) -> None:
    screen = console()
    with Live(console=screen, auto_refresh=False, transient=False) as live:
        while True:
            live.update(view(follower.look(), follower.directory, time.time()), refresh=True)
            time.sleep(every_s)


def _stream(follower: Follower, every_s: float) -> None:
    printed: list[str] | None = None
    while True:
        told = follower.look()
        happened = happenings(told) if told is not None else []
        new = lines(told, follower.directory, time.time()) if printed is None else after(happened, printed)
        for line in new:
            tell(line)
        sys.stdout.flush()
        printed = happened or printed or []
        time.sleep(every_s)


def view(told: History | None, directory: Path, now: float) -> RenderableType:
    """What the terminal shows at ``now``, seconds since the epoch."""
    if told is None:
        return Text(f"{text.clean(str(directory))}: nothing recorded yet, waiting. Ctrl-C ends this.")
    figures = summary.total(told)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column, justify in _COLUMNS:
        table.add_column(column, justify=justify, no_wrap=column != "save")  # on a narrow screen long names break
    for save in told.saves[: -_SHOWN_SAVES - 1 : -1]:
        outcome = Text(save.outcome, style=_STYLES[save.outcome])
        table.add_row(_time(save.ended), outcome, *map(Text, _cells(save)))
    failed = [Text(f"{_time(save.ended)}  {save.name}: {save.error}", style="red") for save in _failures(told)]
    notices = [Text(line_of_notice(notice), style="yellow") for notice in told.notices[: -_SHOWN_NOTICES - 1 : -1]]
    parts: list[RenderableType] = [
        Text(text.clean(str(directory)), style="dim"),
        Text(summary.verdict(figures), style="bold red" if figures.failed + figures.unknown else "bold green"),
        Text(" ".join(summary.sentences(figures, now))),
        Text(_in_short(figures), style="dim"),
    ]
    for block in ([table] if told.saves else [], failed, notices):
        parts += [Text(), *block] if block else []
    return Group(*parts)


def lines(told: History | None, directory: Path, now: float) -> list[str]:
    """The same in plain lines."""
    if told is None:
        return [nothing_in(directory)]
    figures = summary.total(told)
    said = [summary.verdict(figures), *summary.sentences(figures, now)]
    return [" ".join(said), _in_short(figures), *happenings(told)[-_SHOWN_SAVES:]]


def happenings(told: History) -> list[str]:
    """One line for everything that is over, oldest first."""
    over = [(save.ended, line_of(save)) for save in told.saves if save.outcome != "in flight"]
    over += [(notice.at, line_of_notice(notice)) for notice in told.notices]
    return [line for _, line in sorted(over)]


def after(happened: list[str], printed: list[str]) -> list[str]:
    """Those of ``happened`` that come after the last one that was printed already."""
    if printed and printed[-1] in happened:
        newest = len(happened) - happened[::-1].index(printed[-1])
        return happened[newest:]
    return happened


def line_of(save: Save) -> str:
    """One save."""
    if save.outcome != "committed":
        return f"{text.clock(save.ended)}  {save.outcome}  {save.name}: {save.error or 'its run ended before the save did'}"
    name, held, total, rate, size = _cells(save)
    facts = (f"size {size}", f"stall {held}", f"durable after {total}", rate)
    return f"{text.clock(save.ended)}  committed  {name}: {', '.join(fact for fact in facts if not fact.endswith(' '))}"


def line_of_notice(notice: Notice) -> str:
    """One resume or mishap."""
    return f"{text.clock(notice.at)}  {notice.kind}  {notice.text}"


_COLUMNS: tuple[tuple[str, JustifyMethod], ...] = (
    ("when", "left"),
    ("", "left"),
    ("save", "left"),
    ("stall", "right"),
    ("durable after", "right"),
    ("throughput", "right"),
    ("size", "right"),
)


def _cells(save: Save) -> tuple[str, ...]:
    times = (text.duration(save.stall_s), text.duration(save.total_s))
    return (save.name, *times, text.rate(save.gbps), bytes_text(save.size_bytes))


def _failures(told: History) -> list[Save]:
    return [save for save in told.saves[-_SHOWN_SAVES:] if save.outcome in ("failed", "outcome unknown")][-2:]


def _time(at: float) -> str:
    return text.clock(at)[11:]


def _in_short(figures: summary.Totals) -> str:
    facts = (
        ("stall per save", text.duration(figures.median_stall_s)),
        ("durable after", text.duration(figures.median_total_s)),
        ("throughput", text.rate(figures.median_gbps)),
        ("most work at risk", text.duration(figures.at_risk_s)),
    )
    return ", ".join(f"{name} {fact}" for name, fact in facts if fact)
