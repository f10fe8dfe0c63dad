"""The output of commands: tables for people, JSON for programs, plain text where there is no terminal."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from safe_ckpt.core.storage.objects.options import SCHEMES, is_url
from safe_ckpt.errors import ConfigError, SafeCheckpointError

DAMAGED = 1
"""Exit status: something is damaged, held, or did not succeed."""
CANNOT_TELL = 3
"""Exit status: no damage found, but part of the data carries no checksums and could not be verified."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")]
FollowSymlinks = Annotated[
    bool, typer.Option("--follow-symlinks", help="Read what links point to outside, as in the cache of a model hub.")
]


def _existing(what: str, *, files: bool = True, readable: bool = True) -> Callable[[str], str]:
    """A parser for an argument: a path at which something is, or the address of an object store, which is not asked yet.

    A ``Path`` would swallow a slash of an address.
    """

    def parse(text: str) -> str:
        scheme, found, rest = text.partition(":/")
        if found and scheme in SCHEMES and not rest.startswith("/"):
            raise typer.BadParameter(f"write {scheme}:// with two slashes: {scheme}://{rest}")
        try:
            if is_url(text):
                return text
        except ConfigError as error:
            raise typer.BadParameter(error.message) from None
        shown = f"{what} {text!r}"
        try:
            os.stat(text)
        except PermissionError as error:
            raise typer.BadParameter(f"{shown} cannot be looked at: {error.strerror}.") from None
        except (OSError, ValueError):
            raise typer.BadParameter(f"{shown} does not exist.") from None
        if not files and not os.path.isdir(text):
            raise typer.BadParameter(f"{shown} is a file.")
        if readable and not os.access(text, os.R_OK):
            raise typer.BadParameter(f"{shown} is not readable.")
        return text

    return parse


CHECKPOINT = _existing("Path")
"""The parser of an argument that is a checkpoint, or holds some."""
Directory = Annotated[str, typer.Argument(parser=_existing("Directory", files=False), metavar="DIR")]
HeldDirectory = Annotated[
    str, typer.Argument(parser=_existing("Directory", files=False, readable=False), metavar="DIR")
]
"""A directory, also one that may not be read: the command itself says so."""


def local_directory(text: str) -> Path:
    """The parser of an argument that is a directory of a file system, also one that may not be read.

    Raises:
        BadParameter: it is none.
    """
    path = _existing("Directory", files=False, readable=False)(text)
    if is_url(path):
        raise typer.BadParameter("no events are recorded in an object store; safe-ckpt list shows what is there.")
    return Path(path)


@contextlib.contextmanager
def failing(before: str = "", after: str = "") -> Iterator[None]:
    """Turn an error into its sentence on stderr and the exit status: 2 for wrong usage, 1 for everything else.

    Args:
        before: written before an error of the operating system: what it means.
        after: written behind it: what to do.
    """
    try:
        yield
    except SafeCheckpointError as error:
        say(str(error))
        raise typer.Exit(2 if isinstance(error, ConfigError) else DAMAGED) from error
    except OSError as error:
        say(f"{before}{error}{after}")
        raise typer.Exit(DAMAGED) from error


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """The signals of launchers and terminals end the command as Ctrl-C does: it cleans up first."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # within another program, which handles signals itself
        return
    # nohup ignores SIGHUP, and so does this then.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def console(*, error: bool = False) -> Console:
    """A terminal with its own width and colours; elsewhere plain text, wide enough that no line is broken."""
    stream = sys.stderr if error else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 400, highlight=False, soft_wrap=not stream.isatty())


def print_json(value: object) -> None:
    """One JSON document on stdout; null for numbers that JSON has not, such as NaN."""
    typer.echo(json.dumps(_jsonable(value), indent=1, default=str, allow_nan=False))


def _jsonable(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _jsonable(part) for key, part in value.items()}
    return [_jsonable(part) for part in value] if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say on a terminal what is done meanwhile, where that may take long. Elsewhere nothing is written."""
    shown = console(error=True).status(what) if sys.stderr.isatty() else contextlib.nullcontext()
    with shown:
        yield


_WIDEST = 80


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on a terminal; elsewhere one line per row, columns padded with spaces."""
    cells = [["" if cell is None else _visible(str(cell)) for cell in row] for row in rows]
    if sys.stdout.isatty():
        table = Table(*columns)
        for row in cells:
            table.add_row(*row)
        console().print(table, markup=False)
        return
    lines = [list(columns), *cells]
    # What is longer stands out of its column, and the others are not pushed away by it.
    widths = [
        max((len(cell) for cell in column if len(cell) <= _WIDEST), default=_WIDEST)
        for column in zip(*lines, strict=True)
    ]
    for line in lines:
        tell("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def say(message: str) -> None:
    """A remark beside the result: on stderr, so that stdout stays for programs."""
    tell(message, error=True)


def tell(line: str, *, error: bool = False) -> None:
    """A line of the result. Names in it may be hostile: control characters and what the encoding lacks are escaped."""
    shown = "\n".join(map(_visible, line.split("\n")))
    encoding = (sys.stderr if error else sys.stdout).encoding or "utf-8"
    typer.echo(shown.encode(encoding, "backslashreplace").decode(encoding), err=error)


def _visible(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
