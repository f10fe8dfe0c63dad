"""A DeepSpeed checkpoint as a part of one of another framework: all of ``save_checkpoint(folder, tag)``, in its directory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safe_ckpt.adapters import Attempt, Engine, Planned
from safe_ckpt.adapters.extras import file_plan
from safe_ckpt.adapters.strategy import Strategy
from safe_ckpt.deepspeed import nvme
from safe_ckpt.deepspeed.arguments import check_engine
from safe_ckpt.deepspeed.load import plain_reading
from safe_ckpt.deepspeed.save import plan_tag
from safe_ckpt.layouts.table import LATEST

ZERO3_GATHER = "_zero3_consolidated_16bit_state_dict"
"""The engine's method that gathers the weights of ZeRO-3; a collective."""


class EngineWrites(Strategy):
    """A strategy for what engines write themselves.

    Args:
        core: where the ranks meet.
        engines: tag -> engine; ``latest`` names the last one, as after saving them one by one.
    """

    def __init__(self, core: Engine, engines: Mapping[str, Any]) -> None:
        self._core = core
        self._engines = engines

    def plan(self, states: Mapping[str, Mapping[str, Any]], attempt: Attempt) -> Planned:
        """See ``Strategy``; ``states`` are the arguments of ``save_checkpoint`` by tag.

        Raises:
            CoordinationError: the ranks did not meet.
        """
        parts: list[Planned] = []
        beside: dict[str, bytes] = {}
        with attempt.meeting():
            for tag, arguments in states.items():
                engine, given = self._engines[tag], dict(arguments)
                check_engine(engine)
                save_latest, client_state = given.pop("save_latest", True), given.pop("client_state", None) or {}
                planned, scripts = plan_tag(self._core, engine, tag, client_state, below=f"{tag}/", **given)
                parts.append(planned)
                beside.update(scripts)
                if save_latest:
                    beside[LATEST] = tag.encode()
        if self._core.rank == 0:
            parts.append(Planned(files=[file_plan.bytes_plan(name, data) for name, data in beside.items()]))
        return Planned.joined([Planned(error=attempt.error), *parts])

    @contextlib.contextmanager
    def loading(self, path: Path, *, optimizer_states: bool) -> Iterator[None]:
        """See ``Strategy``.

        Raises:
            RestoreError: with NVMe offload, another number of ranks saved it, or another model; on every rank.
            SafeCheckpointError: see ``nvme.resume_all``; the same on every rank.
        """
        core, tags = self._core, {path / tag: engine for tag, engine in self._engines.items()}
        nvme.refuse_unfit(core, tags, path)
        with contextlib.ExitStack() as stack:
            for engine in self._engines.values():
                stack.enter_context(plain_reading(engine))
            yield
        for tag, engine in self._engines.items():
            nvme.restore_own_files(core, engine, path, f"{tag}/")
        nvme.resume_all(core, tags, optimizer_states=optimizer_states)
