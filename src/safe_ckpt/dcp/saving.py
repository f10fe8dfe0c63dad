"""``save`` and ``async_save`` with the signatures of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import staging, state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from safe_ckpt.adapters.planning import states_of
from safe_ckpt.core.formats.manifest import DCP_METADATA
from safe_ckpt.core.home.visibility import Patience
from safe_ckpt.core.sharding.dcp_read import read_metadata
from safe_ckpt.dcp.arguments import check_saving, check_state, named_rank, path_of, target_of
from safe_ckpt.dcp.saver import DcpSaver, ranks_of, saver_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.checkpoint.planner import SavePlanner
    from torch.distributed.checkpoint.staging import AsyncStager
    from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
    from torch.distributed.checkpoint.storage import StorageWriter

    from safe_ckpt.core.coordination.process_groups import ProcessGroup
    from safe_ckpt.core.saving.handle import OpenSave

logger = logging.getLogger(__name__)
_told: set[str] = set()


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    metrics: Mapping[str, Any] | None = None,
) -> Metadata:
    """Save a state dict of which every rank has a part, as ``torch.distributed.checkpoint.save`` does. Every rank calls this.

    The folder appears, or replaces the one before it, in one step, when all of it is durable on all ranks. Other files of
    yours in it are kept. When this returns, it is committed.

    Args:
        state_dict: names to tensors, Statefuls, nested state dicts and other values. Sharded tensors are saved in parts; of
            everything else one rank saves what all have.
        checkpoint_id: the folder of the checkpoint, on a file system that all ranks share. Where it is a link, what it leads
            to is replaced.
        storage_writer: refused: give ``checkpoint_id``.
        planner: None or a plain ``DefaultSavePlanner``; others are refused.
        process_group: the ranks; None means WORLD.
        no_dist: this rank alone.
        use_collectives: False is refused. There are no collectives here in any case.
        metrics: numbers for ``Retention(keep_best=...)`` and for ``safe-ckpt list``; rank 0's count.

    Returns:
        What the folder's ``.metadata`` says.

    Raises:
        ConfigError: an argument cannot be honoured; says what to do instead. On every rank.
        StateError: something cannot be saved; names it. On every rank.
        DirectoryError: the path holds something else, or cannot be used. On every rank.
        DirectoryInUseError: a live job saves under this name, or has taken it over. On every rank.
        DirectoryNotSharedError: a rank does not see the folder that rank 0 made. On every rank.
        NotEnoughSpaceError: the file system, or host memory, cannot take it. On every rank.
        UnsupportedFormatError: with rules of retention: a checkpoint beside it is of a newer format version. On every rank.
        SaveError: it could not be made durable or committed; or the error of an earlier ``async_save`` that nobody has looked
            at. On every rank.
        WriterError: the writer process died or stalled more than ``writer.max_respawns`` times. On every rank.
        SaveSkippedError: an ``async_save`` is in flight, and ``on_busy`` is "skip". On every rank.
        UnhealthyStateError: it was committed and marked as unhealthy (``health.action="stop"``). On every rank.
        CommitOutcomeUnknown: rank 0 was lost, or the storage failed, at the very commit. On the ranks that do not know.
        DesyncError: the ranks called different things, or differ in the path, settings, versions, or in what they have under
            one name. On every rank that came.
        RendezvousTimeout: some ranks did not come within ``barrier_s``; names them. On every rank that came.
        PeerLostError: a rank died or stopped; names it. On every rank that is alive.
        TamperedError: a program that is not of this job wrote to the store of rank 0. On the rank that read it.
        UnexpectedError: another rank met an error that is not ours; names the rank. That rank raises its own.
        ForkedError: this process was forked while its parent's save was in flight. On this rank alone.

    Example:
        ```python
        from safe_ckpt import dcp  # instead of: import torch.distributed.checkpoint as dcp

        dcp.save({"model": model.state_dict()}, checkpoint_id="runs/dcp/step-100")
        ```
    """
    saver = saver_for(ranks_of(process_group, no_dist=no_dist))
    path, handle = _begin(
        saver,
        state_dict,
        checkpoint_id,
        storage_writer,
        planner,
        use_collectives=use_collectives,
        metrics=metrics or {},
    )
    try:
        handle.result()
    finally:
        saver.names.release(path)
    return _metadata(saver, path)


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    metrics: Mapping[str, Any] | None = None,
) -> Future[Metadata] | AsyncSaveResponse:
    """As ``save``; returns when the copy is taken, and writes it in the background. The state may change then.

    If a save is in flight, this waits for it first (``max_in_flight``). An error that nobody has got from the future is raised
    by the next ``save`` or ``async_save``. A program that ends finishes what is in flight.

    Args:
        state_dict: see ``save``.
        checkpoint_id: see ``save``.
        storage_writer: see ``save``.
        planner: see ``save``.
        process_group: see ``save``. It needs no backend for the CPU.
        async_checkpointer_type: ignored: a process writes what is large, a thread what is small.
        async_stager: torch's ``DefaultStager`` is not used: the copy is taken here. One of your own is asked, and what it
            returns is saved; where it returns a future, this waits for it.
        no_dist: see ``save``.
        use_collectives: see ``save``.
        metrics: see ``save``.

    Returns:
        A future of what ``save`` returns. With a stager that stages asynchronously an ``AsyncSaveResponse``, of which the
        staging is complete.

    Raises:
        SafeCheckpointError: what ``save`` raises before it writes, and the error of an earlier ``async_save`` that nobody has
            looked at, on every rank. What goes wrong in the background is raised by the future.

    Example:
        ```python
        from safe_ckpt import dcp

        future = dcp.async_save({"model": model.state_dict()}, checkpoint_id="runs/dcp/step-100")
        train_one_step(model, optimizer)  # the copy is taken
        future.result()  # raises what went wrong
        ```
    """
    ignored = "async_checkpointer_type is ignored: safe_ckpt's own process writes, and a thread what is small"
    if async_checkpointer_type != AsyncCheckpointerType.THREAD and ignored not in _told:
        _told.add(ignored)
        logger.info("%s", ignored)
    saver = saver_for(ranks_of(process_group, no_dist=no_dist))
    staged = _Staged(async_stager)
    path, handle = _begin(
        saver,
        state_dict,
        checkpoint_id,
        storage_writer,
        planner,
        use_collectives=use_collectives,
        metrics=metrics or {},
        staged=staged,
    )
    upload = _Upload(handle)
    follow = threading.Thread(target=_follow, args=(saver, path, upload), name="safe_ckpt.dcp", daemon=True)
    follow.start()
    if not staged.asynchronously:
        return upload
    copied: Future[None] = Future()
    copied.set_result(None)
    return state_dict_saver.AsyncSaveResponse(staging_completion=copied, upload_completion=upload)  # type: ignore[arg-type]


class _Staged:
    """The state dict as a stager makes it.

    Attributes:
        asynchronously: whether it does so in a future.
    """

    def __init__(self, stager: AsyncStager | None) -> None:
        own = stager is not None and type(stager) is getattr(staging, "DefaultStager", None)  # where torch has one
        options: Any = getattr(stager, "_config", None)
        self.asynchronously = own and bool(options.use_async_staging)
        self._stager = None if own else stager

    def of(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state dict to save."""
        if self._stager is None:
            return state
        staged = self._stager.stage(state)
        if isinstance(staged, Future):
            self.asynchronously = True
            return staged.result()
        return staged


class _Upload(Future[Metadata]):
    """The future of one save. Whoever looks at its error has been told."""

    def __init__(self, handle: OpenSave) -> None:
        super().__init__()
        self.handle = handle
        self.set_running_or_notify_cancel()  # it cannot be cancelled

    def result(self, timeout: float | None = None) -> Metadata:
        try:
            return super().result(timeout)
        finally:
            self._looked_at()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return super().exception(timeout)
        finally:
            self._looked_at()

    def _looked_at(self) -> None:
        if self.done():
            self.handle.mark_reported()


def _follow(saver: DcpSaver, path: Path, upload: _Upload) -> None:
    """In a thread of its own: tell the future of the outcome."""
    try:
        upload.handle.wait_until_over()
        if upload.handle.error is not None:
            raise upload.handle.error
        upload.set_result(_metadata(saver, path))
    except BaseException as error:
        upload.set_exception(error)


def _begin(
    saver: DcpSaver,
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None,
    storage_writer: StorageWriter | None,
    planner: SavePlanner | None,
    *,
    use_collectives: bool,
    metrics: Mapping[str, Any],
    staged: _Staged | None = None,
) -> tuple[Path, OpenSave]:
    def check() -> Path:
        with named_rank(saver.engine.rank, saver.engine.coordinator.size):
            check_saving(storage_writer, planner, use_collectives=use_collectives)
            check_state(state_dict)
            return target_of(path_of(checkpoint_id, "save"))

    def state() -> dict[str, Any]:
        plain = states_of(state_dict)
        return plain if staged is None else staged.of(plain)

    def modules() -> list[torch.nn.Module]:
        return [value for value in state_dict.values() if isinstance(value, torch.nn.Module)]

    return saver.save_state(check, state, modules, metrics)


def _metadata(saver: DcpSaver, path: Path) -> Metadata:
    """Return what was committed. Another host may see it a little later."""
    Patience(saver.config.timeouts).until_there(path / DCP_METADATA)
    return read_metadata(path)
