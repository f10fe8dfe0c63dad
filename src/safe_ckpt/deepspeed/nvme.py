"""The NVMe swap files of a DeepSpeed engine: where they are, their names in a checkpoint, and how they are restored."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.ds_to_universal import dp_index_to_str
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from safe_ckpt.adapters import Engine, Planned
from safe_ckpt.adapters.extras import (
    Part,
    agree_parts,
    files_of_parts,
    one_resume,
    own_part,
    presence,
    read_manifest,
    restore_files,
)
from safe_ckpt.adapters.pickles import load_data, refusing
from safe_ckpt.adapters.saver import manifest_of
from safe_ckpt.deepspeed.directories import OFFLOADED
from safe_ckpt.errors import RestoreError, SafeCheckpointError

NOTE = "offloaded"
_CLASSES = (DynamicLossScaler, LossScaler, ZeroStageEnum)  # what DeepSpeed saves beside data
IGNORED = ("*gradient*",)  # as DeepSpeed: they are not needed between two steps


def part(engine: Any) -> dict[str, Path]:
    """The folder of this rank's swap files by the name that DeepSpeed gives it; nothing without NVMe offload."""
    if not engine.zero_nvme_offload_optimizer():
        return {}
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    return {f"rank{dp_index_to_str(rank)}": Path(engine.optimizer.optimizer_swapper.swap_folder)}


def plan_swap_files(core: Engine, engine: Any, below: str = "") -> Planned:
    """Plan what is to be copied into a checkpoint; nothing without NVMe offload. Every rank calls this.

    Args:
        core: where the ranks meet.
        engine: whose files.
        below: where the tag lies in the checkpoint, with a slash at its end; "" when it is the checkpoint.

    Raises:
        SafeCheckpointError: see ``consolidate_offloaded``.
    """
    own = part(engine)
    if not own:
        return Planned(notes={NOTE: {}})
    parts = agree_parts(core, own, IGNORED, prefix=f"{below}{OFFLOADED}/")
    return Planned(copies=parts.copies, folders=parts.folders, notes={NOTE: {below: list(parts.notes)}})


def refuse_unfit(core: Engine, engines: Mapping[Path, Any], checkpoint: Path | None = None) -> None:
    """Before anything is restored: refuse a tag whose swap files do not fit. Every rank calls this.

    DeepSpeed reads a file of another size into its buffers, and the process dies.

    Args:
        core: where the ranks meet.
        engines: tag that is to be loaded -> into what.
        checkpoint: the directory with the manifest; None when each tag has its own.

    Raises:
        RestoreError: the tag was saved by another number of ranks, or of another model; on every rank.
    """
    if not any(engine.zero_nvme_offload_optimizer() for engine in engines.values()):
        return

    def compare() -> None:
        for tag, engine in engines.items():
            _refuse_unfit(core, engine, tag, checkpoint or tag)

    one_resume.apply(core, compare)


def _refuse_unfit(core: Engine, engine: Any, tag: Path, checkpoint: Path) -> None:
    own = part(engine)
    if not own:
        return
    (asked, folder), size = next(iter(own.items())), core.coordinator.size
    try:
        saved_by, sizes = _swap_files(checkpoint, tag, asked, core.rank)
    except (SafeCheckpointError, FileNotFoundError):
        return  # the verification that follows reports what is missing
    if saved_by != size:
        message = f"{saved_by} ranks saved it and {size} are to load it: with NVMe offload, load it with {saved_by}"
        raise RestoreError(path=str(tag), key=str(folder), message=message)
    for number in _swapped(engine.optimizer):
        file = f"{engine.optimizer.fp32_partitioned_groups_flat[number].ds_id}.tensor.swp"
        if file not in sizes:
            message = f"it holds no {file}: load it in a process that, as the one that saved it, has made no other model before"
            raise RestoreError(path=str(tag), key=str(folder), message=message)
        needed = (folder / file).stat().st_size
        if sizes[file] != needed:
            message = f"{file} has {sizes[file]} bytes in it and {needed} here: load it into the model that was saved"
            raise RestoreError(path=str(tag), key=str(folder), message=message)


def _swap_files(checkpoint: Path, tag: Path, asked: str, rank: int) -> tuple[int, dict[str, int]]:
    """How many ranks saved a tag, and the swap files in it of this rank, with their sizes."""
    manifest = manifest_of(checkpoint)
    if manifest is not None:
        below = f"{tag.relative_to(checkpoint).as_posix()}/" if tag != checkpoint else ""
        name = own_part(manifest.notes.get(NOTE, {}).get(below, ()), asked, rank)
        prefix = f"{below}{OFFLOADED}/{name}/"
        files = {e.path.removeprefix(prefix): e.size_bytes for e in manifest.files if e.path.startswith(prefix)}
        return manifest.world_size, files
    saved_by = sum(name.endswith("_optim_states.pt") for name in os.listdir(tag))
    folder = tag / OFFLOADED / asked
    names = os.listdir(folder) if presence.is_directory(folder) else []
    return saved_by, {name: (folder / name).stat().st_size for name in names}


def restore_own_files(core: Engine, engine: Any, checkpoint: Path, below: str = "") -> None:
    """After ``load_checkpoint``: restore this rank's own files if DeepSpeed read another rank's. Every rank calls this.

    Two nodes may have stored folders of one name (``use_node_local_storage``); DeepSpeed finds them by that name.

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
    values = {"tag": checkpoint / below}

    def were_renamed(_: object) -> bool:
        manifest = manifest_of(checkpoint)
        notes = manifest.notes.get(NOTE, {}).get(below, ()) if manifest is not None else ()
        return any(note["name"] != note["asked"] for note in notes)

    if not core.agree("swap files", must_match=values, decide=were_renamed):
        return

    def find() -> list[Part]:
        manifest = read_manifest(checkpoint)
        return files_of_parts(checkpoint, manifest, manifest.notes[NOTE][below], own, core.rank, f"{below}{OFFLOADED}/")

    restore_files(core.coordinator, find, core.config.timeouts.lengthy_s)
    engine.optimizer.reset_swap_buffers()


def resume_all(core: Engine, engines: Mapping[Path, Any], *, optimizer_states: bool) -> None:
    """After ``load_checkpoint`` with NVMe offload: restore the state that DeepSpeed omits. Every rank calls this.

    DeepSpeed (up to 0.19.8) only copies the swap files back. The optimizer has no state then, so that it begins with zero
    moments at step 0, and parameters too small to be swapped keep their initial values. Here the states are registered again,
    with their files, and the small parameters are restored.

    Args:
        core: where the ranks meet.
        engines: tag that was loaded -> what it was loaded into.
        optimizer_states: whether the optimizer's states are wanted.

    Raises:
        SafeCheckpointError: whatever went wrong, on every rank.
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

    # The second is a collective: it runs only if the first succeeded on all ranks.
    one_resume.apply(core, states)
    one_resume.apply(core, gather)


def _resume_states(engine: Any, tag: Path, *, optimizer_states: bool) -> None:
    optimizer = engine.optimizer
    file = Path(engine._get_zero_ckpt_name(str(tag.parent), tag.name))
    with file.open("rb") as stream, refusing(tag, file.name):
        state = load_data(stream, _CLASSES)["optimizer_state_dict"]
    optimizer.checkpoint_event_prologue()
    if optimizer_states:
        _load_states(optimizer, state)
    for number, kept in enumerate(state["fp32_flat_groups"]):
        if kept.numel():  # it was in memory
            optimizer.fp32_partitioned_groups_flat[number].data.copy_(kept.data)
            optimizer._reassign_or_swap_out_partitioned_parameters(number)


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
        # The lookup registers the states; their memory is not needed before they are read from their files.
        optimizer.optimizer_swapper._get_param_swap_info(
            optimizer.fp32_partitioned_groups_flat[number]
        ).release_memory()


def _in_order(optimizer: Any) -> list[int]:
    by_group: dict[int, list[int]] = {}
    for number, numel in enumerate(optimizer.fp16_partitioned_groups_flat_numel):
        by_group.setdefault(optimizer.sub_group_to_group_id[number], []).append(numel)
    return [numel for group in sorted(by_group) for numel in by_group[group]]


def _with_room(values: Mapping[str, Any], numel: int) -> dict[str, Any]:
    """The states of one parameter. Those in files get memory that is never used: only its size matters."""
    return {
        name: torch.empty(numel, dtype=value.dtype, device="cpu")
        if torch.is_tensor(value) and not value.numel()
        else value
        for name, value in values.items()
    }
