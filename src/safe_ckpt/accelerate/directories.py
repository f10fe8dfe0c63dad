"""The directories of an Accelerator's checkpoints: how they are held, named and numbered."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safe_ckpt.accelerate import trackers
from safe_ckpt.accelerate.dataloaders import Loaders
from safe_ckpt.accelerate.strategies import Parts
from safe_ckpt.adapters.extras import (
    HIDDEN,
    MANIFEST_NAME,
    WEIGHTS,
    Candidate,
    Catalog,
    absolute,
    by_commit,
    is_of,
    look_at,
    policy_of,
    presence,
    refuse,
    refuse_missing,
)
from safe_ckpt.adapters.saver import OpenHome, Saver, candidates_in
from safe_ckpt.adapters.spool import refuse_url
from safe_ckpt.config import CheckpointConfig, Retention
from safe_ckpt.errors import ConfigError
from safe_ckpt.events import Hook
from safe_ckpt.layouts.table import ACCELERATE, KINDS
from safe_ckpt.text import listed

ADAPTER = "accelerate"
FOLDER = "checkpoints"
BY_NAME = "load_state(path)"
_STEP = re.compile(r"(?:^|(?:step|epoch|checkpoint|ckpt|iter|iteration)s?[-_=]?)([0-9]{1,18})\Z")
_STATE = re.compile(
    r"(?:(?:model|pytorch_model)(?:_\d+)?\.(?:safetensors|bin)|pytorch_model(?:_fsdp)?(?:_\d+)?(?:\.bin)?|optimizer_\d+"
    r"|(?:optimizer|scheduler|sampler|dl_state_dict)(?:_\d+)?\.bin|(?:random_states|custom_checkpoint)_\d+\.pkl|scaler\.pt)\Z"
)
"""The files and folders that Accelerate writes into a checkpoint. Of a stock one they are replaced, and all else is kept."""
_OWNER = "a registered Accelerator; its free_memory() or end_training(), or handle.remove(), frees it"


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where one save goes, agreed by all ranks.

    Attributes:
        home: the directory that is held.
        path: the final name.
        number: Accelerate's ``iteration``.
        step: the number in a name of the user's, or else ``number``.
        hooks: whether some rank has hooks that write files.
        keep_foreign: which files that are there already are kept.
    """

    home: OpenHome
    path: Path
    number: int
    step: int
    hooks: bool
    keep_foreign: Callable[[str], bool]


class AcceleratorSaver(Saver):
    """Saves for one Accelerator. Each directory is taken at its first use.

    With automatic naming that is the folder ``checkpoints``. A path of the user's is held by itself, as other jobs may keep
    theirs beside it, and only until the next path is saved to.

    Args:
        accelerator: its project has the directories.
        config: settings.
        policy: which checkpoints to keep.
        hooks: called with what happens.

    Attributes:
        accelerator: as given.
        loaders: its stateful loaders.
        parts: lays out what every rank has a part of.
        retention: decides which are deleted after a commit; None deletes none.
        said_within_a_window: whether the warning about accumulated gradients was logged.
    """

    may_be_per_host = True

    def __init__(self, accelerator: Any, config: CheckpointConfig, policy: Retention, hooks: Iterable[Hook]) -> None:
        sinks = functools.partial(trackers.sinks, accelerator)
        super().__init__(config, ADAPTER, find=candidates, owner=_OWNER, by_name=BY_NAME, hooks=hooks, sinks=sinks)
        self.accelerator = accelerator
        self.loaders = Loaders()
        self.parts = Parts(self.engine, accelerator)
        self.retention = policy_of(policy)
        self.said_within_a_window = False
        self._catalogs: dict[Path, Catalog] = {}
        self._last: Path | None = None
        self._given: dict[str, Path] = {}
        self._project()

    def automatic(self) -> Path | None:
        """The directory of the checkpoints that Accelerate names itself; None without automatic naming."""
        project = self.accelerator.project_configuration
        if not project.automatic_checkpoint_naming:
            return None
        return self._project() / FOLDER

    def _project(self) -> Path:
        """Where ``project_dir`` lies. A relative one means the place that it named when it was first seen here."""
        given = os.fspath(self.accelerator.project_dir or "")
        return self._given.setdefault(given, absolute(given))

    def hold_automatic(self) -> OpenHome | None:
        """Take the folder of automatic naming, if there is one.

        Raises:
            DirectoryError: it cannot be used.
            DirectoryInUseError: a live job holds it.
        """
        folder = self.automatic()
        # Accelerate loads the entry that sorts last in its folder: only checkpoints may lie there.
        return self.home(folder, hidden=folder.parent / HIDDEN) if folder is not None else None

    def for_load(self) -> OpenHome:
        """The directory that ``load_state()`` without a path loads from.

        Raises:
            ConfigError: neither is a directory named, nor was one saved to.
        """
        home = self.hold_automatic()
        if home is not None:
            return home
        if self._last is None:
            message = (
                "it was not given, and this process has saved nothing yet. Checkpoints that you name yourself are loaded by "
                "their path: load_state(path). Or use automatic_checkpoint_naming=True"
            )
            raise ConfigError(key="load_state: input_dir", message=message)
        return self._hold_named(self._last)

    def fetch_path(self, path: Path) -> None:
        """Bring a checkpoint that is not there from the mirror, if that has it. Every rank calls this.

        Raises:
            SafeCheckpointError: the mirror gives no answer, or what it has cannot be used; on every rank.
        """
        if self.config.mirror.url is None or self.is_directory(path, "fetch"):
            return
        home = self.hold_automatic()
        own = home is not None and path.parent == home.held.path
        self.fetch(home if own and home is not None else self._hold_named(path), path.name)

    def loadable(self, home: OpenHome) -> list[Candidate]:
        """The checkpoints that ``load_state()`` may take; of those that the user named, only this process's. On rank 0."""
        listed = candidates(home.held.path)
        if home in self.homes.values():
            return listed
        own = {info.path: info for info in home.catalog.committed}
        mine = [one for one in listed if one.path in own]
        return [one for one in mine if one.manifest is None or is_of(own[one.path], one.manifest)]

    def for_weights(self, path: Path, must_match: Mapping[str, str], check: Callable[[], object]) -> bool:
        """Whether a directory for weights alone can be replaced as a whole: there are no directories in it, and it is no link.

        Args:
            path: the directory.
            must_match: what else must be equal on all ranks.
            check: raises where this rank cannot save; every rank raises it.

        Raises:
            DirectoryError: it is a checkpoint, or no directory.
        """

        def decide(_: object) -> bool:
            whole = not path.is_symlink() and not _has_folders(path)
            stock = "it is a checkpoint of an Accelerator"
            target = path if whole else path.resolve()
            refuse(target, WEIGHTS, lambda found: "" if ACCELERATE.problem(found) else stock, whole=whole)
            return whole

        values, phase = {"save_directory": path, **must_match}, "planning the weights"
        whole = self.engine.agree("save_model", must_match=values, local=check, decide=decide, phase=phase)
        self._take_over(path)
        return bool(whole)

    def target(self, output_dir: str | os.PathLike[str] | None, *, hooks: bool) -> Target:
        """Agree on where a save goes.

        Args:
            output_dir: as given to ``save_state``.
            hooks: whether this rank has hooks that write files.

        Raises:
            ConfigError: neither a path was given nor does Accelerate name checkpoints.
            DirectoryError: the path exists, and what is there would be lost.
            DesyncError: the ranks gave different paths.
        """
        home = self.hold_automatic()
        iteration = self.accelerator.project_configuration.iteration

        values: dict[str, object] = {}  # filled by ``check``, which runs before the ranks compare

        def check() -> bool:
            values["output_dir"] = _named(output_dir) if home is None else "automatic"
            return hooks

        def decide(answers: Mapping[int, Any]) -> dict[str, Any]:
            if home is None:
                refuse(_named(output_dir), ADAPTER, _would_be_lost)
            number = iteration if home is None else max(iteration, next_number(home.held.path))
            stock = home is None and not presence.is_there(_named(output_dir) / MANIFEST_NAME)
            return {"number": number, "hooks": any(answers.values()), "stock": stock}

        agreed = self.engine.agree("save_state", must_match=values, local=check, decide=decide)
        number = agreed["number"]
        if home is not None:
            path, step = home.held.path / f"checkpoint_{number}", number
        else:
            path = self._last = _named(output_dir)
            found = _STEP.search(path.name)
            home, step = self._hold_named(path), int(found[1]) if found else number
        keep_foreign = _is_users if agreed["stock"] else lambda _: True
        return Target(home=home, path=path, number=number, step=step, hooks=agreed["hooks"], keep_foreign=keep_foreign)

    def _hold_named(self, path: Path) -> OpenHome:
        self._take_over(path)
        home = self.names.hold(path, resumed=True)
        return OpenHome(held=home, catalog=self._catalog_of(path.parent))

    def _catalog_of(self, folder: Path) -> Catalog:
        if folder not in self._catalogs:
            # Two for each new one, in turn: folders whose checkpoints are all gone must not accumulate.
            for other in list(self._catalogs)[:2]:
                known = self._catalogs.pop(other)
                if any(info.file_path.exists() for info in known.committed):
                    self._catalogs[other] = known
            self._catalogs[folder] = Catalog()
        return self._catalogs[folder]

    def _take_over(self, path: Path) -> None:
        """Take ``path`` from other Accelerators of this process, such as that of a notebook's cell that was run again."""
        for other in self.living():
            if other is not self:
                other.names.release(path)


def candidates(folder: Path) -> list[Candidate]:
    """Everything in ``folder`` that may be a checkpoint of an Accelerator, stock ones included, in no order."""
    return candidates_in(folder, ADAPTER, ACCELERATE)


def found_at(path: Path) -> tuple[Sequence[Candidate], bool]:
    """The checkpoints in a directory, whatever their names, those of stock Accelerate too; and whether it is one itself.

    On rank 0.

    Raises:
        CheckpointNotFoundError: it names a checkpoint that is not there.
    """
    if presence.is_there(path / MANIFEST_NAME):
        return [look_at(path)], True
    if ACCELERATE.is_one(path):
        return [_stock(path)], True
    refuse_missing(path)
    if not presence.is_directory(path):
        return [], False
    found = candidates(path)
    known = {one.path for one in found}
    others = (one for one in path.iterdir() if one not in known and not one.is_symlink())
    stock = [_stock(one) for one in others if ACCELERATE.is_one(one) and not presence.is_there(one / MANIFEST_NAME)]
    return [*found, *stock], False


def _stock(path: Path) -> Candidate:
    number = _STEP.search(path.name)
    return Candidate(path=path, foreign=True, step=int(number[1]) if number else -1, problem=ACCELERATE.problem(path))


def names_below(path: Path) -> list[str]:
    """The checkpoints below a directory that is itself no checkpoint, newest first. On rank 0."""
    folders = [path, path / FOLDER] if ACCELERATE.problem(path) else []
    found = [one for folder in folders if presence.is_directory(folder) for one in candidates(folder)]
    return [str(one.file_path.relative_to(path)) for one in by_commit(found)]


def next_number(folder: Path) -> int:
    """One more than the highest number in use."""
    try:
        numbers = [ACCELERATE.number_of(name) for name in os.listdir(folder)]
    except FileNotFoundError:
        return 0
    return max((number for number in numbers if number is not None), default=-1) + 1


def _named(output_dir: str | os.PathLike[str] | None) -> Path:
    if output_dir is None:
        message = "is missing: give it, or use ProjectConfiguration(automatic_checkpoint_naming=True)"
        raise ConfigError(key="save_state: output_dir", message=message)
    refuse_url(output_dir, "save_state: output_dir")
    return absolute(output_dir)


def _has_folders(path: Path) -> bool:
    try:
        with os.scandir(path) as entries:
            return any(entry.is_dir() for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is_users(name: str) -> bool:
    return not _STATE.match(name.partition("/")[0])


def _would_be_lost(path: Path) -> str:
    """Say what a directory without a manifest has that a checkpoint neither replaces nor keeps beside it; "" for nothing."""
    if ACCELERATE.is_one(path):
        return ""
    if kind := next((kind.name for kind in KINDS if kind is not ACCELERATE and kind.is_one(path)), ""):
        return f"it is a {kind}"
    names = sorted(name for name in os.listdir(path) if not _is_users(name))
    return f"it is no checkpoint of an Accelerator, and its {listed(names)} would be replaced" if names else ""
