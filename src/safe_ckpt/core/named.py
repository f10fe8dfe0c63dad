"""Directories that the user names one by one, such as for weights: each is held by itself, beside those of other jobs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from safe_ckpt.core.engine import Engine
from safe_ckpt.core.manifest import MANIFEST_NAME, read_manifest
from safe_ckpt.core.root import HIDDEN, Root
from safe_ckpt.errors import DirectoryError, SafeCheckpointError

_NAMES = "names"


class NamedRoots:
    """Takes them at their first use, and keeps the last two. Every method is called on every rank.

    Args:
        engine: where the ranks meet.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._held: dict[Path, Root] = {}
        self._sequence = 0

    def hold(self, path: Path) -> Root:
        """Take what ``path`` names; its hidden folder is ``.safe_ckpt/names/<name>`` beside it.

        Raises:
            DirectoryError: it cannot be used.
            DirectoryInUseError: a live job holds it.
        """
        if path not in self._held:
            if len(self._held) > 1:
                # Nothing of theirs may be in flight when they are let go.
                self._engine.settle()
                for earlier in list(self._held):
                    self._sequence = max(self._sequence, self._held[earlier].last_sequence)
                    self._engine.let_go(self._held.pop(earlier))
            hidden = path.parent / HIDDEN / _NAMES / path.name
            root = self._held[path] = self._engine.hold(path.parent, hidden=hidden, recorded=False)
            self._engine.agree("sequence", {"path": path}, decide=lambda _: root.start_after(_sequence_of(path)))
        self._sequence = max(self._sequence, *(held.last_sequence for held in self._held.values()))
        self._held[path].start_after(self._sequence)
        return self._held[path]


def refuse(path: Path, adapter: str, other: Callable[[Path], str] = lambda _: "", *, empty: bool = False) -> None:
    """What stands at ``path`` is replaced as a whole: only something of the same kind, or files that can go along.

    Args:
        path: where something is to be written.
        adapter: the kind, as in the manifest's notes.
        other: what another tool has written there that must not be replaced; "" for nothing.
        empty: whether only an empty directory will do where there is no manifest.

    Raises:
        DirectoryError: it is something else.
    """
    if not os.path.lexists(path):
        return
    remedy = "so it is not replaced: give another name, or move it away"
    if path.is_symlink() or not path.is_dir():
        raise DirectoryError(path=str(path), message=f"it is not a directory, {remedy}", rank=0)
    if any(HIDDEN in below for _, below, _ in os.walk(path)):
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
