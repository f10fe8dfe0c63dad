"""``load`` with the signature of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from safe_ckpt.adapters.planning import give_back, states_of
from safe_ckpt.core.coordination.agreed_config import agree_on_settings
from safe_ckpt.core.coordination.process_groups import group_of
from safe_ckpt.core.formats.manifest import DCP_METADATA, MANIFEST_NAME
from safe_ckpt.core.formats.verify import verify_share
from safe_ckpt.core.home.candidates import look_at
from safe_ckpt.core.home.home import Candidate
from safe_ckpt.core.home.visibility import list_patiently
from safe_ckpt.core.resuming.candidate import FileReader
from safe_ckpt.core.resuming.named import refuse_missing
from safe_ckpt.core.resuming.visit import Visit, visiting
from safe_ckpt.core.sharding.dcp_load import ANEW, NOWHERE, Loading, warn_of
from safe_ckpt.core.sharding.dtensor import without_place
from safe_ckpt.core.storage import presence
from safe_ckpt.dcp.arguments import LATEST, check_loading, check_state, named_rank, path_of
from safe_ckpt.dcp.saver import candidates, given_config, is_stock, ranks_of, step_of, wait_until_over

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlanner
    from torch.distributed.checkpoint.storage import StorageReader

    from safe_ckpt.config import CheckpointConfig
    from safe_ckpt.core.coordination.process_groups import ProcessGroup
    from safe_ckpt.core.formats.manifest import CheckpointInfo


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Load into a state dict, in place, as ``torch.distributed.checkpoint.load`` does. Every rank calls this.

    Tensors are read into, Statefuls get their state, and other values are replaced in ``state_dict``. Before anything of that
    is done, the ranks together compare the checkpoint with what was written, and each compares it with its state dict. A
    checkpoint of stock DCP, which has no checksums, is loaded as it is. What is in flight of this process is waited for.
    Where there is no checkpoint, no ``state_dict()`` is called.

    Of a ``torch.optim.Optimizer`` all is restored, also before its first step. What the checkpoint has below another name in
    ``state_dict``, and no rank has a place for, is one warning on rank 0.

    Args:
        state_dict: what to load, with tensors where they are to go. What the checkpoint has besides is left alone.
        checkpoint_id: the folder of a checkpoint; or a directory of several, which means the newest that is in order; or that
            with ``/latest`` behind it, where nothing has this name.
        storage_reader: refused: give ``checkpoint_id``.
        planner: None, or one that derives from ``DefaultLoadPlanner``, such as with ``allow_partial_load=True``.
        process_group: the ranks; None means WORLD. It may be others, or another number, than those that saved.
        no_dist: this rank alone.

    Raises:
        ConfigError: an argument cannot be honoured; says what to do instead. On every rank.
        StateError: ``state_dict`` is no dict. On every rank.
        NoValidCheckpointError: there is no checkpoint, or none is usable; says why, name by name. On every rank.
        CheckpointNotFoundError: the checkpoint that ``checkpoint_id`` names is not there. On every rank.
        RestoreError: the checkpoint has nothing for a name, or a tensor of another shape. On every rank.
        HostileCheckpointError: what is asked for cannot be read without running code. On every rank.
        DirectoryError: a file could not be read; names path and rank. On every rank.
        UnsupportedFormatError: a checkpoint is of a newer format version. On every rank.
        DesyncError: the ranks called different things, or differ in the path, settings or versions. On every rank that came.
        RendezvousTimeout: some ranks did not come within ``barrier_s``; names them. On every rank that came.
        PeerLostError: a rank died or stopped; names it. On every rank that is alive.
        TamperedError: a program that is not of this job wrote to the store of rank 0. On the rank that read it.
        UnexpectedError: another rank met an error that is not ours; names the rank. That rank raises its own.
        ForkedError: this process was forked while its parent's save was in flight. On this rank alone.

    Example:
        ```python
        from safe_ckpt import dcp

        dcp.save({"model": model.state_dict()}, checkpoint_id="runs/dcp/step-100")
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id="runs/dcp")  # the newest in the directory
        model.load_state_dict(state["model"])
        ```
    """
    _load_from(state_dict, checkpoint_id, storage_reader, planner, ranks_of(process_group, no_dist=no_dist), "load")


def resume(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str],
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
) -> CheckpointInfo | None:
    """Load the newest checkpoint that is in order, if there is one. Every rank calls this.

    A fresh run is one without any checkpoint, where no ``state_dict()`` is called and nothing changes. Where there are some and
    none can be used, or where the path names one that is not there, this raises.

    Args:
        state_dict: see ``load``.
        checkpoint_id: the directory of the run; of one checkpoint, that one alone is taken.
        planner: see ``load``.
        process_group: see ``load``.
        no_dist: see ``load``.

    Returns:
        What was loaded; None on a fresh run.

    Raises:
        NoValidCheckpointError: there are checkpoints and none is usable; says why, name by name. On every rank.
        CheckpointNotFoundError: the checkpoint that ``checkpoint_id`` names is not there. On every rank.
        SafeCheckpointError: all else that ``load`` raises.

    Example:
        ```python
        from safe_ckpt import dcp

        state = {"model": model, "step": 0}
        info = dcp.resume(state, checkpoint_id="runs/dcp")
        print("fresh run" if info is None else f"goes on after step {state['step']}")
        ```
    """
    return _load_from(
        state_dict, checkpoint_id, None, planner, ranks_of(process_group, no_dist=no_dist), "resume", needs_one=False
    )


def _load_from(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None,
    storage_reader: StorageReader | None,
    planner: LoadPlanner | None,
    group: ProcessGroup | None,
    call: str,
    *,
    needs_one: bool = True,
) -> CheckpointInfo | None:
    wait_until_over()
    facts = group_of(group)

    def check(_: CheckpointConfig) -> Path:
        with named_rank(facts.rank, facts.size):
            check_loading(storage_reader, planner)
            check_state(state_dict)
            return path_of(checkpoint_id, call)

    config, path = agree_on_settings(given_config(), check, group)
    with visiting(config, group) as ranks, ranks.coordinator.together(call):
        visit = Visit(ranks=ranks, place=path, look=lambda: _look(path, config))
        states: list[dict[str, Any]] = []
        first = visit.first if needs_one else visit.first_if_any
        info = first(lambda info: _load(visit, info, state_dict, states, planner))
        if info is not None:
            ranks.agree("taken", local=lambda: give_back(states[0], state_dict), phase="restore")
        return info


def _look(path: Path, config: CheckpointConfig) -> tuple[Sequence[Candidate], bool]:
    """On rank 0: what there is, and whether the path is one checkpoint."""
    if presence.is_there(path / MANIFEST_NAME):
        one = look_at(path)
        files = [entry.path for entry in one.manifest.files] if one.manifest is not None else []
        if not one.problem and DCP_METADATA not in files:
            one = dataclasses.replace(one, problem="it was not saved by torch.distributed.checkpoint, nor by this")
        return [one], True
    if is_stock(path):
        return [Candidate(path=path, foreign=True, step=step_of(path.name))], True
    directory = path.parent if path.name == LATEST and not os.path.lexists(path) else path
    refuse_missing(directory)
    return list_patiently(lambda: candidates(directory) if directory.is_dir() else [], config.timeouts), False


def _load(
    visit: Visit,
    info: CheckpointInfo,
    state_dict: Mapping[str, Any],
    states: list[dict[str, Any]],
    planner: LoadPlanner | None,
) -> dict[str, Any] | None:
    """Load one checkpoint on all ranks. Returns why all pass it over; None when they do not.

    Args:
        visit: to where it is.
        info: which one.
        state_dict: as it was given.
        states: gets what its objects say of themselves, which is loaded into. They are asked once.
        planner: as it was given.
    """
    ranks, folder = visit.ranks, info.file_path
    optimizers = {name: one for name, one in state_dict.items() if isinstance(one, torch.optim.Optimizer)}
    loading: list[Loading] = []

    def share(path: Path) -> None:
        verify_share(path, ranks.rank, ranks.coordinator.size)

    def compare() -> None:
        with named_rank(ranks.rank, ranks.coordinator.size):
            first = ranks.rank == 0
            loading.append(Loading(folder, states[0], planner, is_coordinator=first, optimizers=optimizers))

    def tell(said: Mapping[int, Mapping[str, Any]]) -> None:  # on rank 0: warn of what is not restored
        warn_of(folder, NOWHERE, without_place([said[rank] for rank in sorted(said)], path=str(folder), key=""))
        warn_of(folder, ANEW, sorted({name for one in said.values() for name in one["anew"]}))

    reader = FileReader(ranks, share, held=False)
    try:
        verdict = reader.try_one(folder, ours=info.verified)[1]
    finally:
        reader.close()
    # Only now: get_optimizer_state_dict takes a step, which no fresh run must begin with.
    if verdict is None and not states:
        in_order = dict(sorted(state_dict.items()))  # on every rank alike: a state_dict() may be a collective
        states.append({})
        ranks.agree("state", local=lambda: states[0].update(states_of(in_order)), phase="asking for the state")
    if verdict is None:
        verdict = visit.reading(info, compare, "fits")
    if verdict is None:
        said = {"besides": loading[0].besides, "refusal": "", "anew": list(loading[0].anew)}
        ranks.agree("besides", local=lambda: said, decide=tell, phase="comparing the names")
        verdict = visit.reading(info, loading[0].read)
    return verdict
