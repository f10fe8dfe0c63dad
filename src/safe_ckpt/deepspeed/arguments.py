"""Arguments of the calls, checked on each rank before the ranks compare them: what one rank gave wrong, all ranks raise."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safe_ckpt.adapters import Engine
from safe_ckpt.adapters.extras import HIDDEN, checked_name
from safe_ckpt.adapters.spool import refuse_url
from safe_ckpt.config import CheckpointConfig
from safe_ckpt.errors import ConfigError, HostileCheckpointError
from safe_ckpt.layouts.table import LATEST

_RESERVED = frozenset({".", HIDDEN, LATEST})


def agree(
    core: Engine, kind: str, check: Callable[[], Mapping[str, Any]], decide: Callable[[], None] = lambda: None
) -> Mapping[str, Any]:
    """Check this rank's arguments, compare them with those of the others, and decide. Every rank calls this.

    Args:
        core: where the ranks meet.
        kind: the name of the call.
        check: returns what must be equal on all ranks; raises where an argument is wrong.
        decide: runs on rank 0.

    Returns:
        What ``check`` returned.

    Raises:
        DesyncError: the ranks differ.
        SafeCheckpointError: what ``check`` raised on the lowest rank on which it did, or ``decide``. A rank on which ``check``
            failed raises its own exception.
    """
    values: dict[str, Any] = {}  # filled by ``local``, which runs before the ranks compare
    core.agree(kind, must_match=values, local=lambda: values.update(check()), decide=lambda _: decide())
    return values


def checked_directory(given: object, name: str) -> Path:
    """A directory as an absolute path.

    Args:
        given: the argument.
        name: of the argument.

    Raises:
        ConfigError: it is none. It is a ``ValueError``, with the words of DeepSpeed's own.
    """
    if not given or not isinstance(given, str | os.PathLike) or not isinstance(os.fspath(given), str):
        raise ConfigError(message=f"{name} must be a non-empty string, got {given!r}")
    refuse_url(given, name)
    return Path(os.path.abspath(given))


def checked_tag(tag: object) -> str:
    """A tag as text: the name of a directory, which may be in other directories, as in ``"warmup/step10"``.

    Raises:
        ConfigError: it leads elsewhere, or is a name of ours or of DeepSpeed's.
    """
    name = str(tag)
    with contextlib.suppress(HostileCheckpointError):
        if _RESERVED.isdisjoint(checked_name(name).split("/")):
            return name
    message = f"expected the name of a directory in save_dir, and none of {sorted(_RESERVED)}, got {name!r}"
    raise ConfigError(key="tag", message=message)


def checked_file(directory: object, name: object) -> Path:
    """A file in a directory as an absolute path.

    Raises:
        ConfigError: it is none.
    """
    folder, text = checked_directory(directory, "save_dir"), str(name)
    path = Path(os.path.abspath(folder / text))
    if not text or text.endswith(os.sep) or path == folder or set(path.parts) & {HIDDEN} or path.name == LATEST:
        raise ConfigError(key="save_filename", message=f"expected the name of a file, got {text!r}")
    return path


def default_tag(engine: Any) -> str:
    """The tag of a save that was given none."""
    return f"global_step{engine.global_steps}"


def check_engine(engine: Any) -> None:
    """Refuse an engine that writes in a way that is not covered.

    Raises:
        ConfigError: names the setting.
    """
    if engine.zero_nvme_offload_optimizer() and engine.has_moe_layers:
        message = "optimizer states on NVMe together with mixture-of-experts layers are not covered: offload to the CPU"
        raise ConfigError(key="zero_optimization.offload_optimizer.device", message=message)


def check_settings(config: CheckpointConfig) -> None:
    """Refuse settings that mean nothing here.

    Raises:
        ConfigError: names the setting.
    """
    if config.snapshot == "overlapped":
        message = 'DeepSpeed\'s optimizers may change parameters outside of step(): use "eager" or "auto"'
        raise ConfigError(key="snapshot", message=message)
