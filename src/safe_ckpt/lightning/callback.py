"""The callback: a ModelCheckpoint whose files are complete, verified, and deleted only after their successors are committed."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

from safe_ckpt.adapters.extras import HIDDEN, hugging_face, is_marked
from safe_ckpt.adapters.patch import Patch
from safe_ckpt.adapters.spool import is_url, refuse_url, spooled
from safe_ckpt.config import CheckpointConfig, settings_of
from safe_ckpt.errors import ConfigError
from safe_ckpt.events import Hook
from safe_ckpt.ledger.pace import Pace, pace_of
from safe_ckpt.lightning import dataloader, install, loop_state, signals
from safe_ckpt.lightning import resume as resuming
from safe_ckpt.lightning.callback_state import Counts, PendingActions, SavedCallbackState, known_paths, reconcile
from safe_ckpt.lightning.checkpoint_io import ModelCheckpoint
from safe_ckpt.lightning.saver import TrainerSaver

logger = logging.getLogger(__name__)
# They belong to a running stage: our saver, and the logging methods that a Trainer attaches.
_LIVE = ("_pace", "_paced_step", "_saver", "_pending", "_saved_state", "_counts", "log", "log_dict")
_NEVER = 1 << 40  # steps
_WAITS = "_defer_save_until_validation"
_SAVED = "safe_ckpt.saved"
_OF_SAVED = ("_last_global_step_saved", "_last_checkpoint_saved")


class SafeCheckpointCallback(ModelCheckpoint):
    """A ``ModelCheckpoint`` with the same arguments, file names and attributes, and these differences.

    A checkpoint is snapshotted while training waits, then written by another process and committed atomically with checksums.
    What it replaces is deleted after that, never before. After a signal of ``config.save_on_signals`` on any rank, all ranks
    save ``stopped.ckpt`` at the same batch, wait until it is committed, and ``fit`` returns; ``resume="auto"`` goes on from
    there. When a save fails, ``best_model_path`` and the other attributes are restored, and every rank raises the same error at
    the next save, or before ``fit`` returns. ``last.ckpt`` and a top-k file of one step are two names of one file.

    Args:
        dirpath: as in ``ModelCheckpoint``; a local or mounted file system that all ranks share. Of an address such as
            ``s3://bucket/run`` the files lie in ``storage.cache_dir`` first, and are uploaded from there.
        filename: as in ``ModelCheckpoint``, like all arguments down to ``enable_version_counter``.
        monitor: see there.
        verbose: see there.
        save_last: see there.
        save_top_k: see there. In Lightning this is the retention: a ``Retention`` in ``config`` is refused.
        save_on_exception: see there. On several ranks it saves only if all of them meet an exception.
        save_weights_only: see there.
        mode: see there.
        auto_insert_metric_name: see there.
        every_n_train_steps: see there.
        train_time_interval: see there.
        every_n_epochs: see there.
        save_on_train_epoch_end: see there.
        enable_version_counter: see there.
        config: all other settings: a ``CheckpointConfig``, a mapping of its keys, or the path of a YAML file; None reads
            ``SAFE_CKPT_CONFIG``, or takes the defaults.
        resume: ``"auto"``: ``fit`` without a ``ckpt_path`` continues from the newest valid checkpoint in ``dirpath``, verified
            and agreed by all ranks, or starts afresh when there never was one; a Trainer that has trained goes on as it is.
            Where a second ``fit`` was killed the second one continues. Needs an explicit ``dirpath``. Of several callbacks in a
            Trainer all that say so must name one directory.
        async_save: ``False``: ``fit`` goes on only when the checkpoint is committed.
        export_to: a directory that gets the module's weights, whole and in Hugging Face's layout, when ``fit`` has ended; not
            after a signal. See ``Checkpointer.export``.
        export_max_shard_size: bytes, or text such as ``"5GB"``.
        hooks: called with what happens; see ``safe_ckpt.events``. With ``ddp_spawn`` they must be picklable.
        every: ``"auto"``: save when ``Checkpointer.due`` would say so, at the end of an optimizer's step, and not by
            ``every_n_train_steps``, ``train_time_interval`` or ``every_n_epochs``.

    Raises:
        ConfigError: ``resume="auto"`` without ``dirpath`` or with ``save_weights_only``; a remote ``dirpath``; a setting that
            has no meaning here: a ``Retention``, ``on_busy``, ``max_in_flight``. One of the environment: when ``fit`` begins.

    Example:
        ```python
        callback = SafeCheckpointCallback("runs/lightning", save_last=True, every_n_train_steps=2, resume="auto")
        trainer = Trainer(max_steps=4, callbacks=[callback], **quiet)
        trainer.fit(module, resumable(DataLoader(dataset, batch_size=8, shuffle=True)))
        print(sorted(name for name in os.listdir("runs/lightning") if name.endswith(".ckpt")))
        ```

        ```text
        ['epoch=0-step=4.ckpt', 'last.ckpt']
        ```
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        config: CheckpointConfig | None = None,
        resume: Literal["auto"] | None = None,
        async_save: bool = True,
        export_to: str | Path | None = None,
        export_max_shard_size: int | str = "5GB",
        hooks: Sequence[Hook] = (),
        every: Literal["auto"] | None = None,
    ) -> None:
        if every is not None:
            if every != "auto" or every_n_train_steps or every_n_epochs or train_time_interval is not None:
                others = "every_n_train_steps, every_n_epochs or train_time_interval"
                message = f'is "auto" or None, and not given together with {others}'
                raise ConfigError(key="every", message=message)
            every_n_train_steps = _NEVER
        hugging_face.parse_size(export_max_shard_size, "export_max_shard_size")
        given = settings_of(config)
        self._given = dirpath, given
        self.config = given or install.settings_of_this_process()
        if dirpath is not None and is_url(dirpath, "dirpath"):
            dirpath, self.config = spooled(str(dirpath), self.config, key="dirpath")
        install.check_arguments(dirpath, given or CheckpointConfig(), resume, save_weights_only=save_weights_only)
        self.every = every
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            monitor=monitor,
            verbose=verbose,
            save_last=save_last,
            save_top_k=save_top_k,
            save_on_exception=save_on_exception,
            save_weights_only=save_weights_only,
            mode=mode,
            auto_insert_metric_name=auto_insert_metric_name,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            every_n_epochs=every_n_epochs,
            save_on_train_epoch_end=save_on_train_epoch_end,
            enable_version_counter=enable_version_counter,
        )
        self.resume = resume
        self.async_save = async_save
        self.export_to = export_to
        self.export_max_shard_size = export_max_shard_size
        self.hooks = tuple(hooks)
        self._forget_live()

    # ------------------------------------------------------------------ identity

    def _generate_state_key(self, **kwargs: Any) -> str:
        if self.every is not None:
            kwargs["every_n_train_steps"] = _NEVER  # also while a save is due
        return f"ModelCheckpoint{kwargs!r}"  # its own key: runs move between the two in both directions

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _LIVE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_live()

    def _forget_live(self) -> None:
        self._saver: TrainerSaver | None = None
        self._pending: PendingActions | None = None
        self._saved_state: SavedCallbackState | None = None
        self._at_once = self._knows_saved = False
        self._due_saved: list[Any] = []
        self._counts = Counts()
        self._pace: Pace | None = None
        self._paced_step = -1

    # ------------------------------------------------------------------ the life of a stage

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Install the I/O, take the directory, and arrange the resume."""
        fitting = str(getattr(stage, "value", stage)) == "fit" and not trainer.fast_dev_run
        if fitting:
            self.config = install.settings_of_all(self, *self._given)
        with warnings.catch_warnings():
            if self.resume == "auto" or self._holds_only_ours(trainer):
                warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
            super().setup(trainer, pl_module, stage)
        refuse_url(self.dirpath or ".", "dirpath")
        self._forget_live()
        if not fitting:
            install.install_for_loading(trainer)
            return
        saver = self._open(trainer)
        saver.stopper = self
        if self.resume == "auto":
            resuming.arrange(trainer, saver, self._directory, self.FILE_EXTENSION)

    def _open(self, trainer: Any) -> TrainerSaver:
        self._saver = install.install(trainer, self.config, self.hooks, self._directory, self.FILE_EXTENSION)
        return self._saver

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take this rank's part of the checkpoint."""
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        if self._saver is not None and self._saver.continuation is None and not self._saver.searching:
            size = self._saver.engine.coordinator.size
            self._saver.continuation = loop_state.prepare(checkpoint, self._saver.engine.rank, size)
            if self._saver.continuation is not None:
                loop_state.let_next_epoch_begin(trainer.fit_loop, self._saver.undo)

    def state_dict(self) -> dict[str, Any]:
        """As ModelCheckpoint's, what was saved last, and whether a save waits for the metric of a validation still to come."""
        waits = {_WAITS: True} if getattr(self, _WAITS, False) else {}
        return {**super().state_dict(), _SAVED: self._due_saved or self._last_saved(), **waits}

    def _last_saved(self) -> list[Any]:
        return [getattr(self, name) for name in _OF_SAVED]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the attributes, without the paths of files that are gone."""
        super().load_state_dict(state_dict)
        setattr(self, _WAITS, state_dict.get(_WAITS, False))
        if self._saver is None:
            return
        *_, path = saved = state_dict.get(_SAVED, (0, ""))
        existing = self._saver.exists([*known_paths(self), *filter(None, [path])])
        reconcile(self, existing)
        self._knows_saved = _SAVED in state_dict
        if path in existing and state_dict["dirpath"] == self.dirpath:
            for name, value in zip(_OF_SAVED, saved, strict=True):
                setattr(self, name, value)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Continue where the checkpoint was taken, and forget files that are gone."""
        super().on_train_start(trainer, pl_module)
        if self._saver is None:
            return
        self._saver.begin_training()
        if not self._knows_saved and str(self._came_from) in known_paths(self):
            # Of an earlier version. This step is on disk already: Lightning would save it again.
            self._last_global_step_saved, self._last_checkpoint_saved = trainer.global_step, str(self._came_from)
        due, self._saver.continuation = self._saver.continuation, None
        dataloader.say_what_is_inexact(trainer, self, resumed_within=due is not None and due.mid_epoch)
        if due is not None:
            loop_state.continue_from(trainer, due, self._saver.undo)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Save if it is time to, after the module's own hook: Lightning calls it next, and not again after a resume."""
        self._counts.batches += 1

        def save_after(on_batch_end: Callable[[], None]) -> None:
            on_batch_end()
            self._save_at_batch(trainer, pl_module, *args, **kwargs)

        if self._saver is not None and self._saver.module_acts_at_batch_ends:
            self._saver.undo.once(trainer._logger_connector, "on_batch_end", save_after)
        else:
            self._save_at_batch(trainer, pl_module, *args, **kwargs)

    def _save_at_batch(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        if self._saver is not None:
            self._saver.tracking.report(committed_only=True)  # does not wait
        # Such a module swaps in other weights during the save: the copy must be taken then.
        swaps = not pl_module.automatic_optimization and hasattr(pl_module, "saved_models")
        due = self._is_due(trainer)
        with self._deciding(at_once=swaps), Patch(self, {"_every_n_train_steps": 1} if due else {}):
            super().on_train_batch_end(trainer, pl_module, *args, **kwargs)
        if self._saver is not None and self._saver.stopper is self and self._saver.engine.stop_requested():
            self._stop(trainer)

    def _is_due(self, trainer: Any) -> bool:
        """With ``every="auto"``: whether a save is due, once for each step of the optimizers."""
        if self.every is None or self._saver is None or trainer.global_step == self._paced_step:
            return False
        if self._pace is None:
            self._pace = pace_of(self._saver.engine, self._directory)
        self._paced_step = trainer.global_step
        return self._pace.due()

    def _stop(self, trainer: Any) -> None:
        """After a signal: save, wait until it is committed, and end ``fit``, at the same batch on every rank."""
        saver = self._saver
        if saver is None or saver.stopping:
            return
        saver.land()
        directory = saver.auto_directory or self._directory
        path = directory / f"{signals.STOPPED_NAME}{self.FILE_EXTENSION}"
        due = not saver.has_whole(directory, trainer.global_step)
        if saver.agree_on_requeue() and saver.auto_directory is None:
            path, due = signals.requeue_save_path(trainer), True  # the one file that the requeued job will look for
        if due:
            saver.save_pending(
                PendingActions(saves=[str(path)]), self, SavedCallbackState.of(self), weights_only=False, wait=False
            )
        saver.stopping = True
        saver.wait()
        signals.end_fit(trainer, saver.undo)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Requeue the job if that is due: everything is committed and no directory is held, so SLURM may end it now."""
        super().teardown(trainer, pl_module, stage)
        saver = self._saver
        if saver is not None and saver.stopper is self and saver.requeue_due:
            saver.requeue_due = False
            signals.requeue(trainer)

    def _should_skip_saving_checkpoint(self, trainer: Any) -> bool:
        stopping = self._saver is not None and self._saver.stopping
        return stopping or bool(super()._should_skip_saving_checkpoint(trainer))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save if it is time to."""
        if self._saver is not None:
            self._saver.noted.told = True  # callbacks that save come last
        with self._deciding():
            super().on_train_epoch_end(trainer, pl_module)
        loop_state.let_schedulers_step(trainer)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """After a signal, on one process: save at once. A validation may outlast the grace, and a resume makes it anew."""
        super().on_validation_batch_end(trainer, pl_module, *args, **kwargs)
        saver = self._saver  # several processes ask at their training steps, of which all have as many
        watches = (
            saver is not None and saver.stopper is self and trainer.world_size == 1 and not trainer.sanity_checking
        )
        if saver is not None and watches and saver.engine.stop_requested():
            self._stop(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Save if it is time to."""
        with self._deciding():
            super().on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save ``last`` if that is still due, then wait: what ``fit`` leaves behind is committed, or it raises."""
        if self._saver is None or not self._saver.stopping:
            with self._deciding():
                super().on_train_end(trainer, pl_module)
        if self._saver is not None:
            self._saver.wait()
            if self._saver.stopping:
                return
            self._counts.warn_without_save(self, trainer)
            if self.export_to is not None:
                self._saver.export(pl_module, Path(self.export_to), self.export_max_shard_size)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save if asked to, then finish what is in flight. Nothing here masks the exception."""
        saver, name = self._saver, type(exception).__name__
        if saver is None:
            return
        try:
            if self._should_save_on_exception(trainer) and saver.all_ranks_met_an_exception(self._directory):
                if saver.closed:  # the exception came after the teardown; another teardown ends this saver
                    saver, before = self._open(trainer), saver
                    saver.follow(before)
                with self._deciding():
                    self._due_saved = self._last_saved()  # what is due at this step the resumed run saves
                    super().on_exception(trainer, pl_module, exception)
            saver.land_on_exception()
        except Exception:  # the user's exception must not be masked
            logger.exception("%s was raised, and no checkpoint could be saved at it", name)

    # ------------------------------------------------------------------ decisions become pending actions

    @contextlib.contextmanager
    def _deciding(self, *, at_once: bool = False) -> Iterator[None]:
        """Within this block ModelCheckpoint's saves, links and removals are collected. At its end they become one save."""
        if self._saver is None or self._pending is not None:
            yield
            return
        self._pending, self._saved_state, self._at_once = PendingActions(), None, at_once
        try:
            yield
            self._flush()
        except BaseException:
            saved = cast("SavedCallbackState | None", self._saved_state)  # ``_begin`` sets it, within the block
            if saved is not None:
                saved.restore(self)
            raise
        finally:
            self._pending, self._saved_state = None, None

    def _flush(self) -> None:
        pending, saved_state = self._pending, self._saved_state
        if not pending or self._saver is None:
            return
        self._pending, self._saved_state = PendingActions(), None
        self._counts.saves += len(pending.saves)
        self._saver.save_pending(
            pending, self, saved_state, weights_only=self.save_weights_only, wait=not self.async_save
        )

    def _begin(self) -> None:
        """Before a hook changes attributes: learn the outcome of the last save, then copy the attributes."""
        if self._saver is not None and self._saved_state is None:
            self._saver.wait()
            self._saved_state = SavedCallbackState.of(self)

    def _monitor_candidates(self, trainer: Any) -> dict[str, Any]:
        # Without sync_dist a metric differs between ranks, and so would names and scores: rank 0's value is used.
        candidates: dict[str, Any] = super()._monitor_candidates(trainer)
        if trainer.world_size == 1:
            return candidates
        device = trainer.strategy.root_device
        shared = trainer.strategy.broadcast({name: value.cpu() for name, value in candidates.items()})
        return {name: value.to(device) for name, value in shared.items()}

    def _save_topk_checkpoint(self, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
        self._begin()
        super()._save_topk_checkpoint(trainer, monitor_candidates)

    def _save_last_checkpoint(self, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
        self._begin()
        super()._save_last_checkpoint(trainer, monitor_candidates)

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        if self._pending is None or self._saver is None:
            super()._save_checkpoint(trainer, filepath)
            return
        self._begin()
        # A subclass of this, or of the Trainer, may use the file right after the save.
        own = type(self)._save_checkpoint is not SafeCheckpointCallback._save_checkpoint
        at_once = self._at_once or (not self.async_save and (own or install.overrides_saving(trainer)))
        # Before the save, which has them. If it fails, they are taken back.
        self._last_global_step_saved, self._last_checkpoint_saved = trainer.global_step, filepath

        def take(path: str) -> None:
            if self._pending is not None:
                self._pending.saves.append(path)
            if at_once:
                self._flush()

        # Through the Trainer, whose subclass may do something of its own there.
        with self._saver.collecting(take, weights_only=self.save_weights_only):
            trainer.save_checkpoint(filepath, self.save_weights_only)

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        # One with bad numbers is loaded only by its name.
        return {path for path in super()._find_last_checkpoints(trainer) if not is_marked(Path(path))}

    def _link_checkpoint(self, trainer: Any, filepath: str, linkpath: str) -> None:  # type: ignore[override]
        if self._pending is None:
            super()._link_checkpoint(trainer, filepath, linkpath)
        elif os.path.abspath(filepath) != os.path.abspath(linkpath):
            self._pending.links[linkpath] = os.path.relpath(filepath, os.path.dirname(linkpath))

    def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
        if self._pending is None:
            super()._remove_checkpoint(trainer, filepath)
        else:
            self._pending.removals.append(filepath)

    def _should_remove_checkpoint(self, trainer: Any, previous: str, current: str) -> bool:
        # Lightning never deletes the file that the user resumed from. One that resume="auto" chose is deleted like any other.
        if self._came_from is not None and os.path.abspath(previous) == str(self._came_from):
            return previous != current and self._directory in Path(previous).absolute().parents
        return bool(super()._should_remove_checkpoint(trainer, previous, current))

    def file_exists(self, filepath: Any, trainer: Any) -> bool:
        """Whether the name is taken, by a file or by what this hook is about to save."""
        if self._pending is not None and os.fspath(filepath) in self._pending.names:
            return True
        return bool(super().file_exists(filepath, trainer))

    # ------------------------------------------------------------------ outcomes

    def wait(self, *, mirrored: bool = False) -> None:
        """Wait until what this Trainer has saved is committed: ``best_model_path`` and the rest name files that are there.

        Every rank calls this, on the thread that trains; outside of ``fit`` there is nothing to wait for.

        Args:
            mirrored: wait, too, until each save or a newer one has its copy in the mirror: for ``lengthy_s`` at most.

        Raises:
            ConfigError: there is no mirror.
            MirrorBehindError: the copies did not come; the same on every rank.
            SafeCheckpointError: a save failed, the same on every rank.
        """
        if self._saver is not None:
            self._saver.wait(mirrored=mirrored)

    @property
    def _came_from(self) -> Path | None:
        return self._saver.resumed_from if self._saver is not None else None

    @property
    def _directory(self) -> Path:
        return Path(os.path.abspath(os.fspath(self.dirpath or ".")))

    def _holds_only_ours(self, trainer: Any) -> bool:
        if self.dirpath is None:
            return False
        saver = getattr(trainer.strategy.checkpoint_io, "saver", None)
        held = saver is not None and saver.holds(self._directory)
        return held or (self._directory.is_dir() and os.listdir(self._directory) == [HIDDEN])
