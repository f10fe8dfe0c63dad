"""The saver of one manager: the engine, and the folder of checkpoints that it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safe_ckpt.adapters import Attempt, OnCommit, OpenSave, Planned
from safe_ckpt.adapters.extras import Candidate, checked_metrics, keep_newest, one_resume
from safe_ckpt.adapters.planning import give_back, go_on, note_models, states_of
from safe_ckpt.adapters.saver import Saver, candidates_in
from safe_ckpt.adapters.strategy import Sharded, dcp_names_in
from safe_ckpt.config import CheckpointConfig
from safe_ckpt.errors import CorruptCheckpointError
from safe_ckpt.layouts.table import TORCHTITAN, WEIGHTS_ONLY

if TYPE_CHECKING:
    import torch

ADAPTER = "torchtitan"
OPTIMIZER = "optimizer"
"""The part that a checkpoint of the model alone does not have."""
_WEIGHTS_NOTE = "weights_only"
_BY_NAME = "--checkpoint.load_step"


class ManagerSaver(Saver):
    """Saves for one manager. Every method is called on every rank, on the thread that trains.

    Args:
        config: settings.
        models: the parts of the model, for what is said of their numbers and of what is trained.
        keep: how many checkpoints to keep; 0 for all.
    """

    def __init__(self, config: CheckpointConfig, models: Sequence[torch.nn.Module], keep: int) -> None:
        owner = "a SafeCheckpointManager of torchtitan; its close() frees it"
        super().__init__(config, ADAPTER, find=candidates, owner=owner, by_name=_BY_NAME)
        self._models = list(models)
        self._retention = keep_newest(keep or None)
        self._sharded = Sharded(self.engine)
        self._trusted: Path | None = None

    def save_states(
        self, path: Path, states: Mapping[str, Any], step: int, metrics: Mapping[str, Any] | None = None
    ) -> OpenSave:
        """Save every rank's parts, in the layout of ``torch.distributed.checkpoint``. Returns when the copy is taken.

        Args:
            path: the final name.
            states: the model's tensors by their names, and what has a ``state_dict``.
            step: the training step.
            metrics: numbers of it.
        """
        with self.engine.together("CheckpointManager.save"):
            attempt = Attempt()
            state: dict[str, Any] = {}
            numbers: dict[str, float] = {}
            with attempt:
                numbers = checked_metrics(metrics or {})
                state = states_of(states)
            one_model = {"": self._models[0]} if len(self._models) == 1 else None
            return self._commit(
                path,
                self._sharded.plan({"": state}, attempt, one_model),
                step,
                weights_only=OPTIMIZER not in states,
                metrics=numbers,
            )

    def save_others(self, path: Path, write: Callable[[Path], object], step: int) -> OpenSave:
        """Save a model alone that other code writes, on every rank, into a folder that nobody sees before the commit.

        Args:
            path: the final name.
            write: called with that folder.
            step: the training step.
        """
        with self.engine.together("CheckpointManager.save"):
            home, attempt = self.home(path.parent), Attempt()
            with self.folder_for_others(home, path) as folder:
                with attempt:
                    write(folder)
                return self._commit(path, Planned(error=attempt.error), step, weights_only=True, prefilled=folder)

    def _commit(
        self,
        path: Path,
        planned: Planned,
        step: int,
        *,
        weights_only: bool,
        prefilled: Path | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> OpenSave:
        note_models(self.engine, lambda: self._models)
        return self.save(
            self.home(path.parent),
            path,
            planned.payload(),
            step=step,
            notes={_WEIGHTS_NOTE: weights_only},
            metrics=metrics,
            on_commit=OnCommit(prefilled=prefilled, retention=self._retention),
        )

    def newest_step(self, folder: Path) -> int:
        """The step of the newest checkpoint that all ranks have verified; -1 where there never was one.

        Raises:
            NoValidCheckpointError: there are checkpoints and none is usable.
        """
        info = self.newest(self.home(folder))
        if info is None:
            return -1
        self._trusted = info.file_path
        return int(TORCHTITAN.number_of(info.file_path.name) or 0)

    def load(self, path: Path, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint that all ranks have verified, and that has what each asks for. What fails on one fails on all.

        Args:
            path: which one.
            state_dict: as for ``torch.distributed.checkpoint.load``.

        Raises:
            RestoreError: the checkpoint has nothing for a name, or a tensor of another shape.
        """
        self.check(path)
        state: dict[str, Any] = {}
        reads: list[Callable[[], None]] = []

        def compare() -> None:
            state.update(states_of(state_dict))
            reads.append(self._sharded.loading_in_place(path, state))

        def restore() -> None:
            reads[0]()
            give_back(state, state_dict)

        one_resume.apply(self.engine, compare, path, _BY_NAME)
        one_resume.apply(self.engine, restore, path, _BY_NAME)
        go_on(self.engine, lambda: self._models)

    def check(self, path: Path) -> None:
        """Verify a checkpoint, unless it was verified a moment ago.

        Raises:
            CorruptCheckpointError: it is damaged; on every rank. See ``Saver.verify``.
        """
        if path != self._trusted:
            self.verify(path)
        self._trusted = None


def candidates(folder: Path) -> list[Candidate]:
    """Everything in ``folder`` that training may go on from, those of torchtitan's own manager included. On rank 0."""
    ours = candidates_in(folder, ADAPTER, TORCHTITAN)
    # A copy under another name is not one.
    return [_judged(one) for one in ours if TORCHTITAN.number_of(one.path.name) is not None]


def _judged(candidate: Candidate) -> Candidate:
    """The last checkpoint of a run may be the model alone. Only step 0, a seed, is meant to be begun from."""
    if candidate.problem or candidate.step == 0:
        return candidate
    if candidate.manifest is not None:
        alone = bool(candidate.manifest.notes.get(_WEIGHTS_NOTE))
    else:
        try:
            alone = not any(name.startswith(f"{OPTIMIZER}.") for name in dcp_names_in(candidate.file_path))
        except CorruptCheckpointError as error:
            return replace(candidate, problem=f"{error.file}: {error.message}")
    return replace(candidate, problem=WEIGHTS_ONLY) if alone else candidate
