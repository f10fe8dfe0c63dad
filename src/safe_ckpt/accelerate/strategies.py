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
from safe_ckpt.adapters.strategy import Sharded, Strategy, Whole

_ARGUMENTS = {"client_state", "exclude_frozen_parameters", "save_latest"}
"""Those of ``save_state`` that DeepSpeed's ``save_checkpoint`` takes."""


def is_sharding(accelerator: Any) -> bool:
    """Whether FSDP2 shards the models of this Accelerator."""
    return bool(getattr(accelerator, "is_fsdp2", False))


class Parts:
    """Lays out what FSDP2 shards and what DeepSpeed's engines have, for one save after another. Every rank has one.

    Args:
        engine: where the ranks meet.
        accelerator: whose models.
    """

    def __init__(self, engine: Engine, accelerator: Any) -> None:
        self._engine = engine
        self._accelerator = accelerator
        self._sharded = Sharded(engine)
        self._whole = Whole(engine, _as_accelerate)

    def plan(self, attempt: Attempt, arguments: Mapping[str, Any]) -> Planned:
        """The files of this rank; none where each rank has all. Every rank calls this, also one whose ``attempt`` has failed.

        Args:
            attempt: gets what goes wrong here.
            arguments: of ``save_state``, for DeepSpeed's ``save_checkpoint``.

        Raises:
            TypeError: there is an argument that is not for here.
        """
        accelerator = self._accelerator
        if engines := engines_of(accelerator):
            if unknown := sorted(set(arguments) - _ARGUMENTS):
                raise TypeError(f"save_state: unexpected arguments for DeepSpeed: {', '.join(unknown)}")
            return self._writes(engines).plan(dict.fromkeys(engines, arguments), attempt)
        if not is_sharding(accelerator):
            return Planned()
        states: dict[str, Any] = {}
        if attempt.error is None:
            with attempt:
                states = self._states()
        if str(getattr(accelerator.state.fsdp_plugin.state_dict_type, "name", "")) == "FULL_STATE_DICT":
            return self._whole.plan(states, attempt)
        models = {f"{FSDP_MODEL_NAME}_{number}": one for number, one in enumerate(accelerator._models)}
        return self._sharded.plan(states, attempt, models)

    def loading(self, path: Path, arguments: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
        """Within this block the framework may load. At its end all of its state is restored. Every rank enters it.

        Args:
            path: the checkpoint.
            arguments: of ``load_state``, for DeepSpeed's ``load_checkpoint``.
        """
        wanted = bool(arguments.get("load_optimizer_states", True)) and not arguments.get("load_module_only", False)
        engines = engines_of(self._accelerator)
        strategy = self._writes(engines) if engines else self._sharded
        return strategy.loading(path, optimizer_states=wanted)

    def _writes(self, engines: Mapping[str, Any]) -> Strategy:
        from safe_ckpt.deepspeed.nested import EngineWrites

        return EngineWrites(self._engine, engines)

    def _states(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        models, states = self._accelerator._models, dict[str, Any]()
        for number, model in enumerate(models):
            states[f"{FSDP_MODEL_NAME}_{number}"] = {"model": get_model_state_dict(model)}
        for number, optimizer in enumerate(plain_optimizers(self._accelerator)):
            state = get_optimizer_state_dict(models[number], optimizer)
            states[f"{OPTIMIZER_NAME}_{number}"] = {"optimizer": state}
        return states


def _as_accelerate(gathered: Mapping[str, Mapping[str, Any]]) -> list[FilePlan]:
    """Plan a file for each; the first has no number."""
    return [
        torch_file(f"{name.removesuffix('_0')}.bin", inner)
        for name, state in gathered.items()
        for inner in state.values()
    ]


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
