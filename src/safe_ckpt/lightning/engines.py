"""DeepSpeed under a Trainer: the directory that ``DeepSpeedStrategy`` writes, and what its loading leaves out.

Lightning starts DeepSpeed on CUDA GPUs only. It was run here with a strategy that is not asked for one, on two processes on the
CPU; on GPUs it was never run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safe_ckpt.adapters import Engine, presence

if TYPE_CHECKING:
    from safe_ckpt.deepspeed.nested import Nested

TAG = "checkpoint"
_LEFT_OUT = ("state_dict", "optimizer_states")  # DeepSpeed has them, in parts


def is_tag_directory(path: Path) -> bool:
    """Whether a directory is what ``DeepSpeedStrategy`` writes, to its end: ``latest`` comes last."""
    return presence.is_file(path / "latest") and presence.is_file(facts_file(path))


def facts_file(path: Path) -> Path:
    """The file that holds the rest of the Trainer's checkpoint: DeepSpeed puts it beside the model's parts."""
    names = (
        os.listdir(path / TAG) if presence.is_directory(path / TAG) else []
    )  # glob takes every error for an empty folder
    return path / TAG / min((name for name in names if name.endswith("model_states.pt")), default="")


def collect(core: Engine, strategy: Any, checkpoint: Mapping[str, Any] | None, error: Exception | None) -> Nested:
    """What the engine writes, with the rest of the Trainer's checkpoint in it. Every rank calls this.

    Raises:
        SafeCheckpointError: see ``nested.collect``.
    """
    from safe_ckpt.deepspeed import nested

    client = {key: value for key, value in (checkpoint or {}).items() if key not in _LEFT_OUT}
    found = nested.collect(
        core,
        {TAG: strategy.deepspeed_engine},
        client,
        exclude_frozen_parameters=bool(getattr(strategy, "exclude_frozen_parameters", False)),
    )
    if error is None:
        return found
    return nested.Nested(folders=found.folders, notes=found.notes, error=error)


def loading(core: Engine, strategy: Any, path: Path) -> contextlib.AbstractContextManager[None]:
    """Within this block the strategy may load. Every rank enters it.

    Raises:
        SafeCheckpointError: see ``nested.loading``.
    """
    from safe_ckpt.deepspeed import nested

    return nested.loading(core, {TAG: strategy.deepspeed_engine}, path)


def resume(core: Engine, strategy: Any, path: Path, *, fitting: bool) -> None:
    """After the strategy has loaded: what DeepSpeed leaves out with NVMe offload. Every rank calls this.

    Raises:
        SafeCheckpointError: see ``nested.resume_swapped``.
    """
    from safe_ckpt.deepspeed import nested

    nested.resume_swapped(core, {TAG: strategy.deepspeed_engine}, path, optimizer_states=fitting)
