"""Directories that a job holds: those given once for all saves, and those given with each call, such as for weights."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, overload

from safe_ckpt import events
from safe_ckpt.config import CheckpointConfig
from safe_ckpt.core.coordination.coordinator import Coordinator
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, read_manifest
from safe_ckpt.core.home import candidates as catalog
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.home.file_lock import read_lock
from safe_ckpt.core.home.home import EVENTS, HIDDEN, NAMES, Home, around, candidate_at, home_at, is_one, is_there
from safe_ckpt.core.saving import set_up as shared
from safe_ckpt.core.saving.recent import Recent
from safe_ckpt.core.storage.objects.place import Place
from safe_ckpt.core.storage.presence import is_mounted
from safe_ckpt.core.storage.source import in_files
from safe_ckpt.core.writer.inline import saves_inline
from safe_ckpt.errors import DirectoryError, DirectoryInUseError, SafeCheckpointError, naming
from safe_ckpt.hooks.emitter import Emitter
from safe_ckpt.hooks.event_log import JsonlHook

if TYPE_CHECKING:
    from safe_ckpt.core.saving.engine import Engine

logger = logging.getLogger(__name__)

_SWEPT = "swept"
_ATTEMPTS = 3
_PAUSE_S = 0.2
_BLIP_S = 30.0
_BLIPS = (errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH)


class Workspaces:
    """The directories that one job holds, and where its events are recorded.

    Args:
        coordinator: where the ranks meet.
        config: settings.
        emit: gets a hook for each directory whose events are recorded.
        owner: what holds them within this process and how to free it, for messages.
    """

    def __init__(self, coordinator: Coordinator, config: CheckpointConfig, emit: Emitter, owner: str) -> None:
        self._coordinator = coordinator
        self._config = config
        self._emit = emit
        self._owner = owner
        self._held: list[Home] = []
        self._recorders: dict[Home, events.Hook] = {}
        self._unrecorded: list[events.Event] = []
        self._records: Recent[Path, events.Hook] = Recent(lambda hook: hook in self._recorders.values())

    @overload
    def hold(self, place: Path, *, hidden: Path | None = None, recorded: bool | Path = True) -> FileHome: ...
    @overload
    def hold(self, place: Place, *, hidden: Path | None = None, recorded: bool | Path = True) -> Home: ...
    def hold(self, place: Place, *, hidden: Path | None = None, recorded: bool | Path = True) -> Home:
        """Take a directory: create it, lock it, clean up after an earlier job. Every rank calls this.

        Args:
            place: the directory.
            hidden: in a file system where the hidden folder lies; None for in it.
            recorded: whether events go to a file there, as ``record_events`` has it; or the folder in which.

        Raises:
            DirectoryError: on every rank, naming path and rank.
            DirectoryInUseError: a live job holds it.
            DirectoryNotSharedError: some ranks do not see it.
        """
        config, timeouts = self._config, self._config.timeouts
        home = home_at(
            place,
            lease_s=config.lease_s,
            owner=self._owner,
            hidden=hidden,
            unfenced=config.storage.unfenced,
            answer_s=timeouts.barrier_s / 2,
        )
        seen_from = home.hidden  # held by then: what a killed job left of this is swept

        def take(_: object) -> str:
            _open_through_blips(home, config)
            try:
                return shared.leave_token(in_files(seen_from)) if home.is_mounted and self._coordinator.size > 1 else ""
            except OSError:
                home.close()
                raise

        # A holder that cannot be checked has its lease to show a sign of life.
        patience_s = timeouts.barrier_s + 2 * config.lease_s
        with self._coordinator.together():
            token = self._coordinator.agree("hold", must_match={"directory": place}, timeout_s=patience_s, decide=take)
            home.persist(timeouts.lengthy_s)
            self._held.append(home)
            try:
                if token:  # there are others, who must see it
                    shared.await_shared(self._coordinator, in_files(seen_from), token, timeouts.barrier_s)
            except BaseException:
                self.let_go(home)
                raise
        if home.is_mounted and self._coordinator.rank == 0 and config.record_events and recorded:
            self._record(home, in_files(seen_from) if recorded is True else recorded)
        return home

    def tell(self, event: events.Event) -> None:
        """Tell hooks, and the record of a directory that is held now, or else, if it is the last, of the one held next."""
        if not self._recorders:
            self._unrecorded = [event]
        self._emit(event)

    def _record(self, workspace: Home, folder: Path) -> None:
        def record() -> events.Hook:
            return JsonlHook(
                folder / EVENTS,
                record_bytes=self._config.telemetry.record_bytes,
                record_files=self._config.telemetry.record_files,
                world_size=self._coordinator.size,
            )

        hook = self._records.use(folder, record)
        while self._unrecorded:
            hook(self._unrecorded.pop(0))
        if hook not in self._recorders.values():
            self._emit.add(hook)
        self._recorders[workspace] = hook

    def take_stock(
        self,
        workspace: Home,
        view: Mapping[str, object],
        look: Callable[[], None],
        *,
        kind: str = "list",
        timeout_s: float | None = None,
    ) -> None:
        """Have rank 0 list a directory that was just taken. Every rank calls this.

        Args:
            workspace: the directory. It is given back if this fails: without the listing its order of commits would restart.
            view: what must be equal on all ranks.
            look: what rank 0 does.
            kind: the name of the step.
            timeout_s: how long it may take; None for ``barrier_s``.

        Raises:
            SafeCheckpointError: what ``look`` raised, or the ranks did not meet; on every rank.
        """
        limit_s = self._config.timeouts.barrier_s if timeout_s is None else timeout_s
        try:
            self._coordinator.agree(kind, must_match=view, timeout_s=limit_s, decide=lambda _: look())
        except BaseException:
            self.let_go(workspace)
            raise

    def let_go(self, workspace: Home) -> None:
        """Give a directory back before the end. Nothing that is in flight may belong to it; on any rank."""
        if workspace in self._held:
            self._held.remove(workspace)
            hook = self._recorders.pop(workspace, None)
            if hook is not None and hook not in self._recorders.values():
                self._emit.remove(hook)
            if self._coordinator.rank == 0:
                workspace.close()

    def close(self) -> None:
        """Give all of them back. What one refuses is logged."""
        for workspace in self._held if self._coordinator.rank == 0 else ():
            try:
                workspace.close()
            except Exception:  # the others are given back all the same
                logger.exception("%s could not be given back", workspace.path)


def _open_through_blips(workspace: Home, config: CheckpointConfig) -> None:
    """Retry for a moment: a network file system may be unavailable after mounting, or while its server changes."""
    deadline = time.monotonic() + min(_BLIP_S, config.timeouts.barrier_s / 2)
    while True:
        try:
            with naming(rank=0, phase="looking at the directory", path=workspace.path):
                _refuse_checkpoint(workspace)
            workspace.open(0.0 if saves_inline() else config.timeouts.barrier_s + config.lease_s)
            return
        except DirectoryError as error:
            if error.errno not in _BLIPS or time.monotonic() >= deadline:
                raise
            logger.info("%s: waiting for it", error)
        time.sleep(0.5)


def _refuse_checkpoint(workspace: Home) -> None:
    """A run within a checkpoint is deleted with it. Weights may lie above a run, or in a checkpoint by their own name."""
    if workspace.is_for_one_name:
        return
    place = workspace.path
    for one in around(place):
        found = candidate_at(one) if is_there(one) and is_one(one) else None
        if found is not None and found.manifest is not None and not catalog.holds_weights_alone(found.manifest.notes):
            what = "it is a checkpoint" if one == place else f"it lies in the checkpoint {one}"
            message = f"{what}, and no directory of checkpoints: give the one that it lies in, {one.parent}, or another"
            raise DirectoryError(path=str(place), message=message)


class HeldDirectories:
    """Takes them at their first use, and keeps the last ones: at least two. Every method is called on every rank.

    Args:
        engine: where the ranks meet.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._held: dict[Path, FileHome] = {}
        self._sequence = 0
        self._swept: Recent[Path, None] = Recent()
        self._ordered: Recent[Path, None] = Recent()

    def hold(self, path: Path, *, resumed: bool = False) -> FileHome:
        """Take what ``path`` names; its hidden folder is ``.safe_ckpt/names/<name>`` beside it.

        Args:
            path: what is to be written.
            resumed: it may be resumed from, as what lies beside it may: its place in the order of commits is behind theirs,
                and events go to ``.safe_ckpt/events.jsonl`` beside it.

        Raises:
            DirectoryError: it cannot be used.
            DirectoryInUseError: a live job holds it.
        """
        if path in self._held:
            self._held[path] = self._held.pop(path)  # the one used last is the last one
        else:
            while len(self._held) > max(1, self._engine.config.max_in_flight):
                self.let_go(next(iter(self._held)))  # what is in flight goes to those used last
            hidden = path.parent / HIDDEN / NAMES / path.name
            record = path.parent / HIDDEN if resumed else False
            workspace = self._take(path.parent, hidden, record)
            self._engine.take_stock(
                workspace,
                {"path": path},
                lambda: self._look(path, workspace, resumed=resumed),
                kind="sequence",
                timeout_s=self._engine.config.timeouts.lengthy_s,  # what is swept may be large
            )
            self._held[path] = workspace
        self._sequence = max(self._sequence, *(held.last_sequence for held in self._held.values()))
        self._held[path].start_after(self._sequence)
        return self._held[path]

    def _take(self, folder: Path, hidden: Path, record: Path | bool) -> FileHome:
        for _ in range(_ATTEMPTS):  # every rank makes as many
            with contextlib.suppress(DirectoryInUseError):  # perhaps only for the moment of a sweep
                return self._engine.hold(folder, hidden=hidden, recorded=record)
            time.sleep(_PAUSE_S)
        return self._engine.hold(folder, hidden=hidden, recorded=record)

    def let_go(self, path: Path) -> None:
        """Give ``path`` back once no save of it is in flight; nothing happens where it is not held. On any rank."""
        if path in self._held:
            workspace = self._held.pop(path)
            self._engine.settle(workspace)
            self._sequence = max(self._sequence, workspace.last_sequence)
            self._engine.let_go(workspace)

    def _look(self, path: Path, workspace: FileHome, *, resumed: bool) -> None:
        self._sequence = max(self._sequence, _sequence_of(path))
        self._swept.use(path.parent, lambda: _sweep(workspace, self._engine.config.lease_s))
        if resumed:
            self._ordered.use(path.parent, lambda: self._look_beside(path))

    def _look_beside(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # the user may be allowed to write here and not to list
            beside = catalog.list_directories(path.parent, on_error=lambda *_: None)
            self._sequence = max(self._sequence, catalog.newest_sequence(beside))


def open_folder(coordinator: Coordinator, workspace: FileHome, key: str, timeout_s: float) -> Path:
    """Make a folder for what hooks write, to be given to ``OnCommit`` as ``prefilled``. Every rank calls this.

    Args:
        coordinator: where the ranks meet.
        workspace: the directory that is held.
        key: unique to the save, equal on all ranks.
        timeout_s: how long to wait for the others.

    Raises:
        DirectoryError: it could not be made, on every rank.
        DirectoryNotSharedError: some ranks do not see it.
    """
    folder = workspace.pending / key / "files"

    def make(_: object) -> str:
        with naming(rank=0, phase="making a folder for hooks", path=folder):
            workspace.make_pending(key)
            folder.mkdir()
            return shared.leave_token(folder)

    token = coordinator.agree("folder for hooks", must_match={"key": key}, timeout_s=timeout_s, decide=make)
    shared.await_shared(coordinator, folder, token, timeout_s)
    return folder


def _sweep(own: FileHome, lease_s: float) -> None:
    """Clean up what killed jobs left under other names: unfinished saves, interrupted replacements. Never raises.

    A job that starts meanwhile may need one of these folders. So each is held for a few renames only, and deleted later.
    """
    names = own.path / HIDDEN / NAMES
    swept = own.trash / _SWEPT
    try:
        folders = sorted(entry for entry in names.iterdir() if entry != own.hidden and not entry.is_symlink())
        swept.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.debug("%s is not swept: %s", names, error)
        return
    for hidden in folders:
        workspace = FileHome(own.path, lease_s=lease_s, hidden=hidden, swept=swept)
        try:
            if read_lock(hidden) is None:
                continue  # no job's, or a job takes it at this moment
            workspace.open(patience_s=0.0)
        except (SafeCheckpointError, OSError) as error:  # a live job's, or its fate is unknown
            logger.debug("%s stays as it is: %s", hidden, error)
            continue
        workspace.close()
    own.discard([swept])


def refuse(
    path: Path,
    adapter: str,
    other: Callable[[Path], str] = lambda _: "",
    *,
    empty: bool = False,
    whole: bool = True,
) -> None:
    """Refuse to replace anything at ``path`` but a directory of the same kind, or one whose files can be kept.

    Args:
        path: where something is to be written.
        adapter: the kind, as in the manifest's notes.
        other: what another tool has written there that must not be replaced; "" for nothing.
        empty: whether only an empty directory will do where there is no manifest.
        whole: it is replaced as a whole, so that no checkpoints may be kept in it.

    Raises:
        DirectoryError: it is something else.
    """
    if not os.path.lexists(path):
        return
    what = ""
    if path.is_symlink() or not path.is_dir():
        what = "it is not a directory"
    elif whole and is_mounted(path):
        message = "a file system is mounted there, and no rename replaces that: name a folder below it"
        raise DirectoryError(path=str(path), message=message, rank=0, code=errno.EBUSY)
    elif whole and any(HIDDEN in below for _, below, _ in os.walk(path)):
        what = "checkpoints are kept in it"
    elif (path / MANIFEST_NAME).exists():
        try:
            is_other = read_manifest(path).notes.get("adapter") != adapter
            what = f"it is no {adapter} directory of safe_ckpt" if is_other else ""
        except SafeCheckpointError as error:
            what = str(error)
    elif empty and any(path.iterdir()):
        what = "it exists and safe_ckpt did not write it"
    else:
        what = other(path)
    if what:
        message = f"{what}, so it is not replaced: give another name, or move it away"
        raise DirectoryError(path=str(path), message=message, rank=0)


def _sequence_of(path: Path) -> int:
    try:
        return read_manifest(path).sequence
    except FileNotFoundError:
        return 0
    except DirectoryError:
        raise
    except SafeCheckpointError:  # not ours, or corrupt: it is replaced, or refused elsewhere
        return 0
