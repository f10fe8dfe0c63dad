"""``safe-ckpt unlock``: who holds a directory."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from safe_ckpt.cli.output import DAMAGED, AsJson, HeldDirectory, failing, print_json, tell
from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.directory.lock import Holder, holder_of, remove_lock
from safe_ckpt.core.storage.objects.place import ObjectPath, Place
from safe_ckpt.inspection.listing import read_listing
from safe_ckpt.inspection.objects.holder import holder_of_objects, take_away
from safe_ckpt.inspection.objects.reach import place_of


def unlock(
    directory: HeldDirectory,
    break_lock: Annotated[
        bool, typer.Option("--break-lock", help="Take the lock away. A job that still lives fails at its next commit.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say which job holds DIR, a directory or an address, and with --break-lock take it away from that job.

    Mostly there is no need: the lock of a process of this host that is gone is taken over at once, and that of another host
    after it showed no sign of life for 60 seconds (lease_s). Exit status: 0 when the next job can have DIR, 1 when it is held.
    """
    with failing(f"who holds {directory} is unknown: ", ". Run this as a user who may read and write there"):
        place = place_of(directory)
        holder, free = _in_store(place) if isinstance(place, ObjectPath) else _in_directory(place)
        taken = holder is not None and break_lock
        if taken:
            free()
    if as_json:
        facts = dataclasses.asdict(holder) if holder else None
        print_json({"directory": str(place), "holder": facts, "taken_away": taken})
    elif holder is None:
        tell(f"{place} is free")
    else:
        tell(f"{place} was taken away from {_who(holder)}" if taken else f"{place} {_state(holder, place)}")
    if holder and holder.alive is not False and not taken:
        raise typer.Exit(DAMAGED)


def _in_directory(directory: Path) -> tuple[Holder | None, Callable[[], None]]:
    """Who holds it, and how to take it away."""
    hidden = read_listing(directory).hidden

    def free() -> None:
        if hidden is not None:
            remove_lock(hidden)

    return holder_of(hidden), free


def _in_store(directory: ObjectPath) -> tuple[Holder | None, Callable[[], None]]:
    unfenced = CheckpointConfig.from_environment().storage.unfenced
    return holder_of_objects(directory), partial(take_away, directory, unfenced=unfenced)


def _who(holder: Holder) -> str:
    if not holder.host:
        return "a job that has not written its name"
    return f"process {holder.pid} on host {holder.host}, started {holder.started_at}"


def _state(holder: Holder, directory: Place) -> str:
    if holder.alive is False:
        return f"is free: {_who(holder)}, held it and is gone. The next job takes it over at once"
    command = f"safe-ckpt unlock {shlex.quote(str(directory))} --break-lock"
    if holder.alive:
        advice = "Stop it, or choose another directory. If it does not stop"
        return f"is held by {_who(holder)}, which is alive. {advice}: {command}"
    if not holder.host:
        state = "it takes the lock just now, or was killed meanwhile"
        return f"is held by {_who(holder)}: {state}. Then the next job takes it over after some seconds"
    state = "Whether it is alive is unknown here"
    advice = f"If it is gone, the next job takes it over after {holder.lease_s:g} s without a sign of life. To take it over now"
    return f"is held by {_who(holder)}. {state}. {advice}: {command}"
