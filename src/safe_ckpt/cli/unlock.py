"""``safe-ckpt unlock``: who holds a directory."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated

import typer

from safe_ckpt.cli.output import DAMAGED, AsJson, print_json, say, tell
from safe_ckpt.cli.report import AnyDirectory
from safe_ckpt.core.directory.lock import Holder, holder_of, remove_lock
from safe_ckpt.inspection.listing import read_listing


def unlock(
    directory: AnyDirectory,
    break_lock: Annotated[
        bool, typer.Option("--break-lock", help="Take the lock away. A job that still lives fails at its next commit.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say which job holds DIR, and with --break-lock take it away from that job.

    Mostly there is no need: the lock of a process of this host that is gone is taken over at once, and that of another host
    after it showed no sign of life for 60 seconds (lease_s). Exit status: 0 when the next job can have DIR, 1 when it is held.
    """
    try:
        hidden = read_listing(directory).hidden
        found = holder_of(hidden)
        taken = found is not None and hidden is not None and break_lock
        if taken and hidden is not None:
            remove_lock(hidden)
    except OSError as error:
        say(f"who holds {directory} cannot be told: {error}. Ask as a user who may read and write there")
        raise typer.Exit(DAMAGED) from None
    if as_json:
        holder = dataclasses.asdict(found) if found else None
        print_json({"directory": str(directory), "holder": holder, "taken_away": taken})
    elif found is None:
        tell(f"{directory} is free")
    else:
        tell(f"{directory} was taken away from {_who(found)}" if taken else f"{directory} {_state(found, directory)}")
    if found and found.alive is not False and not taken:
        raise typer.Exit(DAMAGED)


def _who(found: Holder) -> str:
    if not found.host:
        return "a job that has not written its name"
    return f"process {found.pid} on host {found.host}, started {found.started_at}"


def _state(found: Holder, directory: Path) -> str:
    if found.alive is False:
        return f"is free: {_who(found)}, held it and is gone. The next job takes it over at once"
    command = f"safe-ckpt unlock {shlex.quote(str(directory))} --break-lock"
    if found.alive:
        return f"is held by {_who(found)}, which is alive. Stop it, or choose another directory. If it does not stop: {command}"
    if not found.host:
        return (
            f"is held by {_who(found)}: one takes it just now, or was killed while it did. Then the next job takes it over "
            "after some seconds"
        )
    return (
        f"is held by {_who(found)}. Whether it is alive cannot be told from here. If it is gone, the next job takes it over "
        f"after {found.lease_s:g} s without a sign of life; who knows that and cannot wait: {command}"
    )
