"""The directories of one Trainer's callbacks: which one a file belongs to, and its number in the order of commits."""

from __future__ import annotations

from pathlib import Path

from safe_ckpt.adapters import Engine
from safe_ckpt.adapters.directories import Workspace, catalog, commit_order
from safe_ckpt.adapters.directories import listed as catalog_listed
from safe_ckpt.layouts.table import is_lightning_directory


class TrainerDirectories:
    """The directories that are held; each is taken when a callback first names it.

    Args:
        engine: where the ranks meet.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._workspaces: dict[Path, Workspace] = {}
        self._listed: set[tuple[Path, str]] = set()

    def __contains__(self, directory: Path) -> bool:
        return directory in self._workspaces

    def __getitem__(self, directory: Path) -> Workspace:
        return self._workspaces[directory]

    def hold(self, directory: Path, suffix: str) -> None:
        """Take a directory of checkpoints; a second callback may name the same one, also with another ``suffix``."""
        if (directory, suffix) in self._listed:
            return
        is_held = directory in self._workspaces
        workspace = self._take(directory)

        def look(_: object) -> None:
            listed = catalog_listed(
                lambda: catalog.list_files(directory, suffix, is_lightning_directory), self._engine.config.timeouts
            )
            workspace.start_after(catalog.newest_sequence(listed))

        try:
            self._engine.agree("list", must_match={"directory": directory, "suffix": suffix}, decide=look)
        except BaseException:
            if not is_held:  # without a listing its order of commits would restart
                del self._workspaces[directory]
                self._engine.let_go(workspace)
            raise
        self._listed.add((directory, suffix))

    def hold_beside(self, path: Path, sequence: int) -> None:
        """Take the folder of one file whose number in the order of commits is known."""
        self._take(path.parent).start_after(sequence - 1)

    def _take(self, directory: Path) -> Workspace:
        if directory not in self._workspaces:
            self._workspaces[directory] = self._engine.hold(directory)
        return self._workspaces[directory]

    def of(self, path: Path) -> Workspace:
        """The directory in which ``path`` lies, else one on the same file system: unfinished files lie there."""
        if (held := self._above(path)) is not None:
            return held
        workspaces = list(self._workspaces.values())
        beside = next((one for one in workspaces if _device(one.path) == _device(path)), workspaces[0])
        if self._engine.rank == 0:
            beside.start_after(commit_order.last_beside(path))
        return beside

    def next_sequence(self, path: Path, *, closed: bool) -> int:
        """The number of ``path`` in the order of commits, for a file that is written without the engine, or after its end."""
        held = self._above(path)
        if held is not None and not closed:
            return held.next_sequence()
        # Any of them may have numbered a file elsewhere, see ``of``.
        last = max((workspace.last_sequence for workspace in self._workspaces.values()), default=0)
        return commit_order.sequence_beside(path, after=last)

    def _above(self, path: Path) -> Workspace | None:
        return next((held for directory, held in self._workspaces.items() if directory in path.parents), None)


def _device(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return path.stat().st_dev
