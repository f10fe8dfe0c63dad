"""Universal checkpoints, which DeepSpeed's ``ds_to_universal`` makes of others: which one, and whether it is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safe_ckpt.adapters.extras import named_by, presence
from safe_ckpt.errors import RestoreError

_LATEST = "latest_universal"


def latest(folder: Path) -> str:
    """Return what ``latest_universal`` names.

    Raises:
        RestoreError: it is not there, or names nothing beside it.
    """
    file = folder / _LATEST
    if not presence.is_file(file):
        raise RestoreError(path=str(folder), message=f"{file} does not exist: make one with ds_to_universal")
    named = named_by(file)
    if named is None:
        message = f"{_LATEST} names no directory beside it. Run ds_to_universal again"
        raise RestoreError(path=str(folder), message=message)
    return named.relative_to(folder).as_posix()


def refuse_incomplete(engine: Any, path: Path) -> None:
    """Refuse what a conversion that was interrupted left, as far as this rank needs it.

    Raises:
        RestoreError: names what is missing.
    """
    remedy = "it was not converted to its end: run ds_to_universal again"
    if not presence.is_directory(path):
        raise RestoreError(path=str(path), message="there is no such directory")
    if presence.is_there(path / "tmp"):
        raise RestoreError(path=str(path), message=f"tmp is still there: {remedy}")
    if not any(path.glob("*model_states.pt")):
        raise RestoreError(path=str(path), message=f"it holds no model_states.pt: {remedy}")
    for file in (path / "zero" / "optimizer_state.pt", *_own_files(engine, path)):
        if not presence.is_file(file) or not presence.ends_as_archive(file):
            name = file.relative_to(path)
            raise RestoreError(path=str(path), key=str(name), message=f"it is missing, or cut off: {remedy}")


def _own_files(engine: Any, path: Path) -> list[Path]:
    """The weights that this rank reads. Those of experts have names of their own, which DeepSpeed looks for itself."""
    names = {} if engine.has_moe_layers else engine.param_names
    files = []
    for parameter, name in names.items():
        if parameter.requires_grad:
            folder = path / "zero" / name
            files += [folder / "fp32.pt", *folder.glob("*.pt")]
    return files
