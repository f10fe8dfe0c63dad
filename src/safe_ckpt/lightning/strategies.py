"""Strategies that shard the model: what they save, in the layouts that they read, past their own unguarded writing.

``ModelParallelStrategy`` (FSDP2, tensor parallelism) was run with two processes on the CPU. ``FSDPStrategy`` needs a GPU: its
sharded layout is covered by the same code and was never run; its full checkpoints are gathered by Lightning itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safe_ckpt.core.formats import file_plan
from safe_ckpt.core.formats.file_plan import FilePlan
from safe_ckpt.core.formats.manifest import MANIFEST_NAME
from safe_ckpt.core.formats.verify import verify_share
from safe_ckpt.core.saving import resume
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.core.sharding.gather import gather_nested
from safe_ckpt.core.storage import presence
from safe_ckpt.lightning import engines, stand_ins

if TYPE_CHECKING:
    import torch

META = "meta.pt"
METADATA = ".metadata"


@dataclass(frozen=True)
class Layout:
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


def layout_of(strategy: Any) -> Layout | None:
    """What a strategy writes; None for one that leaves its file to the I/O, or that is not covered."""
    names = {base.__name__ for base in type(strategy).__mro__}
    if "ModelParallelStrategy" in names:
        return Layout("state_dict", sharded=bool(strategy._save_distributed_checkpoint), gathers=True)
    if "DeepSpeedStrategy" in names:
        return Layout("", sharded=True, gathers=False, engine=True)
    if "FSDPStrategy" in names:
        return Layout("model", sharded=strategy._state_dict_type == "sharded", gathers=False)
    return None


def is_sharded_directory(path: Path) -> bool:
    """Whether a directory is a sharded checkpoint: ours, or one that Lightning wrote to its end, for this file comes last."""
    return presence.is_file(path / META) or engines.is_tag_directory(path)


def facts_file(path: Path) -> Path:
    """Where a checkpoint says how far the training was: in itself, or in one of the files of a directory."""
    if not presence.is_directory(path):
        return path
    return path / META if presence.is_there(path / META) else engines.facts_file(path)


def dump(trainer: Any, form: Layout, weights_only: bool | None) -> dict[str, Any]:
    """The Trainer's checkpoint with this rank's parts in it; with what Lightning has gathered where it does that.

    A full checkpoint is asked for in parts as well: Lightning would gather it in collectives that nobody watches.
    """
    strategy = trainer.strategy
    if not form.gathers:
        checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only)
        return checkpoint
    before = strategy._save_distributed_checkpoint
    strategy._save_distributed_checkpoint = True
    try:
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only)
    finally:
        strategy._save_distributed_checkpoint = before
    return checkpoint


def split(checkpoint: Mapping[str, Any], form: Layout) -> tuple[dict[str, Any], dict[str, Any]]:
    """What every rank writes its parts of, and what rank 0 writes besides."""
    rest = dict(checkpoint)
    states = {form.key: rest.pop("state_dict")}
    states.update({f"optimizer_{number}": state for number, state in enumerate(rest.pop("optimizer_states", []))})
    return states, rest


def meta_image(rest: Mapping[str, Any]) -> FilePlan:
    """The file for what is not sharded."""
    return file_plan.torch_image(META, dict(rest), strict=False, key="checkpoint")


def whole(engine: Engine, trainer: Any, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Gather a checkpoint of parts: the whole one on rank 0, None elsewhere. Every rank calls this.

    Raises:
        SafeCheckpointError: a rank was lost or left, on every rank.
    """
    parts: dict[str, Any] = {
        name: checkpoint[name] for name in ("state_dict", "optimizer_states") if name in checkpoint
    }
    found = gather_nested(parts, engine.config.timeouts.lengthy_s, engine.group)
    if found is None:
        return None
    model = trainer.strategy.model
    if "optimizer_states" in found:
        found["optimizer_states"] = [_by_number(state, model) for state in found["optimizer_states"]]
    return {**checkpoint, **found}


def _by_number(state: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    # As the strategy does it, so that a full checkpoint also loads without sharding.
    from lightning.pytorch.strategies import model_parallel
    from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

    align: Callable[..., dict[str, Any]] | None = getattr(
        model_parallel, "_align_compiled_param_names_with_module", None
    )
    aligned = align(state, model) if align is not None else state
    return dict(FullyShardedDataParallel.rekey_optim_state_dict(aligned, OptimStateKeyType.PARAM_ID, model))


def guard(trainer: Any, engine: Engine, before: Callable[[], None], end: Callable[[], None]) -> None:
    """Let the strategy load only what all ranks together have verified, if it is a directory of ours, and end the pipeline.

    Args:
        trainer: its strategy reads by itself, and does not tear the I/O down.
        engine: where the ranks meet.
        before: called before it loads: what is in flight must be over.
        end: called when it is torn down.
    """
    strategy = trainer.strategy
    form = layout_of(strategy)
    original = type(strategy).load_checkpoint

    def load(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        before()
        path = Path(checkpoint_path)
        rank, size = engine.rank, engine.coordinator.size

        def look(_: object) -> tuple[bool, bool]:
            folder = presence.is_directory(path)
            return folder, folder and presence.is_there(path / MANIFEST_NAME)

        # As rank 0 sees it: what follows is done on all ranks together or on none.
        is_folder, is_ours = engine.agree("load", must_match={"path": path}, decide=look)
        if is_ours:
            resume.check(engine, path, lambda found: verify_share(found, rank, size))
        if form is None or not form.engine or not is_folder:
            return original(strategy, checkpoint_path, *args, **kwargs)
        with engines.loading(engine, strategy, path):
            loaded = original(strategy, checkpoint_path, *args, **kwargs)
        fitting = str(getattr(trainer.state.fn, "value", "")) == "fit"
        engines.resume(engine, strategy, path, fitting=fitting)
        return loaded

    def teardown() -> None:
        stand_ins.take_away(strategy, "load_checkpoint", "teardown")
        try:
            end()
        finally:
            type(strategy).teardown(strategy)

    stand_ins.put(strategy, "load_checkpoint", load)
    stand_ins.put(strategy, "teardown", teardown)
