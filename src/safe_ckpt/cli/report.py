"""``safe-ckpt report``: one page that tells how the saves of a run went."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from safe_ckpt.cli.output import DAMAGED, AsJson, print_json, say, tell
from safe_ckpt.report import event_log, history, page, summary
from safe_ckpt.report.existing import list_existing
from safe_ckpt.report.history import History
from safe_ckpt.report.sections import Subject

AnyDirectory = Annotated[Path, typer.Argument(exists=True, file_okay=False, readable=False, metavar="DIR")]
"""A directory, also one that may not be read: the command itself says so."""
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="Where the page goes; - for stdout.", dir_okay=False)
]


def report(directory: AnyDirectory, output: Output = Path("report.html"), as_json: AsJson = False) -> None:
    """Write one self-contained page about the saves in DIR: timeline, stalls, throughput, failures, retention.

    It tells what events.jsonl recorded, the last 20000 events; nothing else is needed to read it. --json prints the same
    facts and writes no page.
    """
    told = read_history(directory)
    if told is None:
        say(nothing_in(directory))
        raise typer.Exit(DAMAGED)
    if as_json:
        print_json(as_data(told))
        return
    existing, problem = list_existing(directory)
    subject = Subject(directory=str(directory), made_at=time.time(), existing=existing, problem=problem)
    text = page.render(told, subject)
    if str(output) == "-":
        sys.stdout.buffer.write(text.encode())  # the page says that it is UTF-8, whatever this terminal is
        sys.stdout.buffer.flush()
        return
    try:
        _replace(output, text)
    except OSError as error:
        say(f"{output} could not be written: {error.strerror or error}. Give another place with --output")
        raise typer.Exit(DAMAGED) from None
    tell(f"{output}: {summary.verdict(summary.total(told))}")


def read_history(directory: Path) -> History | None:
    """What was recorded in ``directory``; None when there is no file of events.

    Raises:
        typer.Exit: a file is there and could not be read; that was said.
    """
    try:
        files = event_log.find_events(directory)
        return history.tell(event_log.read_events(files)) if files else None
    except OSError as error:
        say(unreadable(directory, error))
        raise typer.Exit(DAMAGED) from None


def unreadable(directory: Path, error: OSError) -> str:
    """What to say, and to do, where the events cannot be read."""
    return f"the events of {directory} could not be read: {error}. Ask as a user who may read there"


def nothing_in(directory: Path) -> str:
    """What to say, and to do, where no events were recorded."""
    return (
        f"{directory} has no {event_log.EVENTS}: no job has saved there yet, record_events was off, or it is not the directory "
        f"that the job saves to. What is there: safe-ckpt list {directory}"
    )


def as_data(told: History) -> dict[str, Any]:
    """The history and its totals, JSON-able."""
    return {"totals": dataclasses.asdict(summary.total(told)), **dataclasses.asdict(told)}


def _replace(output: Path, text: str) -> None:
    # A reader sees the old page or the new one, never half of it.
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, output)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
