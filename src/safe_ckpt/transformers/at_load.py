"""Models that Transformers shards when it loads them (``DistributedConfig``): tensor parallelism and FSDP2 without Accelerate.

The Trainer gathers their weights for ``save_pretrained``'s files and refuses to resume them: its optimizer file would hold
the parts of process 0 alone. Here every process writes its parts of model and optimizer besides, and reads its own.

Run on gloo processes on the CPU; on GPUs it was never run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from accelerate.utils.constants import FSDP_MODEL_NAME
from accelerate.utils.constants import OPTIMIZER_NAME as OPTIMIZER_STEM
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from safe_ckpt.adapters import Engine, Patch, parts
from safe_ckpt.adapters.extras import dtensor, gather_nested, hugging_face, presence
from safe_ckpt.errors import ConfigError, RestoreError

MODEL_FOLDER = f"{FSDP_MODEL_NAME}_0"
OPTIMIZER_FOLDER = f"{OPTIMIZER_STEM}_0"
"""The names that Accelerate gives with FSDP2."""
SCHEDULER = "scheduler.pt"
NOT_WRITTEN = ("optimizer.pt",)
"""Files that the Trainer writes of process 0 alone."""
_GATHER = "gather_sharded_state_dict_for_save"
_BARRIER = "barrier_after_gathered_checkpoint_save"


def came_in_parts(trainer: Any) -> bool:
    """Whether the model came to the Trainer in parts: its parameters are DTensors."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return False
    return isinstance(trainer.model, torch.nn.Module) and dtensor.has_parts(trainer.model)


def refusal(model: Any) -> str:
    """Why the checkpoints of a model that is sharded at load are not covered; "" where they are."""
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    if not getattr(model, "is_distributed_loading_by_transformers", False) or config is None:
        return "its parameters are DTensors, and it was not loaded with a DistributedConfig"
    if not all(hasattr(model, name) for name in (_GATHER, _BARRIER)):
        return "this release of Transformers gathers its weights in another way"
    if getattr(config, "pp_size", 1) != 1:
        return "with pipeline parallelism every process has other layers"
    if getattr(model, "peft_config", None) is not None or getattr(model, "hf_quantizer", None) is not None:
        return "it has adapters or is quantized"
    return ""


def check(trainer: Any) -> None:
    """Refuse what is not covered.

    Raises:
        ConfigError: says why.
    """
    why = refusal(trainer.model)
    if why:
        message = f"a model that is sharded when it is loaded is not covered here: {why}. Use the stock Trainer"
        raise ConfigError(key="model", message=message)


def admit(model: Any, arguments: Any, patch: Patch) -> None:
    """Let a Trainer be made although it cannot resume such a model: with us it can.

    Its check asks for ``save_only_model``. Where we do not resume the model, it refuses as always.

    Args:
        model: of the Trainer that is being made.
        arguments: of the same.
        patch: what is changed until it is made.
    """
    sharded = isinstance(model, torch.nn.Module) and getattr(model, "is_distributed_loading_by_transformers", False)
    if sharded and not arguments.save_only_model and not refusal(model):
        patch.put(arguments, {"save_only_model": True})


def gather_with(patch: Patch, trainer: Any, gather: Callable[[Any, Mapping[str, Any]], dict[str, Any]]) -> None:
    """While ``patch`` holds, ``save_pretrained`` gathers by ``gather`` and waits for no other process.

    Args:
        patch: what is changed.
        trainer: whose model.
        gather: gets the model and its state dict; returns whole tensors on process 0.
    """

    def gathered(model: Any, state: Mapping[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        return gather(model, state)

    patch.put(hugging_face.unwrapped(trainer.model), {_GATHER: gathered, _BARRIER: lambda *_: None})


def gathered(engine: Engine, model: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Whole tensors on process 0, nothing elsewhere. Watched: a process that dies meanwhile is named by the others.

    A tied tensor travels once, and its names share one memory as those of the state do.

    Raises:
        SafeCheckpointError: see ``iter_full_tensors``.
    """
    first: dict[int, str] = {}
    alias = {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    once = {name: value for name, value in state.items() if alias.get(name, name) == name or alias[name] not in state}
    whole = gather_nested(once, engine.config.timeouts.lengthy_s, engine.group)
    if whole is None:
        return {}
    return {name: whole[name] if name in whole else whole[alias[name]] for name in state}


def states_by_folder(trainer: Any) -> dict[str, Any]:
    """Folder to the state dict that goes there, of which this process has its parts. On every process."""
    if trainer.args.save_only_model:
        return {}
    return {
        MODEL_FOLDER: parts.model_state(trainer.model),
        OPTIMIZER_FOLDER: parts.optimizer_state(trainer.model, plain(trainer.optimizer)),
    }


def restore_model(engine: Engine, trainer: Any, path: Path) -> bool:
    """Restore the weights, from their parts or from ``save_pretrained``'s files. Every process calls this.

    Returns:
        Whether they were restored: the Trainer reads what has no parts where every process has the whole.

    Raises:
        RestoreError: they do not fit; on every process.
    """
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return False
    folder = path / MODEL_FOLDER
    if engine.agree("parts", must_match={"path": path}, decide=lambda _: parts.is_saved(folder)):
        parts.load_model(engine, folder, trainer.model)
    elif came_in_parts(trainer):
        parts.load_whole(engine, path, trainer.model, functools.partial(_whole, path))
    else:
        return False
    return True


def restore_optimizer(engine: Engine, trainer: Any, path: Path) -> bool:
    """Restore the optimizer and its schedule, as far as the checkpoint has them. Every process calls this.

    Returns:
        Whether there is nothing left to restore; see ``restore_model``.

    Raises:
        RestoreError: they do not fit; on every process.
    """
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return False
    folder = path / OPTIMIZER_FOLDER

    def look(_: object) -> str:
        if parts.is_saved(folder):
            return "parts"
        return "whole" if any(presence.is_there(path / name) for name in NOT_WRITTEN) else ""

    found = engine.agree("parts", must_match={"path": path}, decide=look)
    if found == "parts":
        parts.load_optimizer(engine, folder, trainer.model, plain(trainer.optimizer))
        saved = torch.load(path / SCHEDULER, weights_only=True)
        trainer.lr_scheduler.load_state_dict(_of_groups(saved, trainer.lr_scheduler))
    elif found == "whole" and came_in_parts(trainer):
        message = (
            "its optimizer was saved whole, by numbers; parts of one are found by names. Resume from it with a model that "
            "is not sharded when it is loaded, or delete optimizer.pt there to begin with a fresh optimizer"
        )
        raise RestoreError(path=str(path), key="optimizer", message=message)
    return found == "parts" or came_in_parts(trainer)


def plain(optimizer: Any) -> Any:
    """Without Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _of_groups(saved: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """A schedule's state for the groups of today: there is one for each mesh, and the meshes may be others."""
    groups = plain(scheduler.optimizer).param_groups
    if len(saved.get("base_lrs", groups)) == len(groups):
        return saved
    lists = {"base_lrs": [group["initial_lr"] for group in groups], "_last_lr": [group["lr"] for group in groups]}
    return {**saved, **lists, "lr_lambdas": scheduler.state_dict().get("lr_lambdas")}


def _whole(path: Path) -> dict[str, parts.WholeTensor]:
    """The tensors in ``save_pretrained``'s files, each read when it is fetched."""
    index = path / SAFE_WEIGHTS_INDEX_NAME
    names = [SAFE_WEIGHTS_NAME]
    if index.exists():
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    tensors: dict[str, parts.WholeTensor] = {}
    for name in names:
        file: Any = safetensors.safe_open(path / name, framework="pt")
        for key in file.keys():  # noqa: SIM118 - it is no mapping
            shape = tuple(file.get_slice(key).get_shape())
            tensors[key] = parts.WholeTensor(shape=shape, fetch=functools.partial(file.get_tensor, key))
    return tensors
