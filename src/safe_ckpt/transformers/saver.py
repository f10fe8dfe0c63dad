"""The saver of one ``train()``: the engine, and the directories that it holds."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers.trainer_callback import ExportableState

from safe_ckpt.adapters import Attempt, OnCommit, OpenSave, Planned
from safe_ckpt.adapters.extras import HIDDEN_TOO, Candidate, keep_newest, presence, refuse_short
from safe_ckpt.adapters.planning import note_models
from safe_ckpt.adapters.saver import OpenHome, Saver, candidates_in
from safe_ckpt.config import CheckpointConfig
from safe_ckpt.errors import NoValidCheckpointError
from safe_ckpt.events import Hook
from safe_ckpt.layouts.table import TRAINER_STATE, TRANSFORMERS
from safe_ckpt.transformers import reference
from safe_ckpt.transformers.contents import catching
from safe_ckpt.transformers.lookers import anyone_looks
from safe_ckpt.transformers.strategies import Sharing, is_shared

ADAPTER = "transformers"
BY_NAME = "train(resume_from_checkpoint=...)"
_OPTIMIZER = ("optimizer", "global_step")  # also of FSDP2 and DeepSpeed, which make folders of it
logger = logging.getLogger(__name__)


class TransformersSaver(Saver):
    """Saves for one Trainer. Every method is called on every process, on the thread that trains.

    Args:
        config: settings.
        hooks: called with what happens.

    Attributes:
        sharing: plans and loads what several processes have parts of.
    """

    may_be_per_host = True

    def __init__(self, config: CheckpointConfig, hooks: Iterable[Hook] = ()) -> None:
        owner = "a Transformers Trainer; it is free when train() has ended"
        super().__init__(config, ADAPTER, find=candidates, owner=owner, by_name=BY_NAME, hooks=hooks)
        self.sharing = Sharing(self.engine)
        self._handles: dict[int, OpenSave] = {}
        self._best: tuple[Any, Any, Any] = None, None, None

    def resume_from(self, folder: Path, *, needs_one: bool) -> Path | None:
        """The newest valid checkpoint in ``folder``, verified and agreed; None where there is none at all.

        Raises:
            NoValidCheckpointError: none of them is usable; with ``needs_one`` also where there is none.
        """
        info = self.newest(self._home(folder))
        if info is None and needs_one:
            message = (
                'there is no checkpoint to resume from; train(resume_from_checkpoint="auto") begins a fresh run then'
            )
            raise NoValidCheckpointError(path=str(folder), message=message)
        return info.file_path if info is not None else None

    def hold_per_host(self, folder: Path, path: Path) -> None:
        """Take the Trainer's directory where each host has its own and this checkpoint lies there, perhaps in parts."""
        if self.config.mirror.near == "per-host" and path.parent == folder:
            self._home(folder)

    def verify_if_there(self, path: Path) -> bool:
        """Verify the checkpoint at ``path``; one that a stock Trainer wrote is taken as it is. Returns whether there is one.

        Raises:
            CorruptCheckpointError: it is damaged.
        """
        there = self.is_directory(path, "checkpoint")  # else the Trainer reports what is missing
        if there:
            self.verify(path)
        return there

    def warn_if_weights_only(self, path: Path) -> None:
        """Log, once, that a checkpoint that training goes on from has no state of the optimizer."""
        names = os.listdir(path) if self.engine.rank == 0 and presence.is_directory(path) else None
        if names is not None and not any(name.startswith(_OPTIMIZER) for name in names):
            logger.warning(
                "%s has the weights of the model alone, as with save_only_model=True: the steps go on from there, but the "
                "optimizer, its schedule and the generators begin afresh. To resume exactly, save with save_only_model=False",
                path,
            )

    def save_trainer(self, trainer: Any, path: Path, *, counts: bool = False) -> Path:
        """Take a snapshot of what the Trainer would write and have it written. Returns where it will be.

        Where somebody on any process looks at it next, it is there when this returns.

        Args:
            trainer: whose.
            path: where it goes.
            counts: whether the operations so far are summed up. That is a collective, so the processes meet first.

        Raises:
            SafeCheckpointError: it could not be started or committed, or an earlier one failed; the same on every process.
        """
        with self.engine.together("Trainer._save_checkpoint"):
            home = self._home(path.parent)
            awaited: bool = self.engine.agree(
                "on_save",
                local=lambda: os.path.lexists(path) or anyone_looks(trainer),  # who made it there may go on with it
                decide=lambda answers: any(answers.values()),
            )
            with trainer._data_place.before_the_step(trainer):
                if counts:
                    trainer.store_flos()
                with self.folder_for_others(home, path) as folder:
                    self._save(trainer, path, home, folder)
        if awaited:
            self.wait()
        return path

    def spare_spoilt(self, state: Any) -> None:
        """If the Trainer's best checkpoint has bad numbers or was not saved, make the best one before it the best again.

        Waits for the save of the best one, if that is still in flight. Every rank calls this.
        """
        if not state.best_global_step:
            return
        handle = self._handles.get(state.best_global_step)
        if handle is not None and self._is_spoilt(handle):
            state.best_metric, state.best_global_step, state.best_model_checkpoint = self._best
        else:
            self._best = state.best_metric, state.best_global_step, state.best_model_checkpoint
        self._keep_best(state)

    def _is_spoilt(self, handle: OpenSave) -> bool:
        handle.wait_until_over()
        # Agreed: where a commit's outcome is not known, one rank may hold for failed what another one knows to be there.
        return bool(
            self.engine.agree(
                "the best checkpoint",
                local=lambda: handle.outcome is None or handle.outcome.marked,
                decide=lambda answers: any(answers.values()),
            )
        )

    def _keep_best(self, state: Any) -> None:
        # Of the newest, too: where an epoch's evaluation comes behind the save of its last step, that is about to be the best.
        wanted = (state.best_global_step, state.global_step)
        self._handles = {step: one for step, one in self._handles.items() if step in wanted}

    def _save(self, trainer: Any, path: Path, home: OpenHome, folder: Path) -> None:
        best = trainer.state.best_model_checkpoint
        limit = trainer.args.save_total_limit
        note_models(self.engine, lambda: [trainer.model])
        attempt = Attempt()
        noting = self.sharing.noting(trainer, folder)
        besides = self.sharing.besides(trainer)
        with noting as noted, catching(folder, shards=trainer.is_fsdp_enabled, besides=besides) as caught, attempt:
            if not is_shared(trainer):  # Transformers looks for shared memory in them: its error names none
                for name, parameter in trainer.model.named_parameters():
                    refuse_short(name, parameter)
            _write(trainer, str(folder))  # the Trainer or a callback may raise anything
        shared = self.sharing.plan(trainer, noted, caught, attempt.error)
        planned = Planned.joined([Planned(files=list(caught.files.values())), shared])
        retention = keep_newest(limit, Path(best) if best else None) if limit else None
        step = int(trainer.state.global_step)
        handle = self.save(
            home,
            path,
            planned.payload(),
            step=step,
            metrics=_metrics(trainer),
            notes=planned.notes,
            on_commit=OnCommit(prefilled=folder, keep_foreign=lambda _: True, retention=retention),
        )
        self._keep_best(trainer.state)  # besides it only this one may become the best
        self._handles[step] = handle

    def _home(self, folder: Path) -> OpenHome:
        # A folder whose name begins with an underscore is not pushed to the hub.
        return self.home(folder, hidden=folder / HIDDEN_TOO)


def candidates(folder: Path) -> list[Candidate]:
    """Everything in ``folder`` that may be a checkpoint of a Trainer, stock ones included."""
    # A copy that somebody keeps is not one.
    ours = candidates_in(folder, ADAPTER, TRANSFORMERS)
    return [c for c in ours if TRANSFORMERS.number_of(c.path.name) is not None]


def _write(trainer: Any, folder: str) -> None:
    """Write what ``Trainer._save_checkpoint`` writes, in its order."""
    trainer.save_model(folder, _internal_call=True)
    if not trainer.args.save_only_model:
        trainer._save_optimizer_and_scheduler(folder)
        trainer._save_scaler(folder)
        trainer._data_place.save(folder, trainer)
        reference.save(trainer, folder)
    if not trainer.args.should_save:
        return
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            states = trainer.state.stateful_callbacks
            name, state = type(callback).__name__, callback.state()
            if isinstance(states[name], list):
                states[name].append(state)
            else:
                states[name] = state
    trainer.state.save_to_json(f"{folder}/{TRAINER_STATE}")


def _metrics(trainer: Any) -> dict[str, float]:
    """Return what was evaluated at this step, for people who look into the manifest."""
    latest: Mapping[str, Any] = next((row for row in reversed(trainer.state.log_history) if "eval_loss" in row), {})
    if latest.get("step") != trainer.state.global_step:
        return {}
    return {key: float(value) for key, value in latest.items() if isinstance(value, int | float)}
