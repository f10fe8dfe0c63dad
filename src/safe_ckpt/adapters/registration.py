"""One handle of ours on one object of a framework: an earlier one is taken back before a new one takes its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.coordination.agreed_config import config_of_all

_MARK = "_safe_ckpt"


def begin(
    owner: Any, config: CheckpointConfig | None, check: Callable[[Any, CheckpointConfig], None]
) -> CheckpointConfig:
    """Take back an earlier handle on ``owner`` and settle on the settings. Every rank calls this.

    Args:
        owner: the framework's object.
        config: what the user gave; None for what the environment says.
        check: refuses an ``owner`` or settings that are not covered.

    Raises:
        ConfigError: a setting is not allowed; on every rank.
        DesyncError: the ranks were given different settings.
    """
    earlier = getattr(owner, _MARK, None)
    if earlier is not None:
        earlier.remove()
    settings = config_of_all(config)
    check(owner, settings)
    return settings


def mark(owner: Any, handle: object) -> None:
    """``handle`` is on ``owner`` from now on."""
    setattr(owner, _MARK, handle)


def unmark(owner: Any, handle: object) -> bool:
    """``handle`` is not on ``owner`` any more. Returns whether it was."""
    if vars(owner).get(_MARK) is not handle:
        return False
    delattr(owner, _MARK)
    return True
