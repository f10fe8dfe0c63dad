"""Reading checkpoints without holding their directory: for evaluation, fine-tuning, serving, beside a live job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safe_ckpt.config import Retention
from safe_ckpt.core.coordination.agreed_config import agree_on_settings
from safe_ckpt.core.home.home import Candidate, is_anything_at, is_run
from safe_ckpt.core.home.places import candidate_at, everything_in, is_one
from safe_ckpt.core.home.visibility import list_patiently
from safe_ckpt.core.resuming.named import refuse_missing
from safe_ckpt.core.resuming.visit import Visit, visiting
from safe_ckpt.core.saving.request import check_step
from safe_ckpt.core.storage.objects.place import place_of
from safe_ckpt.core.storage.source import by_storage
from safe_ckpt.errors import StateError
from safe_ckpt.layouts.survey import survey
from safe_ckpt.layouts.table import layout_of
from safe_ckpt.layouts.top_level import look_inside

if TYPE_CHECKING:
    from safe_ckpt.config import CheckpointConfig
    from safe_ckpt.core.coordination.process_groups import ProcessGroup
    from safe_ckpt.core.formats.manifest import CheckpointInfo
    from safe_ckpt.core.home.standing import Judge
    from safe_ckpt.core.storage.objects.place import Place


def load(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    best: str | None = None,
    mode: Literal["min", "max"] = "min",
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
        best: a metric that was given to ``save``: the best instead of the newest, of those that have it.
        mode: whether the smallest number of that metric is the best, or the largest.
        verify: compare all of it with what was written first. With False only what is read whole is compared; shards,
            and files that nobody reads, are not.
        group: the ranks; None means WORLD, or this process alone when there is no process group.

    Returns:
        What was restored.

    Raises:
        NoValidCheckpointError: there is no checkpoint, or none is usable; says why, name by name. On every rank.
        CheckpointNotFoundError: the one that ``step`` or ``path`` names is not there; names those that are. On every rank.
        RestoreError: the checkpoint does not fit the state; names the item. On every rank.
        StateError: ``step`` is no step, or ``best`` is given with it. On every rank.
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
    with _visit(path, step, group, best=best, mode=mode) as visit:
        return visit.load(state, verify=verify)


def newest(
    directory: str | os.PathLike[str], group: ProcessGroup | None = None, verify: bool = True
) -> CheckpointInfo | None:
    """The newest checkpoint that is committed, whole and without bad numbers. Every rank calls this, and gets the same one.

    Of any layout that ``safe-ckpt list`` knows: ours, the frameworks', also where a stock tool wrote it. Its ``path`` is then
    read by whatever wrote it. The directory is only read, as by ``load``.

    Args:
        directory: where the checkpoints are, or the address of an object store.
        group: the ranks; None means WORLD, or this process alone when there is no process group.
        verify: compare its bytes with what was written, each rank a share of the files.

    Returns:
        None when there is no checkpoint, nor a directory.

    Raises:
        NoValidCheckpointError: there are checkpoints and none is usable; says why, name by name. On every rank.
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
    with _visit(directory, None, group, all_layouts=True) as visit:
        return visit.newest(verify=verify)


@contextlib.contextmanager
def _visit(
    path: str | os.PathLike[str],
    step: int | None,
    group: ProcessGroup | None,
    *,
    best: str | None = None,
    mode: Literal["min", "max"] = "min",
    all_layouts: bool = False,
) -> Iterator[Visit]:
    def place(config: CheckpointConfig) -> Place:
        if step is not None:
            check_step(step)
            if best is not None:
                raise StateError(key="best", message="it chooses a step: give it, or step, not both")
        if mode not in ("min", "max"):
            raise StateError(key="mode", message=f"expected 'min' or 'max', got {mode!r}")
        return place_of(path, config.storage, config.timeouts.lengthy_s)

    config, where = agree_on_settings(None, place, group)
    rule = Retention(keep_best=1, metric=best, mode=mode) if best is not None else None
    everything = Everything(where, config)
    with visiting(config, group) as ranks, ranks.coordinator.together("load"):
        if all_layouts:
            yield Visit(ranks=ranks, place=where, step=step, look=everything.look, judges=lambda: everything.judges)
        else:
            yield Visit(ranks=ranks, place=where, step=step, best=rule)


class Everything:
    """All checkpoints at a place, of every layout.

    Args:
        place: a directory of checkpoints, or one of them.
        config: settings.

    Attributes:
        judges: of what was looked at last.
    """

    def __init__(self, place: Place, config: CheckpointConfig) -> None:
        self._place = place
        self._config = config
        self.judges: Sequence[Judge] = ()

    def look(self) -> tuple[Sequence[Candidate], bool]:
        """List what there is. Returns whether that is one checkpoint, too.

        Raises:
            OSError: it could not be listed.
            CheckpointNotFoundError: the place names a checkpoint that is not there.
        """
        place = self._place
        if is_anything_at(place) and (one := one_at(place)) is not None:
            return [one], True
        refuse_missing(place)
        return list_patiently(lambda: all_in(place, self._note), self._config.timeouts), False

    def _note(self, judges: Sequence[Judge]) -> None:
        self.judges = judges


def one_at(place: Place) -> Candidate | None:
    """One checkpoint of any layout; None where there is none, or a directory of several.

    Raises:
        OSError: it cannot be looked at, or the store gave no answer.
        UnsupportedFormatError: it is of a newer format version.
    """
    if is_one(place):
        return by_storage(place, _file_at, candidate_at)
    layout = by_storage(place, layout_of, lambda _: None)
    if layout is None or layout.problem:
        return None
    found = Candidate(path=place, foreign=True, step=layout.step)
    return found if not layout.name.startswith("Lightning") else look_inside(found)


def _file_at(path: Path) -> Candidate | None:
    found = candidate_at(path)
    return look_inside(found) if found is not None and path.suffix == ".ckpt" else found


def all_in(place: Place, note: Callable[[Sequence[Judge]], None] = lambda _: None) -> Sequence[Candidate]:
    """Every checkpoint in a directory, of every layout that the commands list; none where it is missing.

    Args:
        place: the directory.
        note: is told what frameworks know besides.

    Raises:
        OSError: it could not be listed.
    """

    def in_folder(folder: Path) -> Sequence[Candidate]:
        try:
            found = survey(folder)
        except FileNotFoundError:
            return []
        if found.folder != folder and is_run(found.folder):  # it is another one, and not a project of Accelerate's
            return []
        note(found.judges)
        return found.candidates

    return by_storage(place, in_folder, everything_in)
