"""Settings that the environment gives, told to all ranks: a mistake in one rank's is every rank's error, within seconds."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from safe_ckpt.config import CheckpointConfig, Timeouts
from safe_ckpt.core.coordination import process_groups
from safe_ckpt.core.coordination.coordinator import open_coordinator, raise_first
from safe_ckpt.errors import ConfigError, DesyncError, to_wire
from safe_ckpt.settings.sources import origin_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def config_of_all(config: CheckpointConfig | None, group: ProcessGroup | None = None) -> CheckpointConfig:
    """``config``, or where it is None what the environment says. Every rank calls this, on the thread that trains.

    Args:
        config: what the program gave; on all ranks or on none.
        group: the ranks; None means WORLD, or this process alone without a process group.

    Raises:
        ConfigError: what one rank's environment says is not allowed; on every rank, names that rank, file or variable, and key.
        DesyncError: the ranks' environments say different things, or some ranks were given a ``config``.
        RendezvousTimeout: some ranks did not come.
        PeerLostError: a rank died or stopped.
    """
    if config is not None:
        return config
    facts = process_groups.group_of(group)
    if facts.size == 1:
        return CheckpointConfig.from_environment()
    mine, problem = CheckpointConfig(), None
    try:
        mine = CheckpointConfig.from_environment()
    except ConfigError as error:
        named = dataclasses.replace(error, message=f"{error.message} (rank {facts.rank})")
        problem = to_wire(named, rank=facts.rank, phase="settings")
    except Exception as error:  # whatever it is: the other ranks wait for this one
        problem = to_wire(error, rank=facts.rank, phase="settings")
    # Its own timeouts where they can be had: they are what is to hold for the first meeting too.
    timeouts = Timeouts() if problem else mine.timeouts
    coordinator = open_coordinator(group, timeouts, observe=False, network=None if problem else mine.network)
    try:
        answer = {"problem": problem, "settings": mine.deviations()}
        coordinator.agree(
            "settings of the environment", {}, timeout_s=timeouts.barrier_s, answer=answer, decide=_refuse
        )
    finally:
        coordinator.release(keep=True)
    return mine


def _refuse(answers: Mapping[int, Any]) -> None:
    raise_first({rank: answer["problem"] for rank, answer in answers.items()})
    said = {str(rank): answer["settings"] for rank, answer in sorted(answers.items())}
    if len(set(said.values())) > 1:
        raise DesyncError(what="settings", values=said)


def refused_retention(*, key: str, instead: str, from_environment: bool) -> ConfigError:
    """The error of an adapter whose framework has retention arguments of its own.

    Args:
        key: the argument that holds the settings, as the adapter calls it.
        instead: which arguments say what to keep.
        from_environment: whether the program gave no settings; then the error names the file or the variable.
    """
    found = origin_of(CheckpointConfig, os.environ, "retention") if from_environment else None
    if found is None:
        return ConfigError(key=key, message=f"{instead}; remove the Retention")
    path, origin = found
    message = f"{instead}; take the rules of retention out of there, or give this program a CheckpointConfig of its own"
    return ConfigError(key=path, message=message, source=origin.source, line=origin.line)
