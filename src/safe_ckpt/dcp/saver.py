"""The savers of this process: one for each process group, kept until the group or the settings are others."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safe_ckpt.adapters.planning import Attempt, note_models
from safe_ckpt.adapters.saver import OpenHome, Saver, candidates_in
from safe_ckpt.adapters.strategy import Sharded
from safe_ckpt.config import CheckpointConfig, ConfigLike, settings_of
from safe_ckpt.core.coordination.agreed_config import config_of_all
from safe_ckpt.core.coordination.process_groups import ALONE, ProcessGroup, group_of
from safe_ckpt.core.formats.manifest import DCP_METADATA, MANIFEST_NAME
from safe_ckpt.core.home import retention
from safe_ckpt.core.home.home import Candidate
from safe_ckpt.core.home.standing import Catalog
from safe_ckpt.core.home.visibility import list_patiently
from safe_ckpt.core.saving.handle import OpenSave
from safe_ckpt.core.saving.names import refuse
from safe_ckpt.core.saving.request import OnCommit, checked_metrics
from safe_ckpt.core.sharding.dcp_load import warn_of_refused
from safe_ckpt.core.storage import presence
from safe_ckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

logger = logging.getLogger(__name__)
ADAPTER = "dcp"
_OWNER = "safe_ckpt.dcp; its next save elsewhere, or configure(), frees it"
_NUMBER = re.compile(r"([0-9]{1,18})(?![0-9])")
_OF_DCP = re.compile(r"(__[0-9]+)?\.metadata(\.tmp)?|__[0-9]+_[0-9]+\.distcp")
_savers: list[DcpSaver] = []
_given: list[CheckpointConfig] = []


def configure(config: ConfigLike | None = None, **parts: Any) -> CheckpointConfig:
    """Settings of this process for what is saved and loaded from now on. Every rank calls this alike, between saves.

    What is in flight is finished first.

    Args:
        config: all settings: a ``CheckpointConfig``, a mapping of its keys, or the path of a YAML file. None for those that
            hold now, which are what the environment says (``SAFE_CKPT_CONFIG``) until this was
            called.
        parts: fields of ``CheckpointConfig`` that replace those of ``config``.

    Returns:
        The settings.

    Raises:
        ConfigError: there is no such field, or a value is not allowed.
        SafeCheckpointError: a save failed, and its error was not raised yet.

    Example:
        ```python
        from safe_ckpt import dcp

        dcp.configure(retention=Retention(keep_last=3))
        dcp.save({"model": model.state_dict()}, checkpoint_id="runs/dcp/step-100")
        ```
    """
    known = {field.name for field in dataclasses.fields(CheckpointConfig)}
    if unknown := sorted(parts.keys() - known):
        raise ConfigError(key=unknown[0], message=f"there is no such setting; there are: {', '.join(sorted(known))}")
    base = settings_of(config) or (_given[0] if _given else CheckpointConfig.from_environment())
    settings = dataclasses.replace(base, **parts)
    _given[:] = [settings]
    savers, _savers[:] = list(_savers), []
    for one in savers:
        one.close()
    return settings


def given_config() -> CheckpointConfig | None:
    """Return what ``configure`` said; None for what the environment says."""
    return _given[0] if _given else None


def ranks_of(process_group: ProcessGroup | None, *, no_dist: bool) -> ProcessGroup | None:
    """The ranks that save or load together, for ``group`` elsewhere."""
    return ALONE if no_dist else process_group


def saver_for(group: ProcessGroup | None) -> DcpSaver:
    """The saver of these ranks, opened at its first use. Every rank calls this."""
    for one in [one for one in _savers if one.engine.coordinator.bereft]:
        _savers.remove(one)
        one.close(quiet=True)
    facts = group_of(group)
    found = next((one for one in _savers if not one.closed and one.engine.coordinator.serves(facts)), None)
    if found is None:
        settings = config_of_all(given_config(), group)
        found = DcpSaver(settings, ADAPTER, owner=_OWNER, group=group)
        _savers.append(found)
    return found


def wait_until_over() -> None:
    """Wait until what this process saves is over, whatever came of it."""
    for one in _savers:
        one.engine.wait_until_over()


class DcpSaver(Saver):
    """Saves the state dicts of one process group. A path is held by itself, as other jobs may keep theirs beside it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._parts = Sharded(self.engine)
        self._catalog: tuple[object, Catalog] = ((), Catalog())

    def save_state(
        self,
        check: Callable[[], Path],
        state_of: Callable[[], dict[str, Any]],
        modules: Callable[[], list[torch.nn.Module]],
        metrics: Mapping[str, Any],
    ) -> tuple[Path, OpenSave]:
        """Take a snapshot and have it written. Every rank calls this.

        Args:
            check: the path; refuses what this rank cannot save. Every rank raises what it raises.
            state_of: the state dict.
            modules: the modules in it that are known.
            metrics: numbers for retention, as they were given.

        Returns:
            Where it will be, and the handle.

        Raises:
            SafeCheckpointError: see ``safe_ckpt.dcp.save``.
        """
        engine = self.engine
        found: list[Path] = []
        values: dict[str, object] = {}  # compared once ``look`` has filled it

        def look() -> None:
            found.append(check())
            checked_metrics(metrics)
            values["checkpoint_id"] = found[0]

        with engine.together("save"):
            engine.agree("dcp", must_match=values, local=look, decide=lambda _: refuse(found[0], ADAPTER))
            path = found[0]
            home = self._hold(path)
            try:
                return path, self._save(home, path, state_of, modules, metrics)
            except Exception:  # nothing of it is in flight: others may save there
                self.names.release(path)
                raise

    def _save(
        self,
        home: OpenHome,
        path: Path,
        state_of: Callable[[], dict[str, Any]],
        modules: Callable[[], list[torch.nn.Module]],
        metrics: Mapping[str, Any],
    ) -> OpenSave:
        attempt, state = Attempt(), dict[str, Any]()
        with attempt:  # a state_dict() of the user's may raise anything
            state = state_of()
        planned = self._parts.plan({"": state}, attempt)
        note_models(self.engine, modules)
        warn_of_refused(state)
        return self.save(
            home,
            path,
            planned.payload(),
            step=step_of(path.name),
            metrics=checked_metrics(metrics),
            # Of the folder that is replaced all is kept but stock DCP's own.
            on_commit=OnCommit(
                keep_foreign=lambda name: not _OF_DCP.fullmatch(name),
                retention=retention.policy_of(self.config.retention),
            ),
        )

    def _hold(self, path: Path) -> OpenHome:
        for other in _savers:
            if other is not self:
                other.names.release(path)
        home = self.names.hold(path, resumed=True)
        return OpenHome(held=home, catalog=self._catalog_of(path))

    def _catalog_of(self, path: Path) -> Catalog:
        """Return what retention chooses from: the siblings whose names differ in their number alone. Known on rank 0 only."""
        if self.engine.rank or not retention.has_rules(self.config.retention):
            return Catalog()
        family = path.parent, family_of(path.name)
        if self._catalog[0] != family:
            found = list_patiently(lambda: candidates_in(path.parent, ADAPTER), self.config.timeouts)
            self._catalog = family, Catalog(one for one in found if family_of(one.path.name) == family[1])
        return self._catalog[1]


def candidates(folder: Path) -> list[Candidate]:
    """The checkpoints of DCP's layout in a directory, those of stock DCP included, in no order. On rank 0.

    Raises:
        OSError: it could not be listed.
    """
    found = {one.path: one for one in candidates_in(folder, ADAPTER)}
    for path in folder.iterdir():
        known = found.get(path)
        if (known is None or known.missing is not None) and not path.is_symlink() and is_stock(path):
            found[path] = Candidate(path=path, foreign=True, step=step_of(path.name))
    return list(found.values())


def is_stock(path: Path) -> bool:
    """Whether another tool has finished a checkpoint of DCP here: ``.metadata`` comes last."""
    return presence.is_there(path / DCP_METADATA) and not presence.is_there(path / MANIFEST_NAME)


def step_of(name: str) -> int:
    """The last number in a name; 0 where there is none."""
    return int((_NUMBER.findall(name) or ["0"])[-1])


def family_of(name: str) -> str:
    """A name without its last number."""
    matches = list(_NUMBER.finditer(name))
    return f"{name[: matches[-1].start()]}#{name[matches[-1].end() :]}" if matches else name
