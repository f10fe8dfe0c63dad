"""FSDP 1, FSDP2 and DeepSpeed under an Accelerator.

FSDP: the directories or files that ``save_fsdp_model`` and ``save_fsdp_optimizer`` would write. DeepSpeed: what ``save_state``
has its engines write, and what ``load_state`` needs besides.

FSDP 1 is asked for parts also where whole files are written: it would gather whole tensors in collectives that nobody watches.
To make the parts it puts each of its units together on all ranks, in collectives of torch's own.

Accelerate offers both on accelerators only. They were run here on two gloo processes whose Accelerator was set by hand; on GPUs
they were never run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import accelerator as upstream
from accelerate import utils
from accelerate.utils import DistributedType
from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME

from safe_ckpt.adapters import Attempt, Engine, FilePlan, Patch, Planned, torch_file
from safe_ckpt.adapters.extras import is_divided, reraise
from safe_ckpt.adapters.strategy import Sharded, Strategy, Whole

if TYPE_CHECKING:
    import torch

_ARGUMENTS = {"client_state", "exclude_frozen_parameters", "save_latest"}
"""Those of ``save_state`` that DeepSpeed's ``save_checkpoint`` takes."""


def is_sharding(accelerator: Any) -> bool:
    """Whether FSDP, of either version, shards the models of this Accelerator."""
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def is_first_version(accelerator: Any) -> bool:
    """Whether that is FSDP 1, whose state dicts are collectives."""
    return is_sharding(accelerator) and not getattr(accelerator, "is_fsdp2", False)


class Parts:
    """Lays out what FSDP shards and what DeepSpeed's engines have, for one save after another. Every rank has one.

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
            return self._divided(attempt)
        states: dict[str, Any] = {}
        with attempt.meeting():
            if is_first_version(accelerator):
                self._engine.agree("state dicts", local=reraise(attempt.error), phase="planning the save")
        if attempt.error is None:
            with attempt:
                states = self._states()
        if str(getattr(accelerator.state.fsdp_plugin.state_dict_type, "name", "")) == "FULL_STATE_DICT":
            return self._whole.plan(states, attempt)
        models = {f"{FSDP_MODEL_NAME}_{number}": one for number, one in enumerate(accelerator._models)}
        return self._sharded.plan(states, attempt, models)

    def of_model(self, model: torch.nn.Module) -> dict[str, Any]:
        """The state dict of a model that FSDP 1 shards, with this rank's parts in it. Every rank calls this; all have met.

        Raises:
            SafeCheckpointError: it could not be asked for on some rank.
        """
        states: list[dict[str, Any]] = []

        def ask() -> None:
            states.append(model_in_parts(model, first=True))

        self._engine.agree("state dict", local=ask, phase="planning the weights")
        return states[0]

    def loading(self, path: Path, arguments: Mapping[str, Any]) -> contextlib.AbstractContextManager[object]:
        """Within this block the framework may load. At its end all of its state is restored. Every rank enters it.

        Args:
            path: the checkpoint.
            arguments: of ``load_state``, for DeepSpeed's ``load_checkpoint``.
        """
        wanted = bool(arguments.get("load_optimizer_states", True)) and not arguments.get("load_module_only", False)
        engines = engines_of(self._accelerator)
        if is_sharding(self._accelerator):
            return restoring_optimizers(upstream)
        strategy = self._writes(engines) if engines else self._sharded
        return strategy.loading(path, optimizer_states=wanted)

    def _writes(self, engines: Mapping[str, Any]) -> Strategy:
        from safe_ckpt.deepspeed.nested import EngineWrites

        return EngineWrites(self._engine, engines)

    def _divided(self, attempt: Attempt) -> Planned:
        """The files of optimizers of which each rank has a part: rank 0 gets all, in collectives of torch's own."""
        optimizers = plain_optimizers(self._accelerator)
        found = {number: one for number, one in enumerate(optimizers) if is_divided(one)}
        files: list[FilePlan] = []
        if not found:
            return Planned()
        with attempt.meeting():
            self._engine.agree("optimizers", local=reraise(attempt.error), phase="planning the save")
        for number, one in found.items() if attempt.error is None else ():
            with attempt:
                one.consolidate_state_dict(to=0)
                if self._engine.rank == 0:
                    name = f"{OPTIMIZER_NAME}_{number}" if number else OPTIMIZER_NAME
                    files.append(torch_file(f"{name}.bin", one.state_dict()))
        return Planned(files=files, error=attempt.error)

    def _states(self) -> dict[str, Any]:
        first, models, states = is_first_version(self._accelerator), self._accelerator._models, dict[str, Any]()
        for number, model in enumerate(models):
            states[f"{FSDP_MODEL_NAME}_{number}"] = {"model": model_in_parts(model, first=first)}
        for number, optimizer in enumerate(plain_optimizers(self._accelerator)):
            state = optimizer_in_parts(models[number], optimizer, first=first)
            states[f"{OPTIMIZER_NAME}_{number}"] = {"optimizer": state}
        return states


def model_in_parts(model: torch.nn.Module, *, first: bool) -> dict[str, Any]:
    """The state dict of a model that FSDP shards, of which this rank has parts. With its first version a collective."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    if not first:
        return get_model_state_dict(model)
    with _in_parts(model):
        return model.state_dict()


def optimizer_in_parts(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, first: bool) -> dict[str, Any]:
    """The same of the optimizer that steps its parameters, by their names."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not first:
        return get_optimizer_state_dict(model, optimizer)
    with _in_parts(model):
        return FullyShardedDataParallel.optim_state_dict(model, optimizer)


def restoring_optimizers(module: Any) -> Patch:
    """Within it Accelerate's function that loads an optimizer's parts restores all of them, and steps no gradient scaler.

    With FSDP 1 it asks the optimizer what there is to load: before the first step that is nothing, and nothing is loaded. With
    FSDP2 torch takes a step to make room: Accelerate's wrapper would have the scaler take it, too.

    Args:
        module: has ``load_fsdp_optimizer``, and calls it.
    """
    stock: Callable[..., None] = module.load_fsdp_optimizer

    @functools.wraps(stock)
    def load(
        plugin: Any, accelerator: Any, optimizer: Any, model: Any, folder: Any, number: int = 0, **more: Any
    ) -> None:
        if (
            plugin.fsdp_version == 1
            and plugin.state_dict_type.name == "SHARDED_STATE_DICT"
            and more.get("use_dcp", True)
        ):
            _load_parts(optimizer, model, Path(folder) / f"{OPTIMIZER_NAME}_{number}")
        else:
            stock(plugin, accelerator, getattr(optimizer, "optimizer", optimizer), model, folder, number, **more)

    return Patch(module, {"load_fsdp_optimizer": load})


@contextlib.contextmanager
def scaler_apart(accelerator: Any, path: Path) -> Iterator[None]:
    """Within it Accelerate loads all but the gradient scaler with FSDP2; that is restored at the end.

    Accelerate loads it first, and initializes it by hand: in a process where it was used that raises an AssertionError.
    """
    scaler = accelerator.scaler
    if scaler is None or not is_sharding(accelerator) or is_first_version(accelerator):
        yield
        return
    with Patch(accelerator, {"scaler": None}):
        yield
    scaler.load_state_dict(utils.load(path / utils.SCALER_NAME))


def _load_parts(optimizer: Any, model: torch.nn.Module, folder: Path) -> None:
    """Load what the checkpoint has, as torch's documentation says for FSDP 1 and Lightning does."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel

    with _in_parts(model):
        reader = FileSystemReader(folder)
        loaded = load_sharded_optimizer_state_dict(model.state_dict(), "optimizer", reader)["optimizer"]
        plain = getattr(optimizer, "optimizer", optimizer)
        optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, plain, loaded))


def _in_parts(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Within it FSDP 1 gives each rank its parts, in host memory; all of it where nothing is sharded, as on one process."""
    from torch.distributed import fsdp

    units = fsdp.FullyShardedDataParallel.fsdp_modules(model)
    if any(unit.sharding_strategy == fsdp.ShardingStrategy.NO_SHARD for unit in units):
        kind: Any = fsdp.StateDictType.FULL_STATE_DICT
        forms: Any = fsdp.FullStateDictConfig(), fsdp.FullOptimStateDictConfig()
    else:
        kind = fsdp.StateDictType.SHARDED_STATE_DICT
        forms = fsdp.ShardedStateDictConfig(offload_to_cpu=True), fsdp.ShardedOptimStateDictConfig(offload_to_cpu=True)
    return fsdp.FullyShardedDataParallel.state_dict_type(model, kind, *forms)


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
