"""``safe-ckpt verify``: are the bytes those that were written."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from safe_ckpt.cli.output import (
    CANNOT_TELL,
    CHECKPOINT,
    DAMAGED,
    AsJson,
    FollowSymlinks,
    console,
    failing,
    print_json,
    say,
    tell,
)
from safe_ckpt.core.formats.manifest import MANIFEST_NAME
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.errors import DirectoryError, UnsupportedFormatError
from safe_ckpt.inspection.check import Judgement, Task, Verdict, bytes_to_read, judge
from safe_ckpt.inspection.listing import Listing, read_listing
from safe_ckpt.inspection.objects.check import plan_any
from safe_ckpt.inspection.objects.listing import ObjectListing, read_objects
from safe_ckpt.inspection.objects.reach import is_checkpoint, place_of
from safe_ckpt.text import bytes_text, listed

_MOST_FILES = 20
_UNREAD = "could not be read, which says nothing about its bytes"


def verify(
    paths: Annotated[
        list[str],
        typer.Argument(parser=CHECKPOINT, help="Checkpoints, or directories that hold some; or their addresses."),
    ],
    follow_symlinks: FollowSymlinks = False,
    as_json: AsJson = False,
) -> None:
    """Read every byte of the checkpoints at PATHS and compare it with what was written.

    Ours carry digests of everything; files of torch.save (Lightning, Accelerate, DeepSpeed, DCP) a CRC-32 of every record, that
    torch.load never looks at. safetensors, JSON and plain pickles carry nothing: there the structure is checked, and the answer
    is "cannot tell". Exit status: 0 all valid, 1 something is damaged, 3 nothing is damaged but not all could be verified.
    """
    began = time.monotonic()
    with failing(f"{_UNREAD}: "):
        tasks = [plan_any(path, follow_symlinks=follow_symlinks) for path in _checkpoints(map(place_of, paths))]
        verdicts = _judged(tasks)
    if as_json:
        print_json([_row(verdict) for verdict in verdicts])
    else:
        for verdict in verdicts:
            _print(verdict)
        size, seconds = bytes_to_read(tasks), max(time.monotonic() - began, 1e-6)
        say(f"{bytes_text(size)} in {seconds:.1f} s, {size / seconds / 1e9:.2f} GB/s")
    states = {verdict.state for verdict in verdicts}
    if states != {"valid"}:
        raise typer.Exit(DAMAGED if "damaged" in states else CANNOT_TELL)


def _checkpoints(paths: Iterable[Place]) -> list[Place]:
    """Each path, or what is kept in it if it is a directory that holds checkpoints."""
    checkpoints: list[Place] = []
    for path in paths:
        if isinstance(path, ObjectPath):
            checkpoints += [path] if is_checkpoint(path) else _kept_in(read_objects(path), path, unknown=False)
        elif not path.is_dir() or (path / MANIFEST_NAME).exists():
            checkpoints.append(path)
        else:
            listing = read_listing(path)
            checkpoints += _kept_in(listing, path, unknown=listing.hidden is None and any(path.iterdir()))
    return checkpoints


def _kept_in(listing: Listing | ObjectListing, path: Place, *, unknown: bool) -> Sequence[Place]:
    """The checkpoints of a directory; the directory itself if there are none and it may be one of another tool."""
    for unreadable, why in listing.unreadable.items():
        raise DirectoryError(path=str(unreadable), message=f"{_UNREAD}: {why}")
    kept = [candidate.path for candidate in (*listing.usable, *listing.unusable)]
    if not kept and not unknown:
        raise UnsupportedFormatError(path=str(path), message="there is no checkpoint in it")
    files = sorted(path for path in kept if isinstance(path, Path))
    return [*files, *sorted(path for path in kept if isinstance(path, ObjectPath))] or [path]


def _judged(tasks: Sequence[Task]) -> list[Verdict]:
    if not sys.stderr.isatty():
        return judge(tasks)
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(error=True), transient=True) as bar:
        shown = bar.add_task("", total=bytes_to_read(tasks))
        return judge(tasks, progress=lambda count: bar.advance(shown, count))


def _print(verdict: Verdict) -> None:
    size, shown = verdict.size_bytes, verdict.damaged
    line = f"{verdict.state:<11} {verdict.path} ({verdict.kind}, {len(verdict.files)} files, {bytes_text(size)}"
    if verdict.state == "cannot tell":
        share = f"{int(1000 * verdict.covered_bytes / size) / 10:g} %" if size else "nothing"
        line += f", {share} under checksums"
        shown = tuple(judgement for judgement in verdict.files if judgement.state != "valid")
    remarks = [f"{judgement.file}: {_what(judgement)}" for judgement in shown[:_MOST_FILES]]
    if len(shown) > _MOST_FILES:
        remarks.append(f"and {len(shown) - _MOST_FILES} more files; --json names all")
    tell(f"{line})")
    for remark in (*remarks, *verdict.remarks):
        tell(f"            {remark}")


def _what(judgement: Judgement) -> str:
    return f"{judgement.reason}: {listed(judgement.names)}" if judgement.names else judgement.reason


def _row(verdict: Verdict) -> dict[str, Any]:
    return {
        "path": str(verdict.path),
        "kind": verdict.kind,
        "state": verdict.state,
        "size_bytes": verdict.size_bytes,
        "covered_bytes": verdict.covered_bytes,
        "files": [vars(judgement) for judgement in verdict.files],
        "remarks": verdict.remarks,
    }
