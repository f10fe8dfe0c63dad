"""``safe-ckpt resume-path``: what a job would go on from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from safe_ckpt.cli.output import CANNOT_TELL, DAMAGED, AsJson, Directory, print_json, say
from safe_ckpt.core.directory.catalog import Candidate, newest_first
from safe_ckpt.errors import DirectoryError, SafeCheckpointError
from safe_ckpt.inspection.check import Verdict, judge, plan
from safe_ckpt.inspection.listing import Listing, find_shelf, look_inside

_ATTEMPTS = 5


def resume_path(
    directory: Directory,
    quick: Annotated[bool, typer.Option("--quick", help="Believe the manifests; do not read the payloads.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the path of the checkpoint that resume="auto" would take: the newest whose every byte is what was written.

    The path alone goes to stdout; why newer ones are passed over to stderr. Exit status: 0; 1 when there is none; 3 when
    the one that it is was written by another tool and cannot be verified.
    """
    try:
        shelf, chosen, verified, rejected = _chosen_of(directory, quick=quick)
    except (SafeCheckpointError, OSError) as error:
        say(str(error))
        raise typer.Exit(DAMAGED) from error
    if as_json:
        said = [{"path": str(candidate.path), "reason": reason} for candidate, reason in rejected]
        print_json({"path": str(chosen.path) if chosen else None, "verified": verified, "rejected": said})
    else:
        for candidate, reason in rejected:
            say(f"not {candidate.path}: {reason}")
        for path in shelf.quarantined:
            say(f"not {path}: in quarantine, since a resume found it damaged")
        if chosen is not None:
            typer.echo(os.fsencode(chosen.path))  # as it is, whatever bytes are in it: programs open it
    if chosen is None:
        there = rejected or shelf.quarantined
        say(
            f"no usable checkpoint in {directory}"
            if there
            else f"no checkpoint in {directory}: a job would start afresh"
        )
        raise typer.Exit(DAMAGED)
    if chosen.foreign and not verified and not quick:
        say("another tool wrote it, in a format without checksums for all of it: it cannot be verified")
        raise typer.Exit(CANNOT_TELL)


_Rejected = list[tuple[Candidate, str]]


def _chosen_of(directory: Path, *, quick: bool) -> tuple[Listing, Candidate | None, bool, _Rejected]:
    for attempt in range(_ATTEMPTS):
        shelf = find_shelf(directory)
        for path, why in shelf.unreadable.items():
            raise DirectoryError(path=str(path), message=f"cannot be looked at, and a resume would stop there: {why}")
        looked = look_inside(shelf.usable)
        rejected = [(candidate, candidate.problem) for candidate in [*shelf.unusable, *looked] if candidate.problem]
        try:
            chosen, verified, why_not = _choose(newest_first(looked), quick=quick)
        except FileNotFoundError:  # a live job has just let it go: look again
            if attempt == _ATTEMPTS - 1:
                raise
            continue
        return shelf, chosen, verified, [*rejected, *why_not]
    raise DirectoryError(path=str(directory), message="changes too fast to be looked at")


def _choose(usable: Sequence[Candidate], *, quick: bool) -> tuple[Candidate | None, bool, _Rejected]:
    rejected: _Rejected = []
    for candidate in usable:
        if quick:
            return candidate, False, rejected
        verdict = judge([plan(candidate.path)])[0]
        if verdict.state != "damaged":
            return candidate, verdict.state == "valid", rejected
        rejected.append((candidate, _reason(verdict)))
    return None, False, rejected


def _reason(verdict: Verdict) -> str:
    bad = [judgement for judgement in verdict.files if judgement.state == "damaged"]
    return "; ".join(f"{judgement.file} {judgement.reason}" for judgement in bad[:3])
