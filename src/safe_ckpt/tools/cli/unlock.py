"""``safe-ckpt unlock``: who holds a directory."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Annotated

import typer

from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.home.holders import Holder
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.tools.cli.output import DAMAGED, AsJson, HeldDirectory, failing, print_json, tell
from safe_ckpt.tools.inspection.files import place_given
from safe_ckpt.tools.inspection.listing import holders_of


def unlock(
    directory: HeldDirectory,
    break_lock: Annotated[
        bool, typer.Option("--break-lock", help="Take the lock away. A job that still lives fails at its next commit.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say which job holds DIR, a directory or an address, or a checkpoint in it, and with --break-lock take it away from it.

    Mostly there is no need: the lock of a process of this host that is gone is taken over at once, and that of another host
    after it showed no sign of life for 60 seconds (lease_s). Exit status: 0 when the next job can have DIR, 1 when it is held.
    """
    with failing(f"who holds {directory} is unknown: ", ". Run this as a user who may read and write there"):
        place = place_given(directory)
        held = holders_of(place)
        for one in held if break_lock else ():
            one.take_away(unfenced=CheckpointConfig.from_environment().storage.unfenced)
    taken = break_lock and bool(held)
    if as_json:
        first = dataclasses.asdict(held[0].holder) if held else None
        names = {str(one.place): dataclasses.asdict(one.holder) for one in held if one.place != place}
        more = {"names": names} if names else {}
        print_json({"directory": str(place), "holder": first, **more, "taken_away": taken})
    elif not held:
        tell(f"{place} is free")
    for one in held if not as_json else ():
        tell(
            f"{one.place} was taken away from {_who(one.holder)}"
            if taken
            else f"{one.place} {_state(one.holder, place)}"
        )
    if not taken and any(one.holder.alive is not False for one in held):
        raise typer.Exit(DAMAGED)


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
