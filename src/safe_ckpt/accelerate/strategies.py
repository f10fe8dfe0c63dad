"""FSDP2 under an Accelerator: the directories or files that ``save_fsdp_model`` and ``save_fsdp_optimizer`` would write.

Accelerate offers FSDP2 on accelerators only. It was run here on two gloo processes whose Accelerator was told by hand that it
is one of FSDP; on GPUs it was never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME

from safe_ckpt.adapters import Engine, FilePlan, file_plan, raise_first
from safe_ckpt.adapters.sharding import gather_whole, shard_planner
from safe_ckpt.errors import CoordinationError, to_wire

if TYPE_CHECKING:
    from safe_ckpt.adapters import ShardPlanner


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
    wire = to_wire(problem, rank=engine.rank, phase="planning the save") if problem else None
    engine.agree("gather", {}, answer=wire, decide=raise_first)
    found = gather_whole(engine, states)
    if found is None:
        return []
    planned = []
    for folder, state in found.items():
        (inner,) = state.values()
        name = f"{folder.removesuffix('_0')}.bin"  # as Accelerate: the first one has no number
        planned.append(file_plan.torch_image(name, inner, strict=False, key=name))
    return planned
