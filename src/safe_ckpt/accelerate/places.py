"""Where checkpoints of an Accelerator lie: directories that are held, names, numbers, and what other tools left there."""

from __future__ import annotations

import os
import re
import uuid
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import utils

from safe_ckpt.config import Retention
from safe_ckpt.core import extras, select
from safe_ckpt.core.engine import Engine
from safe_ckpt.core.ledger import Ledger
from safe_ckpt.core.manifest import MANIFEST_NAME
from safe_ckpt.core.root import HIDDEN, Root
from safe_ckpt.core.select import Candidate
from safe_ckpt.errors import ConfigError, DirectoryError

ADAPTER = "accelerate"
FOLDER = "checkpoints"
_NAME = re.compile(r"^checkpoint_(\d+)$")


@dataclass(kw_only=True)
class Place:
    """A directory of checkpoints that is held. ``ledger`` counts on rank 0 only."""

    root: Root
    ledger: Ledger


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where one save goes, agreed by all ranks.

    Attributes:
        place: the directory that is held.
        path: the final name.
        number: Accelerate's ``iteration``.
        begun: a folder for what hooks write; None when no rank has hooks.
        key: what ``begun`` is staged under.
    """

    place: Place
    path: Path
    number: int
    begun: Path | None
    key: str


class Places:
    """The directories of one Accelerator, each taken at its first use. Every method is called on every rank.

    Args:
        engine: where the ranks meet.
        accelerator: whose project they belong to.
        retention: what to keep.
    """

    def __init__(self, engine: Engine, accelerator: Any, retention: Retention) -> None:
        self._engine = engine
        self._accelerator = accelerator
        self._retention = retention
        self._held: dict[Path, Place] = {}
        self._last: Path | None = None

    def automatic(self) -> Path | None:
        """Where checkpoints go that Accelerate names itself; None when it does not."""
        project = self._accelerator.project_configuration
        if not project.automatic_checkpoint_naming:
            return None
        return Path(os.path.abspath(self._accelerator.project_dir)) / FOLDER

    def hold(self, folder: Path) -> Place:
        """Take a directory.

        Raises:
            DirectoryError: it cannot be used.
            DirectoryInUseError: a live job holds it.
        """
        if folder not in self._held:
            place = Place(root=self._engine.hold(folder, hidden=self._hidden(folder)), ledger=Ledger(self._retention))
            self._held[folder] = place
            self._engine.agree("list", {"directory": folder}, decide=lambda _: self._take_stock(place))
        self._last = folder
        return self._held[folder]

    def _hidden(self, folder: Path) -> Path:
        # In the folder that Accelerate lists nothing but checkpoints may lie: it takes whatever sorts last.
        automatic = self.automatic()
        if automatic is None or folder not in (automatic, automatic.parent):
            return folder / HIDDEN
        beside = automatic.parent / HIDDEN
        return beside if folder == automatic else beside / "project"  # weights beside the checkpoints: another lock

    def for_load(self) -> Place:
        """Where ``load_state()`` without a path looks.

        Raises:
            ConfigError: that cannot be told.
        """
        folder = self.automatic() or self._last
        if folder is None:
            message = (
                "no input_dir was given and nothing was saved yet: give it, or use automatic_checkpoint_naming=True"
            )
            raise ConfigError(key="load_state: input_dir", message=message)
        return self.hold(folder)

    def target(self, output_dir: str | os.PathLike[str] | None, *, hooks: bool) -> Target:
        """Agree on where a save goes.

        Args:
            output_dir: as given to ``save_state``.
            hooks: whether this rank has hooks that write files.

        Raises:
            ConfigError: neither a path was given nor does Accelerate name checkpoints.
            DirectoryError: the path exists and is not a checkpoint of ours.
            DesyncError: the ranks gave different paths.
        """
        folder, name = self.automatic(), ""
        if folder is None:
            if output_dir is None:
                message = "give it, or use ProjectConfiguration(automatic_checkpoint_naming=True)"
                raise ConfigError(key="save_state: output_dir", message=message)
            path = Path(os.path.abspath(output_dir))
            folder, name = path.parent, path.name
        place = self.hold(folder)
        iteration = self._accelerator.project_configuration.iteration

        def decide(answers: Mapping[int, Any]) -> dict[str, Any]:
            number = iteration if name else max(iteration, next_number(folder))
            if name:
                _refuse_what_is_not_ours(folder / name)
            chosen = name or f"checkpoint_{number}"
            return {"name": chosen, "number": number, "hooks": any(answers.values()), "key": uuid.uuid4().hex}

        view = {"directory": folder, "name": name or "automatic"}
        agreed = self._engine.agree("name of the checkpoint", view, answer=hooks, decide=decide)
        begun = None
        if agreed["hooks"]:
            timeout_s = self._engine.config.timeouts.barrier_s
            begun = extras.open_folder(self._engine.session, place.root, agreed["key"], timeout_s)
        path = folder / agreed["name"]
        return Target(place=place, path=path, number=agreed["number"], begun=begun, key=agreed["key"])

    def _take_stock(self, place: Place) -> None:
        found = candidates(place.root.path)
        place.ledger = Ledger(self._retention, found)
        place.root.start_after(select.newest_sequence(found))


def candidates(folder: Path) -> list[Candidate]:
    """Everything in ``folder`` that may be a checkpoint of an Accelerator, stock ones included, in no order."""
    found = select.list_directories(folder, _number_of, _problem_of_stock)
    return [c for c in found if c.manifest is None or c.manifest.notes.get("adapter") == ADAPTER]


def next_number(folder: Path) -> int:
    """One more than the highest number in use."""
    try:
        numbers = [_number_of(name) for name in os.listdir(folder)]
    except FileNotFoundError:
        return 0
    return max((number for number in numbers if number is not None), default=-1) + 1


def _number_of(name: str) -> int | None:
    found = _NAME.match(name)
    return int(found.group(1)) if found else None


def _problem_of_stock(path: Path) -> str:
    # Accelerate writes the random states last but for custom objects: without them it was interrupted.
    last = path / f"{utils.RNG_STATE_NAME}_0.pkl"
    if not last.exists():
        return f"it has no manifest, and without {last.name} it is not complete either"
    return "" if zipfile.is_zipfile(last) else f"it has no manifest, and {last.name} was not written to its end"


def _refuse_what_is_not_ours(path: Path) -> None:
    if not os.path.lexists(path) or (path / MANIFEST_NAME).exists():
        return
    if path.is_symlink() or not path.is_dir() or any(path.iterdir()):
        message = "it exists and safe_ckpt did not write it, so it is not replaced: give another name, or move it away"
        raise DirectoryError(path=str(path), message=message, rank=0)
