"""``safe-ckpt unlock``: who holds a directory."""

from __future__ import annotations

from typing import Annotated

import typer

from safe_ckpt.cli.output import DAMAGED, AsJson, Directory, print_json
from safe_ckpt.core import unlock as unlocking


def unlock(
    directory: Directory,
    break_lock: Annotated[
        bool, typer.Option("--break-lock", help="Take the lock away. A job that still lives fails at its next commit.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say which job holds DIR, and with --break-lock take it away from that job.

    Mostly there is no need: the lock of a process of this host that is gone is taken over at once, and that of another host
    after it showed no sign of life for 60 seconds (lease_s).
    """
    found = unlocking.holder(directory)
    who = f"process {found.pid} on host {found.host}, started {found.started_at}" if found else ""
    if found and break_lock:
        unlocking.break_lock(directory)
    if as_json:
        holder = {"pid": found.pid, "host": found.host, "started_at": found.started_at} if found else None
        print_json({"directory": str(directory), "holder": holder, "taken_away": bool(found and break_lock)})
    elif found is None:
        typer.echo(f"{directory} is free")
    elif break_lock:
        typer.echo(f"{directory} was taken away from {who}")
    else:
        typer.echo(f"{directory} is held by {who}. If that job is gone: safe-ckpt unlock {directory} --break-lock")
    if found and not break_lock:
        raise typer.Exit(DAMAGED)
