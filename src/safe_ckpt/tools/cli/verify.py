"""``safe-ckpt verify``: are the bytes those that were written."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from safe_ckpt.core.home.home import name_below
from safe_ckpt.core.home.places import checkpoint_is_gone, is_one
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.reader import ReadProgress
from safe_ckpt.errors import SafeCheckpointError, UnsupportedFormatError
from safe_ckpt.text import bytes_text, counted, listed
from safe_ckpt.tools.cli.output import (
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
from safe_ckpt.tools.inspection.check import (
    Job,
    Judgement,
    Task,
    Verdict,
    bytes_to_read,
    plan_tasks,
    unreadable,
    verify_tasks,
)
from safe_ckpt.tools.inspection.files import place_given
from safe_ckpt.tools.inspection.listing import read_listing

_MOST_FILES = 20
_DELETED = "deleted"
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
    is "cannot tell". What cannot be read is "unreadable", what a live job deletes meanwhile "deleted": the others are verified
    all the same. Exit status: 0 all valid, 1 something is damaged or unreadable, 3 neither, but not all could be verified.
    """
    began = time.monotonic()
    with failing(f"{_UNREAD}: "):
        given = [place_given(path) for path in paths]
        found = _checkpoints(given)
        tasks = [_planned(path, why, follow_symlinks=follow_symlinks) for path, why in found.items()]
        verdicts = _judged(tasks)
        for number, one in enumerate(verdicts):
            # A checkpoint that a job has deleted since it was listed is neither damaged nor unreadable.
            if one.state != "valid" and one.path not in given and _is_gone(one.path):
                verdicts[number] = Verdict(path=one.path, kind=_DELETED, files=())
    if as_json:
        print_json([_row(verdict) for verdict in verdicts])
    else:
        for verdict in verdicts:
            _print(verdict)
        size, seconds = bytes_to_read(tasks), max(time.monotonic() - began, 1e-6)
        say(f"{bytes_text(size)} in {seconds:.1f} s, {size / seconds / 1e9:.2f} GB/s")
    states = {verdict.state for verdict in verdicts if verdict.kind != _DELETED}
    if states & {"damaged", "unreadable"}:
        raise typer.Exit(DAMAGED)
    if states != {"valid"}:
        raise typer.Exit(CANNOT_TELL)


def _checkpoints(paths: Sequence[Place]) -> dict[Place, str]:
    """Each path, or what is kept in it if it is a directory that holds checkpoints; and why one cannot be read, else ""."""
    checkpoints: dict[Place, str] = {}
    for path in paths:
        try:
            checkpoints |= _kept_at(path)
        except OSError as error:  # the others can be verified all the same
            if len(paths) == 1:
                raise
            checkpoints[path] = str(error)
    return checkpoints


def _kept_at(path: Place) -> dict[Place, str]:
    """The checkpoints of a directory; the directory itself if there are none and it may be one of another tool."""
    if is_one(path):
        return {path: ""}
    listing = read_listing(path)
    kept = dict.fromkeys(sorted(listing.places_of_all, key=str), "")
    kept |= listing.unreadable
    if not kept and not listing.may_be_one:
        raise UnsupportedFormatError(path=str(path), message="there is no checkpoint in it")
    return kept or {path: ""}


def _planned(path: Place, why: str, *, follow_symlinks: bool) -> Task:
    """The task for one path. A path that cannot be looked at is a judgement already."""
    if not why:
        try:
            task = plan_tasks(path, follow_symlinks=follow_symlinks)
            return replace(task, jobs=[_Tolerant(job, path) for job in task.jobs])
        except (OSError, SafeCheckpointError) as error:
            why = str(error)
    return unreadable(path, _unread(path.name, why))


class _Tolerant:
    """A job that says what it could not read: the others go on."""

    def __init__(self, job: Job, path: Place) -> None:
        self._job, self._path = job, path
        self.key = getattr(job, "key", None)

    def __call__(self, progress: ReadProgress | None) -> Judgement:
        try:
            return self._job(progress)
        except InterruptedError:
            raise
        except (OSError, SafeCheckpointError) as error:
            file = Path(str(getattr(error, "filename", None) or getattr(error, "path", None) or self._path))
            return _unread(name_below(self._path, file) or file.name, str(error))


def _unread(file: str, why: str) -> Judgement:
    return Judgement(file=file, state="unreadable", reason=f"{_UNREAD}: {why}")


def _is_gone(path: Place) -> bool:
    """Whether a job has deleted it since it was listed."""
    try:
        return checkpoint_is_gone(path)
    except OSError:
        return False


def _judged(tasks: Sequence[Task]) -> list[Verdict]:
    if not sys.stderr.isatty():
        return verify_tasks(tasks)
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(error=True), transient=True) as bar:
        shown = bar.add_task("", total=bytes_to_read(tasks))
        return verify_tasks(tasks, progress=lambda count: bar.advance(shown, count))


def _print(verdict: Verdict) -> None:
    if verdict.kind == _DELETED:
        tell(f"{_DELETED:<11} {verdict.path} (by its job, while this was running: it says nothing about the others)")
        return
    size, shown = verdict.size_bytes, verdict.damaged
    held = counted(len(verdict.files), "file")
    line = f"{verdict.state:<11} {verdict.path} ({verdict.kind}, {held}, {bytes_text(size)}"
    if verdict.state == "unreadable":
        shown = tuple(judgement for judgement in verdict.files if judgement.state == "unreadable")
    elif verdict.state == "cannot tell":
        share = f"{int(1000 * verdict.covered_bytes / size) / 10:g} %" if size else "nothing"
        line += f", {share} under checksums"
        shown = tuple(judgement for judgement in verdict.files if judgement.state != "valid")
    remarks = []
    for judgement in shown[:_MOST_FILES]:
        names = f": {listed(judgement.names)}" if judgement.names else ""
        remarks.append(f"{judgement.file}: {judgement.reason}{names}")
    if len(shown) > _MOST_FILES:
        remarks.append(f"and {len(shown) - _MOST_FILES} more files; --json names all")
    tell(f"{line})")
    for remark in (*remarks, *verdict.remarks):
        tell(f"            {remark}")


def _row(verdict: Verdict) -> dict[str, Any]:
    return {
        "path": str(verdict.path),
        "kind": verdict.kind,
        "state": _DELETED if verdict.kind == _DELETED else verdict.state,
        "size_bytes": verdict.size_bytes,
        "covered_bytes": verdict.covered_bytes,
        "files": [vars(judgement) for judgement in verdict.files],
        "remarks": verdict.remarks,
    }
