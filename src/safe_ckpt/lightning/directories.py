"""The directories of one Trainer's callbacks: which one a file belongs to, and its number in the order of commits."""

from __future__ import annotations

from pathlib import Path

from safe_ckpt.adapters.extras import Candidate, FileHome, list_files, one_shot
from safe_ckpt.adapters.saver import Saver
from safe_ckpt.adapters.tracking import Sinks
from safe_ckpt.config import CheckpointConfig
from safe_ckpt.layouts.table import is_lightning_directory

BY_NAME = "fit(..., ckpt_path=...)"
WEIGHTS_NOTE = "weights_only"
NO_DATA = (
    "call torch.serialization.add_safe_globals([...]) with these at the start of the script, give fit(weights_only=False), or "
    "have state_dict() and the hyperparameters return numbers, text, tensors and containers of them"
)


class FileSaver(Saver):
    """Holds the directories of the callbacks; each is taken when one first names it."""

    def __init__(self, config: CheckpointConfig, sinks: Sinks) -> None:
        owner = "a Trainer; it is free when fit() has ended"
        super().__init__(config, find=self._list, owner=owner, by_name=BY_NAME, sinks=sinks)
        self._suffixes: dict[Path, list[str]] = {}

    def hold(self, directory: Path, suffix: str) -> None:
        """Take a directory of checkpoints; a second callback may name the same one, also with another ``suffix``."""
        is_held, suffixes = directory in self.homes, self._suffixes.setdefault(directory, [])
        if suffix in suffixes:
            return
        suffixes.append(suffix)
        try:
            home = self.home(directory)
            if is_held:
                view = {"directory": directory, "suffix": suffix}
                self.engine.agree("list", must_match=view, decide=lambda _: self.list_held(home))
        except BaseException:
            suffixes.remove(suffix)
            raise

    def _list(self, directory: Path) -> list[Candidate]:
        suffixes = self._suffixes.get(directory, ())
        return [one for suffix in suffixes for one in list_files(directory, suffix, is_lightning_directory)]

    def of(self, path: Path) -> FileHome:
        """The directory in which ``path`` lies, else one on the same file system: unfinished files lie there."""
        if (held := self._above(path)) is not None:
            return held
        each = [home.held for home in self.homes.values()]
        beside = next((one for one in each if _device(one.path) == _device(path)), each[0])
        if self.engine.rank == 0:
            beside.start_after(one_shot.last_beside(path))
        return beside

    def next_sequence(self, path: Path) -> int:
        """The number of ``path`` in the order of commits, for a file that is written without the engine, or after its end."""
        held = self._above(path)
        if held is not None and not self.closed:
            return held.next_sequence()
        # Any of them may have numbered a file elsewhere, see ``of``.
        last = max((home.held.last_sequence for home in self.homes.values()), default=0)
        return one_shot.sequence_beside(path, after=last)

    def _above(self, path: Path) -> FileHome | None:
        return next((home.held for folder, home in self.homes.items() if folder in path.parents), None)


def _device(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return path.stat().st_dev
