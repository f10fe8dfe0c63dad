"""``safe-ckpt resume-path``: what a job would go on from."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from safe_ckpt.core.home.holders import runs_below
from safe_ckpt.core.home.standing import passed_over
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.errors import CorruptCheckpointError, DirectoryError
from safe_ckpt.text import listed
from safe_ckpt.tools.cli.list import RUNS_BELOW
from safe_ckpt.tools.cli.output import (
    CANNOT_TELL,
    DAMAGED,
    AsJson,
    Directory,
    ending_on_signals,
    failing,
    print_json,
    say,
)
from safe_ckpt.tools.inspection.check import plan_tasks, verify_tasks
from safe_ckpt.tools.inspection.fetch import fetch
from safe_ckpt.tools.inspection.files import place_given
from safe_ckpt.tools.inspection.listing import Listing, read_listing

_ATTEMPTS = 5


@dataclass(kw_only=True)
class _Choice:
    """The checkpoint that a resume would take.

    Attributes:
        path: what it is; None for nothing.
        source: where it was fetched from.
        verified: every byte was compared.
        foreign: another tool wrote it.
        rejected: what is passed over, and why.
        quarantined: what was found damaged by a resume.
    """

    path: Place | None = None
    source: Place | None = None
    verified: bool = False
    foreign: bool = False
    rejected: list[tuple[Place, str]] = field(default_factory=list)
    quarantined: Sequence[Place] = ()


def resume_path(
    directory: Directory,
    quick: Annotated[bool, typer.Option("--quick", help="Believe the manifests; do not read the payloads.")] = False,
    fetch_to: Annotated[
        Path | None,
        typer.Option(
            "--fetch", metavar="DIR2", help="Of an address or a mirror: fetch it into this directory, verified."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the path of the checkpoint that resume="auto" would take: the newest whose every byte is what was written.

    The path alone goes to stdout; why newer ones are passed over to stderr. DIR may be the address of an object store, also
    that of one checkpoint. With --fetch it is downloaded, or copied from a mirror; the path printed is that of the copy, which
    appears when it is complete, verified and on the disk. Exit status: 0; 1 when there is none; 3 when the one that it is was
    written by another tool and cannot be verified.
    """
    with failing(), ending_on_signals():
        place = place_given(directory)
        choice = _chosen(place, quick=quick, fetch_to=fetch_to)
        below = runs_below(place) if choice.path is None else []
    _report(choice, directory, as_json=as_json)
    if below:
        say(RUNS_BELOW.format(listed(below)))
    if choice.path is None:
        raise typer.Exit(DAMAGED)
    if choice.foreign and not choice.verified and not quick:
        say("another tool wrote it, in a format without checksums for all of it: it cannot be verified")
        raise typer.Exit(CANNOT_TELL)


def _report(choice: _Choice, directory: str, *, as_json: bool) -> None:
    if as_json:
        reasons = [{"path": str(path), "reason": reason} for path, reason in choice.rejected]
        path = str(choice.path) if choice.path else None
        source = {"source": str(choice.source)} if choice.source else {}
        print_json({"path": path, **source, "verified": choice.verified, "rejected": reasons})
    else:
        for rejected, reason in choice.rejected:
            say(f"not {rejected}: {reason}")
        if any(reason.startswith("it is unhealthy") for _, reason in choice.rejected):
            say("to go on from an unhealthy one, name it (step=..., or its path); health.ignore leaves numbers out")
        for quarantined in choice.quarantined:
            say(f"not {quarantined}: in quarantine, since a resume found it damaged")
        if choice.path is not None:
            typer.echo(os.fsencode(str(choice.path)))  # as it is, whatever bytes are in it: programs open it
    if choice.path is None:
        unusable = choice.rejected or choice.quarantined
        nothing = f"no checkpoint in {directory}: a job would start afresh"
        say(f"no usable checkpoint in {directory}" if unusable else nothing)


def _chosen(place: Place, *, quick: bool, fetch_to: Path | None) -> _Choice:
    for _ in range(_ATTEMPTS):
        listing = read_listing(place)
        for path, why in listing.unreadable.items():
            raise DirectoryError(path=str(path), message=f"cannot be read, and a resume would stop there: {why}")
        with contextlib.suppress(FileNotFoundError):  # a live job has just deleted one: look again
            return _choose(listing, quick=quick, fetch_to=fetch_to)
    message = "changes while it is read: its job deletes checkpoints. Try again"
    raise DirectoryError(path=str(place), message=message)


def _choose(listing: Listing, *, quick: bool, fetch_to: Path | None) -> _Choice:
    choice = _Choice(quarantined=listing.quarantined)
    choice.rejected = [(candidate.path, candidate.problem) for candidate in listing.standing.unusable]
    choice.rejected += listing.standing.by_name_only.items()
    for candidate in listing.standing.order:
        path = candidate.path
        if fetch_to is not None:
            try:
                choice.path, choice.source, choice.verified = fetch(path, fetch_to), path, True
            except CorruptCheckpointError as error:
                choice.rejected.append((path, f"{error.file} {error.message}".strip()))
                continue
            return choice
        verdict = None if quick else verify_tasks([plan_tasks(path)])[0]
        if verdict is None or verdict.state != "damaged":
            choice.path, choice.foreign = path, candidate.foreign
            choice.verified = verdict is not None and verdict.state == "valid"
            newer = passed_over(listing.standing.order, candidate)
            choice.rejected += [newer] if newer is not None else []
            return choice
        choice.rejected.append((path, "; ".join(f"{bad.file} {bad.reason}" for bad in verdict.damaged[:3])))
    return choice
