"""A DeepSpeed checkpoint as a part of one of another framework: all of ``save_checkpoint(folder, tag)``, in its directory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safe_ckpt.adapters import Engine, FileCopy, FilePlan, file_plan
from safe_ckpt.adapters.layouts import LATEST
from safe_ckpt.adapters.planned import Planned
from safe_ckpt.deepspeed import nvme
from safe_ckpt.deepspeed.arguments import check_engine
from safe_ckpt.deepspeed.load import plain_reading
from safe_ckpt.deepspeed.save import capture

ZERO3_GATHER = "_zero3_consolidated_16bit_state_dict"
"""The engine's method that gathers the weights of ZeRO-3; a collective."""


def collect(
    core: Engine,
    engines: Mapping[str, Any],
    client_state: Mapping[str, Any],
    *,
    exclude_frozen_parameters: bool = False,
    save_latest: bool = True,
) -> Planned:
    """Plan the files of several engines. Every rank calls this.

    Args:
        core: where the ranks meet.
        engines: tag -> engine; ``latest`` names the last one, as after saving them one by one.
        client_state: as for DeepSpeed.
        exclude_frozen_parameters: the same.
        save_latest: the same.

    Raises:
        ConfigError: an engine's settings are not covered.
        SafeCheckpointError: the swap files cannot be copied; the same on every rank.
    """
    images: list[FilePlan] = []
    copies: list[FileCopy] = []
    folders: list[str] = []
    notes: dict[str, Any] = {}
    beside: dict[str, bytes] = {}
    error: Exception | None = None
    for tag, engine in engines.items():
        check_engine(engine)
        parts = nvme.agree(core, engine, f"{tag}/")
        if parts is not None:
            copies += parts.copies
            folders += parts.folders
            notes[f"{tag}/"] = list(parts.notes)
        folders.append(tag)
        captured = capture(engine, tag, client_state, exclude_frozen_parameters=exclude_frozen_parameters)
        images += [dataclasses.replace(image, path=f"{tag}/{image.path}") for image in captured.images]
        beside.update(captured.scripts)
        if save_latest:
            beside[LATEST] = tag.encode()
        error = error or captured.error
    if core.rank == 0:
        images += [file_plan.bytes_image(name, data) for name, data in beside.items()]
    return Planned(images=images, copies=copies, folders=sorted(set(folders)), notes={nvme.NOTE: notes}, error=error)


@contextlib.contextmanager
def loading(core: Engine, engines: Mapping[str, Any], checkpoint: Path) -> Iterator[None]:
    """Within this block the engines may load. Every rank enters it.

    Raises:
        RestoreError: with NVMe offload, another number of ranks saved it, or another model; on every rank.
    """
    nvme.refuse_unfit(core, {checkpoint / tag: one for tag, one in engines.items()}, checkpoint)
    with contextlib.ExitStack() as stack:
        for engine in engines.values():
            stack.enter_context(plain_reading(engine))
        yield


def resume_swapped(core: Engine, engines: Mapping[str, Any], checkpoint: Path, *, optimizer_states: bool) -> None:
    """After the engines have loaded: what DeepSpeed leaves out with NVMe offload. Every rank calls this.

    Raises:
        SafeCheckpointError: see ``nvme.resume_all``; the same on every rank.
    """
    for tag, engine in engines.items():
        nvme.put_back(core, engine, checkpoint, f"{tag}/")
    nvme.resume_all(core, {checkpoint / tag: one for tag, one in engines.items()}, optimizer_states=optimizer_states)
