"""``SafeCheckpointMixin``: a Trainer whose checkpoints are atomic, verified and written in the background."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformers import TrainingArguments
from transformers import trainer as upstream
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from safe_ckpt.adapters import Patch
from safe_ckpt.adapters.extras import (
    absolute,
    agree_on_settings,
    keeping_types,
    one_resume,
    policy_of,
    refused_retention,
)
from safe_ckpt.adapters.planning import go_on
from safe_ckpt.adapters.spool import refuse_url
from safe_ckpt.config import CheckpointConfig, ConfigLike
from safe_ckpt.errors import ConfigError
from safe_ckpt.events import Hook
from safe_ckpt.transformers import at_load, missing, reference, strategies
from safe_ckpt.transformers.data_place import TrainerDataPlace
from safe_ckpt.transformers.due import SaveWhenDue
from safe_ckpt.transformers.saver import BY_NAME, TransformersSaver
from safe_ckpt.transformers.stopping import StopAtSignal, without_jit

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

logger = logging.getLogger(__name__)
AUTO = "auto"


class SafeCheckpointMixin(_Base):
    """A Trainer with safe checkpoints. Put it before ``Trainer``, or before a subclass of it.

    ``checkpoint-<step>/`` has the files that the Trainer itself would write, plus a manifest and the loaders' places in the
    data; a stock Trainer resumes from it.
    ``save_total_limit`` lets an old one go only after the new one is committed, and never the best or the newest.
    ``resume_from_checkpoint=True`` takes the newest valid one, a path is verified first. A save is written in the background,
    unless a callback's ``on_save``, a ``_save_checkpoint`` of yours, or a push to the hub looks at it: then it is waited for.
    After a signal of ``save_on_signals`` on any process all of them save at one step, and ``train()`` returns.

    Attributes:
        checkpoint_config: settings, equal on all processes; None reads the file that ``SAFE_CKPT_CONFIG`` names, or takes the
            defaults. ``retention`` is the Trainer's own: rules in here are refused.
        checkpoint_hooks: called with what happens; see ``safe_ckpt.events``. Of the class, or set on the object before
            ``train()``.
        checkpoint_every: ``"auto"``: save also when ``Checkpointer.due`` would say so, whatever ``save_strategy`` is ("no",
            say), and behind the last step.
        stopped_by_signal: whether ``train()`` returned before its end, because a process got a signal of ``save_on_signals``.

    Example:
        ```python
        class SafeTrainer(SafeCheckpointMixin, Trainer):
            checkpoint_config = CheckpointConfig(save_on_signals=("SIGTERM",))


        trainer = SafeTrainer(model, args, train_dataset=data)
        trainer.train(resume_from_checkpoint="auto")  # from the newest valid one, or from the start
        ```
    """

    checkpoint_config: ConfigLike | None = None
    checkpoint_hooks: Sequence[Hook] = ()
    checkpoint_every: Literal["auto"] | None = None
    stopped_by_signal = False
    _safe_saver: TransformersSaver | None = None
    _stopper: StopAtSignal | None = None
    _begun_in = ""
    _data_place: TrainerDataPlace | None = None
    _while_made: Patch | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for given in (*args, *kwargs.values()):
            if isinstance(given, TrainingArguments):  # before the Trainer makes a folder of it
                refuse_url(given.output_dir or ".", "output_dir")
        with Patch() as self._while_made:
            super().__init__(*args, **kwargs)
        self._while_made = None

    def create_accelerator_and_postprocess(self) -> None:
        """See ``Trainer.create_accelerator_and_postprocess``."""
        super().create_accelerator_and_postprocess()  # type: ignore[no-untyped-call, unused-ignore]
        self._admit(getattr(self, "model", None))  # releases before 5 set it later

    def call_model_init(self, *args: Any, **kwargs: Any) -> Any:
        """See ``Trainer.call_model_init``."""
        model = super().call_model_init(*args, **kwargs)
        self._admit(model)
        return model

    def _admit(self, model: Any) -> None:
        if self._while_made is not None:
            at_load.admit(model, self.args, self._while_made)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """See ``Trainer.save_model``.

        Raises:
            ConfigError: ``output_dir`` is the address of an object store.
        """
        refuse_url(output_dir or ".", "save_model: output_dir")
        super().save_model(output_dir, _internal_call)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """See ``Trainer.train``. When it returns, everything that was saved is committed. See ``stopped_by_signal``.

        Args:
            resume_from_checkpoint: ``"auto"``: from the newest valid checkpoint, or from the start where there is none at all.
                True: the same, but without one it raises. A path: that one (``"./auto"`` for a folder of this name).
            args: as for the Trainer.
            kwargs: the same.

        Raises:
            ConfigError: a setting is not allowed, or the kind of training is not covered.
            NoValidCheckpointError: there are checkpoints and none is usable; with True also if there is none.
            CorruptCheckpointError: the one at the given path is damaged.
            SafeCheckpointError: a save failed, and its error was not raised yet.
        """
        check = functools.partial(_check, self, resume_from_checkpoint)
        config, _ = agree_on_settings(self.checkpoint_config, check, key="checkpoint_config")
        with TransformersSaver(config, self.checkpoint_hooks) as saver, saver.sharing.loading(self):
            self._safe_saver = saver
            self._begun_in = os.getcwd()  # a relative output_dir means the place that it names now
            stopper = self._stopper = self._watch_signals(saver)
            pace = None
            if self.checkpoint_every is not None:
                pace = SaveWhenDue(saver.engine, absolute(self.args.output_dir or "."))
                self.add_callback(pace)
            try:
                path: str | None = None
                if resume_from_checkpoint is True or resume_from_checkpoint == AUTO:
                    found = saver.resume_from(
                        absolute(self.args.output_dir or "."), needs_one=resume_from_checkpoint is True
                    )
                    path = str(found) if found is not None else None
                elif resume_from_checkpoint:
                    path, begun = str(absolute(resume_from_checkpoint)), time.monotonic()
                    saver.hold_per_host(absolute(self.args.output_dir or "."), Path(path))
                    if saver.verify_if_there(Path(path)):
                        saver.resumed(Path(path), begun)
                if path is not None:
                    saver.warn_if_weights_only(Path(path))
                    missing.warn(Path(path), self.args)
                    go_on(saver.engine, lambda: [self.model])
                    one_resume.apply(saver.engine, functools.partial(reference.load, self, Path(path)))
                place = self._data_place = TrainerDataPlace(path, self.args, saver.engine)
                with Patch(upstream, {"skip_first_batches": self._skipping(place, path)}) as patch:
                    # Each file is written once, and each host keeps its part.
                    patch.put(self.args, {"save_on_each_node": False})
                    return super().train(path, *args, **kwargs)
            finally:
                self.stopped_by_signal = stopper is not None and stopper.stopped
                for own in filter(None, (stopper, pace)):
                    self.remove_callback(own)
                self._safe_saver = self._data_place = self._stopper = None

    def _watch_signals(self, saver: TransformersSaver) -> StopAtSignal | None:
        if not saver.engine.config.save_on_signals:
            return None
        saver.engine.watch_signals(without_jit)
        stopper = StopAtSignal(saver.engine)
        self.add_callback(stopper)
        return stopper

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        path, saver = Path(resume_from_checkpoint), self._safe_saver
        with one_resume.naming_older(path, BY_NAME):
            if saver is None or not at_load.restore_model(saver.engine, self, path):
                super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        saver = self._safe_saver
        if checkpoint is None or saver is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        with one_resume.naming_older(Path(checkpoint), BY_NAME):
            if at_load.restore_optimizer(saver.engine, self, Path(checkpoint)):
                return
            with keeping_types([at_load.plain(self.optimizer)]):
                super()._load_optimizer_and_scheduler(checkpoint)

    def get_train_dataloader(self) -> Any:
        """See ``Trainer.get_train_dataloader``. Within ``train()`` the loader counts what it gives."""
        loader = super().get_train_dataloader()
        if self._data_place is not None:
            self._data_place.watch(loader)
        return loader

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        """See ``Trainer.set_initial_training_values``: how many epochs there are first, how many steps last.

        The Trainer looks at its number of steps only behind one: a training that is over would go on by a step.
        """
        values = super().set_initial_training_values(*args, **kwargs)  # type: ignore[no-untyped-call, unused-ignore]
        is_over = self._data_place is not None and self._data_place.steps() >= values[-1]
        return (0, *values[1:]) if is_over else values

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """See ``Trainer.get_batch_samples``: the batches of one step."""
        found = super().get_batch_samples(*args, **kwargs)  # type: ignore[no-untyped-call, unused-ignore]
        if self._data_place is not None:
            self._data_place.step(self, len(found[0]))
        return found

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """See ``Trainer.log``."""
        if self._data_place is not None and self._data_place.is_resumed:
            missing.warn_of_no_step(logs, self.args)
        super().log(logs, *args, **kwargs)

    def _skipping(self, place: TrainerDataPlace, path: str | None) -> Callable[..., Any]:
        stock = getattr(upstream, "skip_first_batches")  # noqa: B009 (it is not exported)

        def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
            # The Trainer sets the generators after the next batch is there, and what is drawn for it would be another number.
            return place.skip(dataloader, num_batches, stock, lambda: self._load_rng_state(path))

        return skip_first_batches

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._data_place is None or not self._data_place.rng_is_there():
            super()._load_rng_state(checkpoint)
            if self._data_place is not None:
                self._data_place.set_other_generators()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._safe_saver is None:  # not within train(): nothing is held
            super()._save_checkpoint(model, trial)
            return
        # Not by its name: somebody may have given that to a safe class.
        base: Any = next(kind for kind in reversed(type(self).__mro__) if "_save_checkpoint" in vars(kind))
        saver, stock, saved = self._safe_saver, base._save_checkpoint, False

        def save(trainer: Any, *args: Any, **kwargs: Any) -> None:
            nonlocal saved
            if trainer is self:
                self._save_safely(saver, trial)
                saved = True
            else:
                stock(trainer, *args, **kwargs)

        # A class between this one and Trainer may do more: TRL's write a model card first.
        with Patch(base, {"_save_checkpoint": save}):
            super()._save_checkpoint(model, trial)
        if not saved:
            message = "%s._save_checkpoint did not call Trainer's: what it wrote is not safe_ckpt's, and not verified"
            logger.warning(message, type(self).__name__)

    def _save_safely(self, saver: TransformersSaver, trial: Any) -> None:
        run = Path(os.path.normpath(os.path.join(self._begun_in, self._get_output_dir(trial=trial))))
        if self.state.best_global_step != self.state.global_step:
            saver.spare_spoilt(self.state)  # its save is over then; what is saved names it
        best = self.state.best_global_step
        if best and self.args.save_strategy in ("steps", "epoch", "best"):
            folder = run / f"{PREFIX_CHECKPOINT_DIR}-{best}"
            if best == self.state.global_step or folder.exists():
                self.state.best_model_checkpoint = str(folder)
        counts = self.hp_search_backend is None and trial is None
        path = saver.save_trainer(self, run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}", counts=counts)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(path))

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> Any:
        if self._safe_saver is not None:  # what is best so far must be a checkpoint that can be loaded
            self._safe_saver.spare_spoilt(self.state)
        found = super()._determine_best_metric(*args, **kwargs)
        return self._stopper.saves(found) if self._stopper is not None else found

    def _load_best_model(self) -> None:
        if self._safe_saver is not None and self.state.best_model_checkpoint is not None:
            self._safe_saver.wait()
            self._safe_saver.spare_spoilt(self.state)
        if self._safe_saver is not None and self.state.best_model_checkpoint is not None:
            path = Path(self.state.best_model_checkpoint)
            self._safe_saver.verify_if_there(path)
            if at_load.came_in_parts(self):
                at_load.restore_model(self._safe_saver.engine, self, path)
                return
        super()._load_best_model()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._safe_saver is not None:
            self._safe_saver.wait()
        # With a limit of 1 it would delete all but the best, the newest included. The newest must stay.
        with Patch(self.args, {"save_total_limit": None}):
            return super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _sorted_checkpoints(self, *args: Any, **kwargs: Any) -> Any:
        # Only releases before 5.3, without _finalize_training, ask for the checkpoints to delete at the end. There are none.
        if self._safe_saver is None:
            return super()._sorted_checkpoints(*args, **kwargs)  # type: ignore[misc]
        self._safe_saver.wait()
        return []


def _check(trainer: Any, resumed: str | bool | None, config: CheckpointConfig) -> None:
    refuse_url(trainer.args.output_dir or ".", "output_dir")
    if resumed is not None and not isinstance(resumed, bool) and resumed != AUTO:
        refuse_url(resumed, "resume_from_checkpoint")
    strategies.check(trainer, config)
    if trainer.checkpoint_every not in (None, "auto"):
        raise ConfigError(key="checkpoint_every", message='is "auto" or None')
    if trainer.args.save_on_each_node and config.mirror.near != "per-host":
        message = (
            "is not supported by itself: all processes commit one checkpoint. Leave it False, with an output_dir that they all "
            'see; or, for a directory on each host\'s own disk, set mirror.near = "per-host" and mirror.url'
        )
        raise ConfigError(key="TrainingArguments.save_on_each_node", message=message)
    if policy_of(config.retention) is not None:
        own = "the Trainer has its own: use save_total_limit and load_best_model_at_end"
        raise refused_retention(key="retention", instead=own, from_environment=trainer.checkpoint_config is None)
