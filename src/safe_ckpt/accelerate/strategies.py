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

from safe_ckpt.adapters import Attempt, Engine, FilePlan, Planned, torch_file
from safe_ckpt.adapters.planning import Shards, gather_whole, reraise

_ARGUMENTS = {"client_state", "exclude_frozen_parameters", "save_latest"}
"""Those of ``save_state`` that DeepSpeed's ``save_checkpoint`` takes."""


def is_sharding(accelerator: Any) -> bool:
    """Whether FSDP2 shards the models of this Accelerator."""
    return bool(getattr(accelerator, "is_fsdp2", False))


class ShardedStates:
    """Plans what FSDP2 shards, for one save after another. Every rank has one.

    Args:
        engine: where the ranks meet.
        accelerator: whose models.
    """

    def __init__(self, engine: Engine, accelerator: Any) -> None:
        self._engine = engine
        self._accelerator = accelerator
        self._shards = Shards(engine)

    def plan(self, attempt: Attempt) -> Planned:
        """The files of this rank. Every rank calls this, also one whose ``attempt`` has failed already."""
        states: dict[str, Any] = {}
        if attempt.error is None:
            with attempt:
                states = self._states()
        if str(getattr(self._accelerator.state.fsdp_plugin.state_dict_type, "name", "")) != "FULL_STATE_DICT":
            models = {f"{FSDP_MODEL_NAME}_{number}": one for number, one in enumerate(self._accelerator._models)}
            files = self._shards.files(states, attempt, models)
            return Planned(files=files, folders=list(states), error=attempt.error)
        files = []
        with attempt.meeting():
            files = self._gathered(states, attempt)
        return Planned(files=files, error=attempt.error)

    def _states(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        models, states = self._accelerator._models, dict[str, Any]()
        for number, model in enumerate(models):
            states[f"{FSDP_MODEL_NAME}_{number}"] = {"model": get_model_state_dict(model)}
        for number, optimizer in enumerate(plain_optimizers(self._accelerator)):
            state = get_optimizer_state_dict(models[number], optimizer)
            states[f"{OPTIMIZER_NAME}_{number}"] = {"optimizer": state}
        return states

    def _gathered(self, states: Mapping[str, Any], attempt: Attempt) -> list[FilePlan]:
        self._engine.agree("gather", local=reraise(attempt.error), phase="planning the save")
        files = []
        for folder, state in (gather_whole(self._engine, states) or {}).items():
            (inner,) = state.values()
            files.append(
                torch_file(f"{folder.removesuffix('_0')}.bin", inner)
            )  # as Accelerate: the first has no number
        return files


def plain_optimizers(accelerator: Any) -> list[Any]:
    """The optimizers without Accelerate's wrapper."""
    return [getattr(optimizer, "optimizer", optimizer) for optimizer in accelerator._optimizers]


def plain_schedulers(accelerator: Any) -> list[Any]:
    """The schedulers that Accelerate saves; DeepSpeed saves its own."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return list(accelerator._schedulers)
    return [one for one in accelerator._schedulers if not isinstance(one, utils.DeepSpeedSchedulerWrapper)]


def engines_of(accelerator: Any) -> dict[str, Any]:
    """The tag that Accelerate gives each DeepSpeed engine -> the engine; nothing without DeepSpeed."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return {}
    names = [utils.MODEL_NAME, *(f"{utils.MODEL_NAME}_{number}" for number in range(1, len(accelerator._models)))]
    return dict(zip(names, accelerator._models, strict=False))


def collect_engines(core: Engine, accelerator: Any, arguments: Mapping[str, Any]) -> Planned:
    """What DeepSpeed's engines would write; nothing without DeepSpeed. Every rank calls this.

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
        return Planned()
    from safe_ckpt.deepspeed import nested

    if unknown := sorted(set(arguments) - _ARGUMENTS):
        raise TypeError(f"save_state: unexpected arguments for DeepSpeed: {', '.join(unknown)}")
    return nested.collect(core, engines, **arguments)


def loading(
    core: Engine, accelerator: Any, path: Path, arguments: Mapping[str, Any]
) -> contextlib.AbstractContextManager[None]:
    """Within this block DeepSpeed's engines may load. At its end all of their state is restored. Every rank enters it.

    Args:
        core: where the ranks meet.
        accelerator: whose engines.
        path: the checkpoint.
        arguments: of ``load_state``, for ``load_checkpoint``.

    Raises:
        SafeCheckpointError: see ``nested.loading``.
    """
    engines = engines_of(accelerator)
    if not engines:
        return contextlib.nullcontext()
    from safe_ckpt.deepspeed import nested

    wanted = bool(arguments.get("load_optimizer_states", True)) and not arguments.get("load_module_only", False)
    return nested.loading(core, engines, path, optimizer_states=wanted)
