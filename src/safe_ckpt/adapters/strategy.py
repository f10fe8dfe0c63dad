"""How the states of a model of which every rank has a part become files of a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safe_ckpt.adapters.planning import Attempt, Planned
from safe_ckpt.core.coordination.rounds import reraise
from safe_ckpt.core.sharding.dtensor import refuse_local_parts
from safe_ckpt.core.sharding.gather import gather_nested
from safe_ckpt.core.state.planner import Planner

if TYPE_CHECKING:
    import torch

    from safe_ckpt.core.formats.file_plan import FilePlan
    from safe_ckpt.core.saving.engine import Engine
    from safe_ckpt.core.sharding.dcp_plan import ShardPlanner


class Strategy(Protocol):
    """How a framework's strategy lays one checkpoint out: whole, in shards, or as an engine of its own writes it.

    Every rank calls every method. An engine of its own: ``safe_ckpt.deepspeed.nested.EngineWrites``.
    """

    def plan(self, states: Mapping[str, Any], attempt: Attempt) -> Planned:
        """The files of this rank; called also where the ``attempt`` has failed already, and gives it what goes wrong.

        Args:
            states: what to lay out, by name; what is below a name is the strategy's own.
            attempt: of this save.
        """

    def loading(self, path: Path, *, optimizer_states: bool) -> AbstractContextManager[None]:
        """Within it the framework may load a checkpoint that all ranks have verified. At its end all of it is restored.

        Args:
            path: the checkpoint.
            optimizer_states: whether the optimizers' states are wanted.
        """
        del path, optimizer_states
        return contextlib.nullcontext()


class Sharded(Strategy):
    """Every rank writes its parts, in the layout of ``torch.distributed.checkpoint``, which the framework reads by itself.

    One for all saves of an engine: it remembers what the ranks agreed on.

    Args:
        engine: where the ranks meet.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._planner: ShardPlanner | None = None
        self._known = Planner(engine.rank, frozen_apart=engine.config.unchanged.share)

    def plan(
        self, states: Mapping[str, Any], attempt: Attempt, models: Mapping[str, torch.nn.Module] | None = None
    ) -> Planned:
        """See ``Strategy``.

        Args:
            states: folder, or "" for the checkpoint's own, to the state dict that goes there.
            attempt: gets what goes wrong here, on any rank.
            models: folder to the model whose state is in the one there: what of it is not trained goes to files of its own.
        """
        if self._planner is None:
            from safe_ckpt.core.sharding.dcp_plan import ShardPlanner  # DCP takes a while to import

            barrier_s = self._engine.config.timeouts.barrier_s
            self._planner = ShardPlanner(self._engine.coordinator, barrier_s=barrier_s, strict=False)
        files: list[FilePlan] = []
        with attempt:
            refuse_local_parts(states)
        with attempt.meeting():
            files = self._planner.files(self._known.sharded_states(states, models or {}), attempt.error)
        return Planned(files=files, folders=sorted(filter(None, states)), error=attempt.error)

    def loading_in_place(self, path: Path, state: dict[str, Any]) -> Callable[[], None]:
        """Compare a checkpoint that all ranks have verified with a state dict, on this rank.

        Args:
            path: a directory in the layout of ``torch.distributed.checkpoint``.
            state: names to tensors, nested state dicts and other values. What the checkpoint has besides is left alone.

        Returns:
            What reads this rank's parts, into the tensors, and meets no other rank. Other values are replaced in ``state``.

        Raises:
            RestoreError: the checkpoint has nothing for a name, or a tensor of another shape.
            HostileCheckpointError: what is asked for cannot be read without running code.
            OSError: a file could not be read.
        """
        from safe_ckpt.core.sharding.dcp_load import ANEW, Loading, warn_of

        loading = Loading(path, state, is_coordinator=self._engine.rank == 0)
        warn_of(path, ANEW, [*loading.anew])
        return loading.read


class Whole(Strategy):
    """Rank 0 gathers whole tensors and writes them, watched: a collective of the framework's own would wait for ever.

    Args:
        engine: where the ranks meet.
        files_of: on rank 0, the files of what was gathered.
    """

    def __init__(self, engine: Engine, files_of: Callable[[dict[str, Any]], Sequence[FilePlan]]) -> None:
        self._engine = engine
        self._files_of = files_of

    def plan(self, states: Mapping[str, Any], attempt: Attempt) -> Planned:
        """See ``Strategy``."""
        engine = self._engine
        files: list[FilePlan] = []
        with attempt:
            refuse_local_parts(states)
        with attempt.meeting():
            engine.agree("gather", local=reraise(attempt.error), phase="planning the save")
            gathered = gather_nested(states, engine.config.timeouts.lengthy_s, engine.group)
            files = [] if gathered is None else list(self._files_of(gathered))
        return Planned(files=files, error=attempt.error)


def dcp_names_in(path: Path) -> set[str]:
    """The names of what a directory in the layout of ``torch.distributed.checkpoint`` holds; none where it is no such.

    Raises:
        CorruptCheckpointError: its ``.metadata`` cannot be read as that.
        HostileCheckpointError: it would run code.
        OSError: it could not be read.
    """
    from safe_ckpt.core.sharding.dcp_read import read_metadata  # DCP takes a while to import

    try:
        return set(read_metadata(path).state_dict_metadata)
    except FileNotFoundError:
        return set()
