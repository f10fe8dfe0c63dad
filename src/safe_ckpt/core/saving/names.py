"""Directories that are held without a save of their own, and the names of checkpoints that lie in them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from safe_ckpt.core.coordination.coordinator import Coordinator
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, read_manifest
from safe_ckpt.core.home import extra_files
from safe_ckpt.core.home.candidates import list_directories, newest_sequence
from safe_ckpt.core.home.file_home import FileHome
from safe_ckpt.core.home.file_lock import read_lock
from safe_ckpt.core.home.home import HIDDEN, NAMES
from safe_ckpt.core.saving import set_up as shared
from safe_ckpt.core.saving.recent import Recent
from safe_ckpt.core.storage.presence import is_mounted
from safe_ckpt.errors import DirectoryError, DirectoryInUseError, SafeCheckpointError, naming

if TYPE_CHECKING:
    from safe_ckpt.core.saving.engine import Engine

logger = logging.getLogger(__name__)
_SWEPT = "swept"
_ATTEMPTS = 3
_PAUSE_S = 0.2


class NamedHomes:
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
            for other in [held for held in self._held if _place(held) == _place(path)]:
                self.release(other)  # the same place, through a link: its lock is this process's own
            while len(self._held) > max(1, self._engine.config.max_in_flight):
                self.release(next(iter(self._held)))  # what is in flight goes to those used last
            hidden = path.parent / HIDDEN / NAMES / path.name
            record = path.parent / HIDDEN if resumed else False
            home = self._take(path.parent, hidden, record)
            self._engine.list_held(
                home,
                {"path": path},
                lambda: self._look(path, home, resumed=resumed),
                kind="sequence",
                timeout_s=self._engine.config.timeouts.lengthy_s,  # what is swept may be large
            )
            self._held[path] = home
        self._sequence = max(self._sequence, *(held.last_sequence for held in self._held.values()))
        self._held[path].start_after(self._sequence)
        return self._held[path]

    def _take(self, folder: Path, hidden: Path, record: Path | bool) -> FileHome:
        for _ in range(_ATTEMPTS):  # every rank makes as many
            with contextlib.suppress(DirectoryInUseError):  # perhaps only for the moment of a sweep
                return self._engine.hold(folder, hidden=hidden, recorded=record)
            time.sleep(_PAUSE_S)
        return self._engine.hold(folder, hidden=hidden, recorded=record)

    def release(self, path: Path) -> None:
        """Give ``path`` back once no save of it is in flight; nothing happens where it is not held. On any rank."""
        if path in self._held:
            home = self._held.pop(path)
            self._engine.wait_until_over(home)
            self._sequence = max(self._sequence, home.last_sequence)
            self._engine.release(home)

    def _look(self, path: Path, home: FileHome, *, resumed: bool) -> None:
        def look_beside() -> None:
            with contextlib.suppress(OSError):  # the user may be allowed to write here and not to list
                beside = list_directories(path.parent, on_error=lambda *_: None)
                self._sequence = max(self._sequence, newest_sequence(beside))

        self._sequence = max(self._sequence, _sequence_of(path))
        self._swept.use(path.parent, lambda: _sweep(home, self._engine.config.lease_s))
        if resumed:
            self._ordered.use(path.parent, look_beside)


def open_folder(coordinator: Coordinator, home: FileHome, key: str, timeout_s: float) -> Path:
    """Make a folder for what hooks write, to be given to ``OnCommit`` as ``prefilled``. Every rank calls this.

    Args:
        coordinator: where the ranks meet.
        home: the directory that is held.
        key: unique to the save, equal on all ranks.
        timeout_s: how long to wait for the others.

    Raises:
        DirectoryError: it could not be made, on every rank.
        DirectoryNotSharedError: some ranks do not see it.
    """
    folder = extra_files.prefilled(home.pending / key)

    def make(_: object) -> str:
        with naming(rank=0, phase="making a folder for hooks", path=folder):
            home.make_prefilled(key)
            return "" if home.is_on_each_host else shared.leave_token(folder)

    token = coordinator.agree("folder for hooks", must_match={"key": key}, timeout_s=timeout_s, decide=make)
    if token:  # on each host's own disk its ranks see it at once
        shared.await_shared(coordinator, folder, token, timeout_s)
    return folder


def _place(path: Path) -> Path:
    """Where the name ``path`` lies, through whichever links it is given; what it names may be a link itself."""
    return Path(os.path.realpath(path.parent)) / path.name


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
        home = FileHome(own.path, lease_s=lease_s, hidden=hidden, swept=swept)
        try:
            if read_lock(hidden) is None:
                continue  # no job's, or a job takes it at this moment
            home.open(patience_s=0.0)
        except (SafeCheckpointError, OSError) as error:  # a live job's, or its fate is unknown
            logger.debug("%s stays as it is: %s", hidden, error)
            continue
        home.close()
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
