"""A DeepSpeed checkpoint as a part of one of another framework: all of ``save_checkpoint(folder, tag)``, in its directory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safe_ckpt.adapters import Engine, Planned
from safe_ckpt.adapters.planning import file_plan
from safe_ckpt.deepspeed import nvme
from safe_ckpt.deepspeed.arguments import check_engine
from safe_ckpt.deepspeed.load import plain_reading
from safe_ckpt.deepspeed.save import plan_tag
from safe_ckpt.layouts.table import LATEST

ZERO3_GATHER = "_zero3_consolidated_16bit_state_dict"
"""The engine's method that gathers the weights of ZeRO-3; a collective."""


def collect(
    core: Engine,
    engines: Mapping[str, Any],
    client_state: Mapping[str, Any] | None = None,
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
    parts: list[Planned] = []
    beside: dict[str, bytes] = {}
    for tag, engine in engines.items():
        check_engine(engine)
        planned, scripts = plan_tag(
            core, engine, tag, client_state or {}, exclude_frozen_parameters=exclude_frozen_parameters, below=f"{tag}/"
        )
        parts.append(planned)
        beside.update(scripts)
        if save_latest:
            beside[LATEST] = tag.encode()
    if core.rank == 0:
        parts.append(Planned(files=[file_plan.bytes_image(name, data) for name, data in beside.items()]))
    return Planned.joined(parts)


@contextlib.contextmanager
def loading(core: Engine, engines: Mapping[str, Any], checkpoint: Path, *, optimizer_states: bool) -> Iterator[None]:
    """Within this block the engines may load. At its end the state that DeepSpeed omits is restored. Every rank enters it.

    Args:
        core: where the ranks meet.
        engines: tag -> engine.
        checkpoint: the directory with the manifest.
        optimizer_states: whether the optimizers' states are wanted.

    Raises:
        RestoreError: with NVMe offload, another number of ranks saved it, or another model; on every rank.
        SafeCheckpointError: see ``nvme.resume_all``; the same on every rank.
    """
    tags = {checkpoint / tag: engine for tag, engine in engines.items()}
    nvme.refuse_unfit(core, tags, checkpoint)
    with contextlib.ExitStack() as stack:
        for engine in engines.values():
            stack.enter_context(plain_reading(engine))
        yield
    for tag, engine in engines.items():
        nvme.put_back(core, engine, checkpoint, f"{tag}/")
    nvme.resume_all(core, tags, optimizer_states=optimizer_states)
