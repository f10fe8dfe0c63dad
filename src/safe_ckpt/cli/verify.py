"""``safe-ckpt verify``: are the bytes those that were written."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from safe_ckpt.cli.output import (
    CANNOT_TELL,
    DAMAGED,
    AsJson,
    FollowSymlinks,
    console,
    print_json,
    say,
    tell,
)
from safe_ckpt.core.formats.manifest import MANIFEST_NAME
from safe_ckpt.errors import DirectoryError, SafeCheckpointError, UnsupportedFormatError
from safe_ckpt.inspection.check import Judgement, Task, Verdict, judge, plan
from safe_ckpt.inspection.listing import read_listing
from safe_ckpt.text import bytes_text

_MOST_NAMES = 8
_MOST_FILES = 20
_UNREAD = "could not be read, which says nothing about its bytes"


def verify(
    paths: Annotated[list[Path], typer.Argument(exists=True, help="Checkpoints, or directories that hold some.")],
    follow_symlinks: FollowSymlinks = False,
    as_json: AsJson = False,
) -> None:
    """Read every byte of the checkpoints at PATHS and compare it with what was written.

    Ours carry digests of everything; files of torch.save (Lightning, Accelerate, DeepSpeed, DCP) a CRC-32 of every record, that
    torch.load never looks at. safetensors, JSON and plain pickles carry nothing: there the structure is checked, and the answer
    is "cannot tell". Exit status: 0 all valid, 1 something is damaged, 3 nothing is damaged but not all could be told.
    """
    began = time.monotonic()
    try:
        tasks = [plan(path, follow_symlinks=follow_symlinks) for path in _checkpoints(paths)]
        verdicts = _judged(tasks)
    except (SafeCheckpointError, OSError) as error:
        say(str(error) if isinstance(error, SafeCheckpointError) else f"{_UNREAD}: {error}")
        raise typer.Exit(DAMAGED) from error
    if as_json:
        print_json([_row(verdict) for verdict in verdicts])
    else:
        for verdict in verdicts:
            _print(verdict)
        size, seconds = sum(task.size_bytes for task in tasks), max(time.monotonic() - began, 1e-6)
        say(f"{bytes_text(size)} in {seconds:.1f} s, {size / seconds / 1e9:.2f} GB/s")
    states = {verdict.state for verdict in verdicts}
    if states != {"valid"}:
        raise typer.Exit(DAMAGED if "damaged" in states else CANNOT_TELL)


def _checkpoints(paths: Sequence[Path]) -> list[Path]:
    """Each path, or what is kept in it if it is a directory that holds checkpoints."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir() or (path / MANIFEST_NAME).exists():
            found.append(path)
            continue
        shelf = read_listing(path)
        for unreadable, why in shelf.unreadable.items():
            raise DirectoryError(path=str(unreadable), message=f"{_UNREAD}: {why}")
        held = sorted(candidate.path for candidate in [*shelf.usable, *shelf.unusable])
        if not held and (shelf.hidden is not None or not any(path.iterdir())):
            raise UnsupportedFormatError(path=str(path), message="there is no checkpoint in it")
        found += held or [path]
    return found


def _judged(tasks: Sequence[Task]) -> list[Verdict]:
    if not sys.stderr.isatty():
        return judge(tasks)
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(error=True), transient=True) as bar:
        shown = bar.add_task("", total=sum(task.size_bytes for task in tasks))
        return judge(tasks, progress=lambda count: bar.advance(shown, count))


def _print(verdict: Verdict) -> None:
    size = sum(judgement.size_bytes for judgement in verdict.files)
    covered = sum(judgement.covered_bytes for judgement in verdict.files)
    line = f"{verdict.state:<11} {verdict.path} ({verdict.kind}, {len(verdict.files)} files, {bytes_text(size)}"
    tell(f"{line}, {_share(covered, size)} under checksums)" if verdict.state == "cannot tell" else f"{line})")
    told = [judgement for judgement in verdict.files if judgement.state == "damaged"]
    if verdict.state == "cannot tell":
        told = [judgement for judgement in verdict.files if judgement.state != "valid"]
    for judgement in told[:_MOST_FILES]:
        tell(f"            {judgement.file}: {_what(judgement)}")
    if len(told) > _MOST_FILES:
        tell(f"            and {len(told) - _MOST_FILES} more files; --json names all")
    for remark in verdict.remarks:
        tell(f"            {remark}")


def _share(covered: int, size: int) -> str:
    return f"{int(1000 * covered / size) / 10:g} %" if size else "nothing"


def _what(judgement: Judgement) -> str:
    names = judgement.names[:_MOST_NAMES]
    more = f" and {len(judgement.names) - len(names)} more" if len(judgement.names) > len(names) else ""
    return f"{judgement.reason}: {', '.join(names)}{more}" if names else judgement.reason


def _row(verdict: Verdict) -> dict[str, Any]:
    files = [{**vars(judgement), "names": list(judgement.names)} for judgement in verdict.files]
    return {
        "path": str(verdict.path),
        "kind": verdict.kind,
        "state": verdict.state,
        "size_bytes": sum(judgement.size_bytes for judgement in verdict.files),
        "covered_bytes": sum(judgement.covered_bytes for judgement in verdict.files),
        "files": files,
        "remarks": list(verdict.remarks),
    }
