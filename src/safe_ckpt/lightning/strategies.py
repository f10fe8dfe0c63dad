"""Strategies that shard the model: what they save, in the layouts that they read, past their own unguarded writing.

``ModelParallelStrategy`` (FSDP2, tensor parallelism) was run with two processes on the CPU. ``FSDPStrategy`` (FSDP 1), too, in
a subclass that names the device: Lightning starts it on GPUs only. On GPUs neither was run.

DeepSpeed: Lightning starts it on CUDA GPUs only. It was run here with a strategy that is not asked for one, on two processes on
the CPU; on GPUs it was never run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safe_ckpt.adapters import Engine, Patch
from safe_ckpt.adapters.strategy import Strategy
from safe_ckpt.errors import ConfigError
from safe_ckpt.layouts.table import LIGHTNING_TAG

if TYPE_CHECKING:
    import torch

IN_PARTS = ("state_dict", "optimizer_states")
"""The entries of a checkpoint of which every rank may have a part."""


@dataclass(frozen=True)
class Form:
    """How a strategy lays a checkpoint out.

    Attributes:
        key: under which name the model's weights stand in a sharded directory.
        sharded: whether it writes such a directory now, or one whole file.
        gathers: whether whole tensors are gathered here; else Lightning does it.
        engine: whether a DeepSpeed engine has the model.
    """

    key: str
    sharded: bool
    gathers: bool
    engine: bool = False


def form_of(strategy: Any) -> Form | None:
    """Return the form of a strategy's checkpoints; None for one that leaves its file to the I/O, or that is not covered."""
    names = {base.__name__ for base in type(strategy).__mro__}
    if "ModelParallelStrategy" in names:
        return Form("state_dict", sharded=bool(strategy._save_distributed_checkpoint), gathers=True)
    if "DeepSpeedStrategy" in names:
        return Form("", sharded=True, gathers=False, engine=True)
    if "FSDPStrategy" in names:
        # On one process, and where nothing is sharded, torch has no parts to give.
        in_parts = strategy.world_size > 1 and getattr(strategy.sharding_strategy, "name", "") != "NO_SHARD"
        return Form("model", sharded=strategy._state_dict_type == "sharded", gathers=in_parts)
    return None


def refuse_hybrid(strategy: Any) -> None:
    """Refuse parts of FSDP 1 of which each group of ranks has all: torch gives the optimizer's moments back wrong.

    Raises:
        ConfigError: names the way and what to use.
    """
    form, way = form_of(strategy), str(getattr(getattr(strategy, "sharding_strategy", None), "name", ""))
    if form is not None and form.sharded and "HYBRID" in way:
        message = f"with {way} in parts the optimizer's moments come back wrong: use state_dict_type='full', or FSDP2"
        raise ConfigError(key="FSDPStrategy.state_dict_type", message=message)


def dump(trainer: Any, form: Form, weights_only: bool | None) -> dict[str, Any]:
    """The Trainer's checkpoint with this rank's parts in it; with what Lightning has gathered where it does that.

    A full checkpoint is asked for in parts as well: Lightning would gather it in collectives that nobody watches.
    """
    strategy = trainer.strategy
    first = "_state_dict_type" in vars(strategy)
    parts: dict[str, Any] = {"_state_dict_type": "sharded"} if first else {"_save_distributed_checkpoint": True}
    with Patch(strategy, parts if form.gathers else {}):
        checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only)
        return checkpoint


def split(checkpoint: Mapping[str, Any], form: Form) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a checkpoint into what every rank writes its parts of, and what rank 0 writes besides."""
    rest = dict(checkpoint)
    states = {form.key: rest.pop("state_dict")}
    states.update({f"optimizer_{number}": state for number, state in enumerate(rest.pop("optimizer_states", []))})
    return states, rest


def whole_states(gathered: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """Whole states as a full checkpoint has them."""
    if "optimizer_states" in gathered:
        gathered["optimizer_states"] = [_by_number(state, model) for state in gathered["optimizer_states"]]
    return gathered


def _by_number(state: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    # As the strategy does it, so that a full checkpoint also loads without sharding.
    from lightning.pytorch.strategies import model_parallel
    from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

    align: Callable[..., dict[str, Any]] | None = getattr(
        model_parallel, "_align_compiled_param_names_with_module", None
    )
    aligned = align(state, model) if align is not None else state
    return dict(FullyShardedDataParallel.rekey_optim_state_dict(aligned, OptimStateKeyType.PARAM_ID, model))


class GuardingSaver(Protocol):
    """The parts of a saver that guard a strategy's load and its end; see ``TrainerSaver`` for the attributes."""

    engine: Engine
    undo: Patch

    def land(self) -> None:
        """Wait until nothing is in flight."""

    def is_directory(self, path: Path, call: str) -> bool:
        """Whether there is a directory, as rank 0 sees it."""

    def trusts(self, path: Path) -> bool:
        """Whether all ranks together have verified this one a moment ago."""

    def verify(self, path: Path) -> None:
        """Verify one checkpoint, each rank a share."""

    def end(self) -> None:
        """Finish what is in flight, and close."""


def guard(trainer: Any, saver: GuardingSaver) -> None:
    """Let the strategy load only what all ranks together have verified, if it is a directory of ours, and end the pipeline.

    Args:
        trainer: its strategy reads by itself, and does not tear the I/O down.
        saver: what is in flight is over before it loads; ended when it is torn down.
    """
    strategy, engine = trainer.strategy, saver.engine
    form = form_of(strategy)
    original = type(strategy).load_checkpoint

    def load(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        saver.land()
        path = Path(checkpoint_path)

        is_folder = saver.is_directory(path, "load")
        if is_folder and not saver.trusts(path):
            saver.verify(path)
        loading: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if form is not None and form.engine and is_folder:
            fitting = str(getattr(trainer.state.fn, "value", "")) == "fit"
            loading = engine_of(engine, strategy).loading(path, optimizer_states=fitting)
        with loading:
            return original(strategy, checkpoint_path, *args, **kwargs)

    def teardown() -> None:
        try:
            saver.end()
        finally:
            type(strategy).teardown(strategy)

    saver.undo.put_methods(strategy, {"load_checkpoint": load, "teardown": teardown})


def engine_of(core: Engine, strategy: Any) -> Strategy:
    """Return the strategy that lays out the checkpoints of a DeepSpeed engine."""
    from safe_ckpt.deepspeed.nested import EngineWrites

    return EngineWrites(core, {LIGHTNING_TAG: strategy.deepspeed_engine})


def for_engine(strategy: Any, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """How the engine is to save, with the rest of the Trainer's checkpoint in what it writes."""
    rest = {key: value for key, value in checkpoint.items() if key not in IN_PARTS}
    frozen = bool(getattr(strategy, "exclude_frozen_parameters", False))
    return {LIGHTNING_TAG: {"client_state": rest, "exclude_frozen_parameters": frozen}}
