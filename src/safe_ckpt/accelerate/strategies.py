"""FSDP2 and DeepSpeed under an Accelerator.

FSDP2: the directories or files that ``save_fsdp_model`` and ``save_fsdp_optimizer`` would write. DeepSpeed: what ``save_state``
has its engines write, and what ``load_state`` needs besides.

Accelerate offers both on accelerators only. They were run here on two gloo processes whose Accelerator was set by hand; on GPUs
they were never run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import utils
from accelerate.utils import DistributedType
from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME

from safe_ckpt.adapters import Engine, FilePlan, ShardPlanner, reraise, torch_archive
from safe_ckpt.adapters.planned import Planned
from safe_ckpt.adapters.sharding import gather_whole, shard_planner
from safe_ckpt.errors import CoordinationError


def is_sharding(accelerator: Any) -> bool:
    """Whether FSDP2 shards the models of this Accelerator."""
    return bool(getattr(accelerator, "is_fsdp2", False))


def planner(engine: Engine, accelerator: Any) -> ShardPlanner | None:
    """What plans the shards; None where nothing is sharded."""
    if not is_sharding(accelerator):
        return None
    return shard_planner(engine)


def folders(accelerator: Any) -> list[str]:
    """The directories within a checkpoint; none where whole files are written."""
    if not is_sharding(accelerator) or _writes_whole(accelerator):
        return []
    models = [f"{FSDP_MODEL_NAME}_{number}" for number in range(len(accelerator._models))]
    return models + [f"{OPTIMIZER_NAME}_{number}" for number in range(len(accelerator._optimizers))]


def images(
    engine: Engine, shards: ShardPlanner, accelerator: Any, problem: Exception | None
) -> tuple[list[FilePlan], Exception | None]:
    """The files of this rank; what went wrong, where it did. Every rank calls this, also one that has a problem already."""
    states: dict[str, Any] = {}
    if problem is None:
        try:
            states = _states(accelerator)
        except Exception as error:  # the other ranks must learn of it
            problem = error
    try:
        if _writes_whole(accelerator):
            return _whole(engine, states, problem), problem
        return shards.images(states, problem), problem
    except CoordinationError:
        raise
    except Exception as error:  # the same on all ranks
        return [], error


def _writes_whole(accelerator: Any) -> bool:
    return str(getattr(accelerator.state.fsdp_plugin.state_dict_type, "name", "")) == "FULL_STATE_DICT"


def _states(accelerator: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    found: dict[str, Any] = {}
    for number, model in enumerate(accelerator._models):
        found[f"{FSDP_MODEL_NAME}_{number}"] = {"model": get_model_state_dict(model)}
    for number, optimizer in enumerate(accelerator._optimizers):
        plain = getattr(optimizer, "optimizer", optimizer)
        state = get_optimizer_state_dict(accelerator._models[number], plain)
        found[f"{OPTIMIZER_NAME}_{number}"] = {"optimizer": state}
    return found


def _whole(engine: Engine, states: Mapping[str, Any], problem: Exception | None) -> list[FilePlan]:
    engine.agree("gather", local=reraise(problem), phase="planning the save")
    found = gather_whole(engine, states)
    if found is None:
        return []
    planned = []
    for folder, state in found.items():
        (inner,) = state.values()
        name = f"{folder.removesuffix('_0')}.bin"  # as Accelerate: the first one has no number
        planned.append(torch_archive.torch_image(name, inner, strict=False, key=name))
    return planned


def engines_of(accelerator: Any) -> dict[str, Any]:
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


def collect_engines(core: Engine, accelerator: Any, arguments: Mapping[str, Any]) -> Planned | None:
    """What the engines would write; None without DeepSpeed. Every rank calls this.

    Args:
        core: where the ranks meet.
        accelerator: whose engines.
        arguments: of ``save_state``, for ``save_checkpoint``.

    Raises:
        TypeError: there is an argument that is not for here.
        SafeCheckpointError: see ``nested.collect``.
    """
    engines = engines_of(accelerator)
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


def engines_loading(core: Engine, accelerator: Any, path: Path) -> contextlib.AbstractContextManager[None]:
    """Within this block the engines may load. Every rank enters it.

    Raises:
        SafeCheckpointError: see ``nested.loading``.
    """
    engines = engines_of(accelerator)
    if not engines:
        return contextlib.nullcontext()
    from safe_ckpt.deepspeed import nested

    return nested.loading(core, engines, path)


def resume_engines(core: Engine, accelerator: Any, path: Path, arguments: Mapping[str, Any]) -> None:
    """After ``load_state``: what DeepSpeed leaves out with NVMe offload. Every rank calls this.

    Raises:
        SafeCheckpointError: see ``nested.resume_swapped``.
    """
    engines = engines_of(accelerator)
    if engines:
        from safe_ckpt.deepspeed import nested

        wanted = bool(arguments.get("load_optimizer_states", True)) and not arguments.get("load_module_only", False)
        nested.resume_swapped(core, engines, path, optimizer_states=wanted)
