"""The NVMe swap files of a DeepSpeed engine: where they are, what they are called in a checkpoint, and how they come back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.ds_to_universal import dp_index_to_str

from safe_ckpt.core import resume
from safe_ckpt.core.engine import Engine
from safe_ckpt.core.manifest import MANIFEST_NAME, read_manifest
from safe_ckpt.core.offload import Parts, agree_parts
from safe_ckpt.core.onload import Part, give_back, parts_of
from safe_ckpt.errors import RestoreError

FOLDER = "offloaded_tensors"
NOTE = "offloaded"
IGNORED = ("*gradient*",)  # as DeepSpeed: they are of no use at a step's boundary


def part(engine: Any) -> dict[str, Path]:
    """The folder of this rank's swap files by the name that DeepSpeed gives it; nothing without NVMe offload."""
    if not engine.zero_nvme_offload_optimizer():
        return {}
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    return {f"rank{dp_index_to_str(rank)}": Path(engine.optimizer.optimizer_swapper.swap_folder)}


def agree(core: Engine, engine: Any, below: str = "") -> Parts | None:
    """What is to be copied into a checkpoint; None without NVMe offload. Every rank calls this.

    Args:
        core: where the ranks meet.
        engine: whose files.
        below: where the tag lies in the checkpoint, with a slash at its end; "" when it is the checkpoint.

    Raises:
        SafeCheckpointError: see ``consolidate_offloaded``.
    """
    own = part(engine)
    return agree_parts(core, own, IGNORED, prefix=f"{below}{FOLDER}/") if own else None


def put_back(core: Engine, engine: Any, checkpoint: Path, below: str = "") -> None:
    """After ``load_checkpoint``: give this rank its own files if DeepSpeed took another rank's. Every rank calls this.

    Two nodes may have stored folders of one name (``use_node_local_storage``); DeepSpeed knows them by that name alone.

    Args:
        core: where the ranks meet.
        engine: what was loaded.
        checkpoint: the directory with the manifest.
        below: see ``agree``.

    Raises:
        SafeCheckpointError: see ``restore_offloaded``.
    """
    own = part(engine)
    if not own:
        return
    view = {"tag": checkpoint / below}
    if not core.agree("swap files", view, decide=lambda _: _were_renamed(checkpoint, below)):
        return

    def find() -> list[Part]:
        manifest = read_manifest(checkpoint)
        return parts_of(checkpoint, manifest, manifest.notes[NOTE][below], own, core.rank, f"{below}{FOLDER}/")

    give_back(core.session, find, core.config.timeouts.lengthy_s)
    engine.optimizer.reset_swap_buffers()


def _were_renamed(checkpoint: Path, below: str) -> bool:
    """Rank 0: whether some rank's files are not under the name that DeepSpeed looks for."""
    if not (checkpoint / MANIFEST_NAME).exists():
        return False
    notes = read_manifest(checkpoint).notes.get(NOTE, {}).get(below, ())
    return any(note["name"] != note["asked"] for note in notes)


def resume_all(core: Engine, engines: Mapping[Path, Any], *, optimizer_states: bool) -> None:
    """After ``load_checkpoint`` with NVMe offload: what DeepSpeed leaves as it was before. Every rank calls this.

    DeepSpeed (up to 0.19.8) copies the swap files back and stops there: the optimizer knows of no state, so that it begins
    with zero moments at step 0, and parameters too small to be swapped keep their initial values. Here the states are made
    known again, with their files, and the small ones are restored.

    Args:
        core: where the ranks meet.
        engines: tag that was loaded -> what it was loaded into.
        optimizer_states: whether the optimizer's states are wanted.

    Raises:
        RestoreError: the swap files belong to parameters of other numbers.
        SafeCheckpointError: whatever else went wrong, on every rank.
    """
    swapped = {tag: engine for tag, engine in engines.items() if engine.zero_nvme_offload_optimizer()}
    if not swapped:
        return

    def states() -> None:
        for tag, engine in swapped.items():
            _resume_states(engine, tag, optimizer_states=optimizer_states)

    def gather() -> None:
        for engine in swapped.values():
            engine.optimizer.checkpoint_event_epilogue()

    # A collective only when all have come so far.
    resume.apply(core, states)
    resume.apply(core, gather)


def _resume_states(engine: Any, tag: Path, *, optimizer_states: bool) -> None:
    optimizer = engine.optimizer
    saved = torch.load(engine._get_zero_ckpt_name(str(tag.parent), tag.name), map_location="cpu", weights_only=False)
    state = saved["optimizer_state_dict"]
    (folder,) = part(engine).values()
    _expect_files(optimizer, tag, folder)
    optimizer.checkpoint_event_prologue()
    if optimizer_states:
        _load_states(optimizer, state)
    for number, kept in enumerate(state["fp32_flat_groups"]):
        if kept.numel():  # it was in memory
            optimizer.fp32_partitioned_groups_flat[number].data.copy_(kept.data)
            optimizer._reassign_or_swap_out_partitioned_parameters(number)


def _expect_files(optimizer: Any, tag: Path, folder: Path) -> None:
    for number in _swapped(optimizer):
        parameter = optimizer.fp32_partitioned_groups_flat[number]
        file = f"{parameter.ds_id}.tensor.swp"
        if not any((tag / FOLDER).glob(f"*/{file}")):
            message = (
                f"it holds no {file}: DeepSpeed numbers parameters as they are made, so load it in a process that has made "
                f"no other model before, as the one that saved it"
            )
            raise RestoreError(path=str(tag), key=str(folder), message=message)


def _swapped(optimizer: Any) -> list[int]:
    return [number for number in range(len(optimizer.fp16_groups)) if optimizer._swappable_optimizer_subgroup(number)]


def _load_states(optimizer: Any, state: Mapping[str, Any]) -> None:
    optimizer.loss_scaler = state["loss_scaler"]
    optimizer.dynamic_loss_scale = state["dynamic_loss_scale"]
    optimizer.overflow = state["overflow"]
    base = state["optimizer_state_dict"]
    # The order of the parameters in a state dict is that of their groups.
    numbers = [number for group in base["param_groups"] for number in group["params"]]
    sizes = dict(zip(numbers, _in_order(optimizer), strict=True))
    optimizer.optimizer_swapper.purge_state()
    optimizer._set_fp32_optimizer_param_groups()
    try:
        optimizer.optimizer.load_state_dict(
            {**base, "state": {key: _with_room(value, sizes[key]) for key, value in base["state"].items()}}
        )
    finally:
        optimizer._clear_fp32_optimizer_param_groups()
    for number in _swapped(optimizer):
        # Looking it up makes the states known; their memory is of no use before they are read from their files.
        optimizer.optimizer_swapper._get_param_swap_info(
            optimizer.fp32_partitioned_groups_flat[number]
        ).release_memory()


def _in_order(optimizer: Any) -> list[int]:
    by_group: dict[int, list[int]] = {}
    for number, numel in enumerate(optimizer.fp16_partitioned_groups_flat_numel):
        by_group.setdefault(optimizer.sub_group_to_group_id[number], []).append(numel)
    return [numel for group in sorted(by_group) for numel in by_group[group]]


def _with_room(values: Mapping[str, Any], numel: int) -> dict[str, Any]:
    """The states of one parameter; those that are in files get memory that is never touched: only its size counts."""
    return {
        name: torch.empty(numel, dtype=value.dtype) if torch.is_tensor(value) and not value.numel() else value
        for name, value in values.items()
    }
