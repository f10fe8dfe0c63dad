"""Directories that the user names one by one, such as for weights: each is held by itself, beside those of other jobs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from safe_ckpt.core.directory import catalog
from safe_ckpt.core.directory.lease import read_lock
from safe_ckpt.core.directory.workspace import HIDDEN, Workspace
from safe_ckpt.core.formats.manifest import MANIFEST_NAME, read_manifest
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.errors import DirectoryError, DirectoryInUseError, SafeCheckpointError

logger = logging.getLogger(__name__)

NAMES = "names"
_SWEPT = "swept"
_ATTEMPTS = 3
_PAUSE_S = 0.2


class HeldDirectories:
    """Takes them at their first use, and keeps the last two. Every method is called on every rank.

    Args:
        engine: where the ranks meet.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._held: dict[Path, Workspace] = {}
        self._sequence = 0
        self._swept: set[Path] = set()
        self._ordered: set[Path] = set()

    def hold(self, path: Path, *, resumed: bool = False) -> Workspace:
        """Take what ``path`` names; its hidden folder is ``.safe_ckpt/names/<name>`` beside it.

        Args:
            path: what is to be written.
            resumed: it may be resumed from, as what lies beside it may: its place in the order of commits is behind theirs,
                and events go to ``.safe_ckpt/events.jsonl`` beside it.

        Raises:
            DirectoryError: it cannot be used.
            DirectoryInUseError: a live job holds it.
        """
        if path not in self._held:
            if len(self._held) > 1:
                for earlier in list(self._held):
                    self.let_go(earlier)
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

    def _take(self, folder: Path, hidden: Path, record: Path | bool) -> Workspace:
        for _ in range(_ATTEMPTS):  # every rank makes as many
            try:
                return self._engine.hold(folder, hidden=hidden, recorded=record)
            except DirectoryInUseError as error:
                logger.debug("%s; perhaps only for the moment of a sweep", error)
            time.sleep(_PAUSE_S)
        return self._engine.hold(folder, hidden=hidden, recorded=record)

    def let_go(self, path: Path) -> None:
        """Give ``path`` back once nothing is in flight; nothing happens where it is not held. On any rank."""
        if path in self._held:
            self._engine.settle()
            workspace = self._held.pop(path)
            self._sequence = max(self._sequence, workspace.last_sequence)
            self._engine.let_go(workspace)

    def _look(self, path: Path, workspace: Workspace, *, resumed: bool) -> None:
        self._sequence = max(self._sequence, _sequence_of(path))
        if path.parent not in self._swept:
            _sweep(workspace, self._engine.config.lease_s)
            self._swept.add(path.parent)
        if resumed and path.parent not in self._ordered:
            self._sequence = max(self._sequence, _newest_in(path.parent))
            self._ordered.add(path.parent)


def _sweep(own: Workspace, lease_s: float) -> None:
    """Clean up what killed jobs left under other names: half a save, a replacement that was interrupted. Never raises.

    A job that starts meanwhile may want one of them: each is held for a few renames only, and what it held deleted later.
    """
    names = own.path / HIDDEN / NAMES
    swept = own.trash / _SWEPT
    try:
        found = sorted(entry for entry in names.iterdir() if entry != own.hidden and not entry.is_symlink())
        swept.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.debug("%s is not swept: %s", names, error)
        return
    for hidden in found:
        workspace = Workspace(own.path, lease_s=lease_s, hidden=hidden, swept=swept)
        try:
            if read_lock(hidden) is None:
                continue  # nobody's, or one takes it in this moment
            workspace.open(patience_s=0.0)
        except (SafeCheckpointError, OSError) as error:  # a live job's, or nobody can tell yet
            logger.debug("%s stays as it is: %s", hidden, error)
            continue
        workspace.close()
    own.discard([swept])


def _newest_in(folder: Path) -> int:
    try:
        return catalog.newest_sequence(catalog.list_directories(folder, on_error=lambda *_: None))
    except OSError:  # one may write here and not look around
        return 0


def refuse(
    path: Path,
    adapter: str,
    other: Callable[[Path], str] = lambda _: "",
    *,
    empty: bool = False,
    whole: bool = True,
) -> None:
    """What stands at ``path`` is replaced: only something of the same kind, or files that can go along.

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
    remedy = "so it is not replaced: give another name, or move it away"
    if path.is_symlink() or not path.is_dir():
        raise DirectoryError(path=str(path), message=f"it is not a directory, {remedy}", rank=0)
    if whole and any(HIDDEN in below for _, below, _ in os.walk(path)):
        raise DirectoryError(path=str(path), message=f"checkpoints are kept in it, {remedy}", rank=0)
    if (path / MANIFEST_NAME).exists():
        try:
            found = read_manifest(path).notes.get("adapter")
        except SafeCheckpointError as error:
            raise DirectoryError(path=str(path), message=f"{error}; {remedy}", rank=0) from None
        if found != adapter:
            raise DirectoryError(path=str(path), message=f"it is no {adapter} directory of safe_ckpt, {remedy}", rank=0)
    elif empty and any(path.iterdir()):
        raise DirectoryError(path=str(path), message=f"it exists and safe_ckpt did not write it, {remedy}", rank=0)
    elif what := other(path):
        raise DirectoryError(path=str(path), message=f"{what}, {remedy}", rank=0)


def _sequence_of(path: Path) -> int:
    try:
        return read_manifest(path).sequence
    except FileNotFoundError:
        return 0
    except DirectoryError:
        raise
    except SafeCheckpointError:  # not ours, or damaged: it is replaced, or refused elsewhere
        return 0
