"""Versions and settings, compared by all ranks: a mistake on one rank is an error on every rank, within seconds."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from safe_ckpt._version import __version__
from safe_ckpt.config import CheckpointConfig, ConfigLike, settings_of
from safe_ckpt.core.coordination import process_groups
from safe_ckpt.core.coordination.coordinator import open_coordinator
from safe_ckpt.core.coordination.process_groups import ProcessGroup
from safe_ckpt.core.coordination.rounds import refuse_differences
from safe_ckpt.errors import ConfigError
from safe_ckpt.settings.sources import origin_of

T = TypeVar("T")


def config_of_all(
    config: CheckpointConfig | None, group: ProcessGroup | None = None, *, barrier_s: float | None = None
) -> CheckpointConfig:
    """``config``, or where it is None what the environment says. Every rank calls this, on the thread that trains.

    Args:
        config: what the program gave; on all ranks or on none.
        group: the ranks; None means WORLD, or this process alone without a process group.
        barrier_s: how long to wait for the other ranks; None for what the settings themselves say.

    Raises:
        ConfigError: what one rank's environment says is not allowed; on every rank, names that rank, file or variable, and key.
        DesyncError: the ranks' environments say different things, some ranks were given a ``config``, or they run different
            versions of safe_ckpt, torch or Python.
        RendezvousTimeout: some ranks did not come.
        PeerLostError: a rank died or stopped.
    """
    if config is not None:
        return config
    return agree_on_settings(None, lambda _: None, group, barrier_s=barrier_s)[0]


def agree_on_settings(
    config: ConfigLike | None,
    more: Callable[[CheckpointConfig], T],
    group: ProcessGroup | None = None,
    *,
    barrier_s: float | None = None,
    key: str = "config",
) -> tuple[CheckpointConfig, T]:
    """The settings as of ``config_of_all``, and what else a call looks at first. Every rank calls this, on the training thread.

    Args:
        config: see ``config_of_all``.
        more: judges or opens what this rank was given, with no other rank; what it raises, every rank raises.
        group: see ``config_of_all``.
        barrier_s: the same.
        key: how the door calls ``config``.

    Returns:
        The settings, and what ``more`` returned on this rank.

    Raises:
        Exception: what ``more`` raised on this rank, as it was raised.
        SafeCheckpointError: ``more`` failed on another rank, or as ``config_of_all``.
    """
    facts = process_groups.group_of(group)
    if facts.size == 1:
        mine = settings_of(config, key) or CheckpointConfig.from_environment()
        return mine, more(mine)
    # Its own timeouts and network, if they are valid, hold for the first meeting too.
    problem: Exception | None = None
    try:
        mine = settings_of(config, key) or CheckpointConfig.from_environment()
    except Exception as error:  # the other ranks wait for this one
        mine, problem = CheckpointConfig(), error
        if isinstance(error, ConfigError):
            problem = dataclasses.replace(error, message=f"{error.message} (rank {facts.rank})")
    found: list[T] = []

    def here() -> dict[str, str]:
        if problem is not None:
            raise problem
        found.append(more(mine))
        # Of what writes files and messages. A build for other hardware, or a patch of Python, is no other version.
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        versions = f"safe_ckpt {__version__}, torch {torch.__version__.partition('+')[0]}, Python {python}"
        return {"versions": versions, "settings": mine.deviations()}

    kind = "settings of the environment" if config is None else "settings"
    network = mine.network if problem is None else None
    timeouts = mine.timeouts if barrier_s is None else dataclasses.replace(mine.timeouts, barrier_s=barrier_s)
    coordinator = open_coordinator(group, timeouts, observe=False, network=network)
    try:
        coordinator.agree(kind, timeout_s=timeouts.barrier_s, local=here, decide=refuse_differences, phase="settings")
    finally:
        coordinator.release(keep=True)
    return mine, found[0]


def refused_retention(*, key: str, instead: str, from_environment: bool) -> ConfigError:
    """The error of an adapter whose framework has retention arguments of its own.

    Args:
        key: the argument that holds the settings, as the adapter calls it.
        instead: which arguments say what to keep.
        from_environment: whether the program gave no settings; then the error names the file or the variable.
    """
    place = origin_of(CheckpointConfig, os.environ, "retention") if from_environment else None
    if place is None:
        return ConfigError(key=key, message=f"{instead}; remove the Retention")
    path, origin = place
    message = f"{instead}; take the rules of retention out of there, or give this program a CheckpointConfig of its own"
    return ConfigError(key=path, message=message, source=origin.source, line=origin.line)
