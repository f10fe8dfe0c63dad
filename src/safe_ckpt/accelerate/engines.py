"""DeepSpeed under an Accelerator: what ``save_state`` has its engines write, and what ``load_state`` needs besides.

Accelerate starts DeepSpeed on accelerators only. It was run here on two gloo processes that were told their numbers by hand;
on GPUs it was never run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import utils
from accelerate.utils import DistributedType

from safe_ckpt.adapters import Engine

if TYPE_CHECKING:
    from safe_ckpt.deepspeed.nested import Nested


def of(accelerator: Any) -> dict[str, Any]:
    """The tag that Accelerate gives each DeepSpeed engine -> the engine; nothing without DeepSpeed."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return {}
    names = [utils.MODEL_NAME, *(f"{utils.MODEL_NAME}_{number}" for number in range(1, len(accelerator._models)))]
    return dict(zip(names, accelerator._models, strict=False))


def plain_schedulers(accelerator: Any) -> list[Any]:
    """The schedulers that are saved by themselves: DeepSpeed saves its own."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return list(accelerator._schedulers)
    return [one for one in accelerator._schedulers if not isinstance(one, utils.DeepSpeedSchedulerWrapper)]


def collect(core: Engine, accelerator: Any, arguments: Mapping[str, Any]) -> Nested | None:
    """What the engines would write; None without DeepSpeed. Every rank calls this.

    Args:
        core: where the ranks meet.
        accelerator: whose engines.
        arguments: of ``save_state``, for ``save_checkpoint``.

    Raises:
        TypeError: there is an argument that is not for here.
        SafeCheckpointError: see ``nested.collect``.
    """
    engines = of(accelerator)
    if not engines:
        return None
    from safe_ckpt.deepspeed import nested

    known = {key: arguments[key] for key in ("client_state", "exclude_frozen_parameters") if key in arguments}
    unknown = set(arguments) - set(known) - {"save_latest"}
    if unknown:
        raise TypeError(f"save_state: unexpected arguments for DeepSpeed: {', '.join(sorted(unknown))}")
    return nested.collect(
        core,
        engines,
        known.get("client_state") or {},
        exclude_frozen_parameters=bool(known.get("exclude_frozen_parameters", False)),
        save_latest=bool(arguments.get("save_latest", True)),
    )


def loading(core: Engine, accelerator: Any, path: Path) -> contextlib.AbstractContextManager[None]:
    """Within this block the engines may load. Every rank enters it.

    Raises:
        SafeCheckpointError: see ``nested.loading``.
    """
    engines = of(accelerator)
    if not engines:
        return contextlib.nullcontext()
    from safe_ckpt.deepspeed import nested

    return nested.loading(core, engines, path)


def resume(core: Engine, accelerator: Any, path: Path, arguments: Mapping[str, Any]) -> None:
    """After ``load_state``: what DeepSpeed leaves out with NVMe offload. Every rank calls this.

    Raises:
        SafeCheckpointError: see ``nested.resume_swapped``.
    """
    engines = of(accelerator)
    if engines:
        from safe_ckpt.deepspeed import nested

        wanted = bool(arguments.get("load_optimizer_states", True)) and not arguments.get("load_module_only", False)
        nested.resume_swapped(core, engines, path, optimizer_states=wanted)
