"""Reading checkpoints without holding their directory: for evaluation, fine-tuning, serving, beside a live job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from safe_ckpt.core.coordination.agreed_config import agree_on_settings
from safe_ckpt.core.resuming.visit import Visit, visiting
from safe_ckpt.core.saving.request import check_step
from safe_ckpt.core.storage.objects.place import place_of

if TYPE_CHECKING:
    from safe_ckpt.config import CheckpointConfig
    from safe_ckpt.core.coordination.process_groups import ProcessGroup
    from safe_ckpt.core.formats.manifest import CheckpointInfo
    from safe_ckpt.core.storage.objects.place import Place


def load(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    verify: bool = True,
    group: ProcessGroup | None = None,
) -> CheckpointInfo:
    """Restore a checkpoint of ``Checkpointer`` into ``state``, in place, as ``resume`` does. Every rank calls this.

    The directory is only read: it may be another user's, a read-only mount, a bucket, or in use by a live job, and nothing
    in it is changed. Any number of ranks may read what any number has saved. If the live job deletes what is being read, or
    saves that step again, the next newest is restored instead, as a whole; never a mixture.

    Args:
        path: a directory of checkpoints, one checkpoint in it, or the address of either in an object store.
        state: names that were given to ``save``, or some of them. Values that cannot change in place, such as numbers, are
            replaced in the mapping.
        step: the one of this step alone; None for the newest that is in order and has no bad numbers.
        verify: compare all of it with what was written first. With False only what is read whole is compared; shards,
            and files that nobody reads, are not.
        group: the ranks; None means WORLD, or this process alone when there is no process group.

    Returns:
        What was restored.

    Raises:
        NoValidCheckpointError: there is no checkpoint, or none is usable; says why, name by name. On every rank.
        CheckpointNotFoundError: the one that ``step`` or ``path`` names is not there; names those that are. On every rank.
        RestoreError: the checkpoint does not fit the state; names the item. On every rank.
        StateError: ``step`` is no step. On every rank.
        ConfigError: what the environment of one rank says is not allowed, or an address cannot be used. On every rank.
        DirectoryError: a file could not be read; names path and rank. On every rank.
        NotEnoughSpaceError: what is fetched from an object store has no room on a host. On every rank.
        UnsupportedFormatError: a checkpoint is of a newer format version. On every rank.
        DesyncError: the ranks called different things, or differ in ``path``, ``step``, names, settings or versions.
            On every rank that came.
        RendezvousTimeout: some ranks did not come within ``barrier_s``; names them. On every rank that came.
        PeerLostError: a rank died or stopped; names it. On every rank that is alive.
        TamperedError: a program that is not of this job wrote to the store of rank 0. On the rank that read it.
        UnexpectedError: another rank met an error that is not ours; names the rank. That rank raises its own.
        ForkedError: an object store cannot be used in a process that was forked from one that uses it. On every rank.

    Example:
        ```python
        info = safe_ckpt.load("runs/exp", {"model": model})  # the weights alone; a live job may hold the directory
        print(f"evaluates step {info.step}")
        ```

        ```text
        evaluates step 20
        ```
    """
    with _visit(path, step, group) as visit:
        return visit.load(state, verify=verify)


def newest(
    directory: str | os.PathLike[str], group: ProcessGroup | None = None, verify: bool = True
) -> CheckpointInfo | None:
    """The newest checkpoint that is committed, whole and without bad numbers. Every rank calls this, and gets the same one.

    Its ``path`` is then read by whatever wrote it, see ``publishing``. The directory is only read, as by ``load``.

    Args:
        directory: where the checkpoints are, or the address of an object store.
        group: the ranks; None means WORLD, or this process alone when there is no process group.
        verify: compare its bytes with what was written, each rank a share of the files.

    Returns:
        None when there is no checkpoint, nor a directory.

    Raises:
        NoValidCheckpointError: there are checkpoints and none is usable; says why, name by name. Or all are a framework's,
            in a file or in a folder of its own. On every rank.
        CheckpointNotFoundError: ``directory`` names a checkpoint that is not there. On every rank.
        ConfigError: what the environment of one rank says is not allowed, or an address cannot be used. On every rank.
        DirectoryError: a file could not be read; names path and rank. On every rank.
        NotEnoughSpaceError: what is fetched from an object store has no room on a host. On every rank.
        UnsupportedFormatError: a checkpoint is of a newer format version. On every rank.
        DesyncError: the ranks called different things, or differ in directory, settings or versions. On every rank that came.
        RendezvousTimeout: some ranks did not come within ``barrier_s``; names them. On every rank that came.
        PeerLostError: a rank died or stopped; names it. On every rank that is alive.
        TamperedError: a program that is not of this job wrote to the store of rank 0. On the rank that read it.
        UnexpectedError: another rank met an error that is not ours; names the rank. That rank raises its own.
        ForkedError: an object store cannot be used in a process that was forked from one that uses it. On every rank.

    Example:
        ```python
        info = safe_ckpt.newest("runs/exp")
        print("nothing yet" if info is None else info.name)
        ```

        ```text
        step-00000020
        ```
    """
    with _visit(directory, None, group) as visit:
        return visit.newest(verify=verify)


@contextlib.contextmanager
def _visit(path: str | os.PathLike[str], step: int | None, group: ProcessGroup | None) -> Iterator[Visit]:
    def place(config: CheckpointConfig) -> Place:
        if step is not None:
            check_step(step)
        return place_of(path, config.storage, config.timeouts.lengthy_s)

    config, where = agree_on_settings(None, place, group)
    with visiting(config, group) as ranks, ranks.coordinator.together("load"):
        yield Visit(ranks=ranks, place=where, step=step)
