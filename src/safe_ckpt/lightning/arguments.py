"""What the callback refuses when it is built, rather than at the first save."""

from __future__ import annotations

import os
from pathlib import Path

from safe_ckpt.adapters import refused_retention
from safe_ckpt.config import CheckpointConfig, Retention
from safe_ckpt.errors import ConfigError


def check_arguments(
    dirpath: str | Path | None,
    config: CheckpointConfig,
    resume: str | None,
    *,
    save_weights_only: bool,
    from_environment: bool = False,
) -> None:
    """Refuse what cannot work together. ``from_environment``: the program gave no ``config``.

    Raises:
        ConfigError: naming the argument.
    """
    if config.on_busy != "wait" or config.max_in_flight != 1:
        message = "a Trainer saves one after the other: leave on_busy and max_in_flight alone"
        raise ConfigError(key="config.on_busy", message=message)
    if resume == "auto" and save_weights_only:
        message = "a checkpoint of weights alone cannot be resumed from: use a second callback for those"
        raise ConfigError(key="save_weights_only", message=message)
    if config.retention != Retention():
        own = "save_top_k, monitor and save_last are the retention in Lightning"
        raise refused_retention(key="config.retention", instead=own, from_environment=from_environment)
    if resume not in ("auto", None):
        raise ConfigError(key="resume", message=f'expected "auto" or None, got {resume!r}')
    if resume == "auto" and dirpath is None:
        message = 'resume="auto" needs an explicit dirpath: the default one is new with every run'
        raise ConfigError(key="dirpath", message=message)
    refuse_remote(dirpath)


def refuse_remote(dirpath: str | Path | None) -> None:
    """Refuse a directory that is a URL.

    Raises:
        ConfigError: it is one.
    """
    if dirpath is not None and "://" in os.fspath(dirpath) and not os.fspath(dirpath).startswith("file://"):
        raise ConfigError(key="dirpath", message=f"only local and mounted file systems are supported, got {dirpath}")
