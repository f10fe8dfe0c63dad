"""The saver that all callbacks of one Trainer share: the engine, the directories that it holds, the saves in flight."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safe_ckpt.adapters import CheckpointInfo, OnCommit, OpenSave, Patch, Planned
from safe_ckpt.adapters.extras import Destination, Exporter, Facts, Link, SaveRequest, delete_listed
from safe_ckpt.adapters.planning import go_on, note_models
from safe_ckpt.adapters.spool import refuse_url
from safe_ckpt.adapters.strategy import Sharded
from safe_ckpt.config import CheckpointConfig
from safe_ckpt.errors import RendezvousTimeout, SafeCheckpointError, SaveError
from safe_ckpt.events import Hook
from safe_ckpt.lightning import contents, signals, strategies
from safe_ckpt.lightning import resume as resuming
from safe_ckpt.lightning.beside import averages
from safe_ckpt.lightning.callback_state import PendingActions, SavedCallbackState, report_commit
from safe_ckpt.lightning.checkpoint_io import SafeCheckpointIO
from safe_ckpt.lightning.directories import FileSaver
from safe_ckpt.lightning.loop_state import Continuation, NotedStates

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class TrainerSaver(FileSaver):
    """One per Trainer and ``fit``; made by the first callback that sets up, ended by the strategy's teardown.

    Args:
        trainer: the Trainer.
        config: settings; equal for all callbacks of one Trainer.
        io: the I/O that was installed.

    Attributes:
        trainer: as given.
        io: as given.
        noted: what the generators were where a resume has to go on.
        swapped: how averaged weights that stand in the module are taken back.
        sharded: plans states of which every rank has a part.
        undo: what ``fit`` changed in the Trainer, until it ends.
        auto_directory: the directory of a callback with ``resume="auto"``.
        resumed_from: the checkpoint that it chose there.
        training: whether the training loop has begun: before that there is nothing to continue.
        searching: whether a finder of learning rates or batch sizes restores what it changed.
        stopping: whether a signal ended the run: a later checkpoint would be resumed from instead of ``stopped.ckpt``.
        stopper: the callback that asks for signals: the last one, after all others have saved.
        continuation: what remains to be done before a resumed loop continues.
        goes_on: whether an earlier ``fit`` has resumed a checkpoint that this one has saved, and had nothing to do with it.
        reads_freely: whether a resume runs what a pickle names: Lightning's before 2.6, or when ``fit`` was told to.
        requeue_due: whether SLURM requeues the job after ``fit``.
    """

    def __init__(self, trainer: Any, config: CheckpointConfig, io: SafeCheckpointIO) -> None:
        super().__init__(config, self._loggers)
        self._hooks: list[Hook] = []
        self.trainer = trainer
        self.io = io
        self.auto_directory: Path | None = None
        self.resumed_from: Path | None = None
        self.training = False
        self.searching = False
        self.stopping = False
        self.stopper: object | None = None
        self.requeue_due = False
        self._warned = False
        self.continuation: Continuation | None = None
        self.goes_on = False
        self.noted = NotedStates()
        self.reads_freely = "weights_only" not in inspect.signature(trainer.fit).parameters
        self.swapped: list[Callable[[Any], None]] = []
        self._requeue_wished = threading.Event()
        self._alone: SafeCheckpointError | None = None
        self.undo = Patch()
        self._last_whole: OpenSave | None = None
        self.sharded = Sharded(self.engine)
        self._collector: tuple[Callable[[str], None], bool] | None = None
        self._busy = False
        self._out_by: float | None = None

    def _loggers(self) -> list[tuple[str, Callable[..., Any]]]:
        # log_metrics is looked up in the call, where an error is caught.
        return [
            (type(one).__name__, lambda v, step, one=one: one.log_metrics(v, step=step)) for one in self.trainer.loggers
        ]

    def add_hooks(self, hooks: Iterable[Hook]) -> None:
        """Add hooks for events; a hook that several callbacks have is called once."""
        for hook in hooks:
            if not any(hook is known for known in self._hooks):
                self._hooks.append(hook)
                self.engine.emit.add(hook)

    def take(self, hooks: Iterable[Hook], directory: Path, suffix: str) -> None:
        """Take one more callback: its hooks, and its directory with the ``suffix`` of what is in it.

        Raises:
            DirectoryError: it cannot be used.
        """
        self.add_hooks(hooks)
        self.hold(directory, suffix)

    def give_up(self) -> None:
        """Close what was made before an error; nothing here raises."""
        try:
            self.undo.give_back()
        finally:
            self.close(quiet=True)

    def holds(self, directory: Path) -> bool:
        """Whether this directory is taken already."""
        return directory in self.homes and not self.closed

    def land_on_exception(self) -> None:
        """As ``land``, but all waits after an exception together take ``shutdown_s`` at most.

        Raises:
            RendezvousTimeout: it takes longer.
        """
        self.land(self._left_s())

    def save_pending(
        self,
        pending: PendingActions,
        owner: object | None,
        state: SavedCallbackState | None,
        *,
        weights_only: bool | None,
        wait: bool,
    ) -> OpenSave:
        """Save the Trainer's state under the names in ``pending``. Every rank calls this.

        Raises:
            SafeCheckpointError: it could not be started, or with ``wait`` it failed.
        """
        self.wait()
        try:
            with self._within("save_checkpoint"), averages.in_their_places(self.swapped, self.trainer.lightning_module):
                request = self._request(pending, weights_only=weights_only, overlap=self.training and not wait)
                handle = self.engine.save(request)
        except BaseException:
            if owner is not None and state is not None:
                state.restore(owner)
            raise

        def at_end(info: CheckpointInfo | None) -> None:
            if owner is not None and info is not None and not info.marked:
                report_commit(owner, self.trainer, info)
            elif owner is not None and state is not None:
                state.restore(owner)

        self.tracking.follow(handle, at_end=at_end)
        if pending.saves and not weights_only:
            self._last_whole = handle
        if wait:
            self.wait()
        return handle

    def save_now(self, path: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        """Stands in for ``Trainer.save_checkpoint``: returns when the file is durable, or raises on every rank.

        A callback's own saves are collected, and saved at the end of its hook: see ``collecting``.
        """
        if storage_options is not None:
            raise TypeError("storage_options are not supported: safe_ckpt writes to local and mounted file systems")
        refuse_url(path, "save_checkpoint: filepath")
        target = Path(os.path.abspath(path))
        if self._busy or signals.in_signal_handler():
            self._save_alone(target, weights_only)
        elif self._collector is not None and bool(weights_only) == self._collector[1]:
            self._collector[0](os.fspath(path))
        elif self.closed and strategies.form_of(self.trainer.strategy) is not None:
            self._save_with_another(target, weights_only)
        elif self.closed:
            contents.save_after_fit(self, target, weights_only=weights_only)
        else:
            if self._interrupted and not self.all_ranks_met_an_exception(path):
                return
            self._warn_of_module()
            pending = PendingActions(saves=[str(target)])
            handle = self.save_pending(pending, None, None, weights_only=weights_only, wait=True)
            handle.result()  # also with on_failure="warn": the caller must know that there is no file

    @property
    def module_acts_at_batch_ends(self) -> bool:
        """Whether the module has an ``on_train_batch_end`` of its own. Lightning calls it after those of the callbacks."""
        own = getattr(self.trainer.lightning_module.on_train_batch_end, "__qualname__", "")
        return own != "ModelHooks.on_train_batch_end"

    def _warn_of_module(self) -> None:
        hook = self.trainer.lightning_module._current_fx_name
        if (
            hook == "on_train_batch_end"
            and self.module_acts_at_batch_ends
            and not self._warned
            and self.engine.rank == 0
        ):
            self._warned = True
            logger.warning(
                "trainer.save_checkpoint within on_train_batch_end: what the module's own on_train_batch_end is still to do "
                "for this batch is not in the checkpoint, nor done after a resume from it. Have SafeCheckpointCallback save"
            )

    @contextlib.contextmanager
    def collecting(self, take: Callable[[str], None], *, weights_only: bool) -> Iterator[None]:
        """Within this block ``Trainer.save_checkpoint`` gives its path to ``take`` and saves nothing."""
        self._collector = (take, weights_only)
        try:
            yield
        finally:
            self._collector = None

    def export(self, module: torch.nn.Module, directory: Path, max_shard_size: int | str) -> None:
        """Write the module's weights alone and wait until they are durable. Every rank calls this.

        Raises:
            SafeCheckpointError: it failed, with the same error on every rank.
        """
        exporter = Exporter(self.engine, self.names)
        with self._within():
            exporter.export(module, directory, format="safetensors", max_shard_size=max_shard_size, dtype=None).result()

    def has_whole(self, directory: Path, step: int) -> bool:
        """Whether the last checkpoint of a whole state is committed in ``directory`` and is of this step."""
        info = self._last_whole.outcome if self._last_whole is not None else None
        return info is not None and info.step == step and info.path.parent == directory

    def _save_alone(self, path: Path, weights_only: bool | None) -> None:
        """From a signal handler: this rank may be in the middle of an agreement, or the others in a collective.

        So rank 0 writes its own state at once, in this process, and no rank waits for another. The file lacks the generators
        and loaders of the other ranks: a resume from it in mid-epoch is not exact.
        """
        if strategies.form_of(self.trainer.strategy) is not None:
            cause = "a signal handler cannot wait for the other ranks, and each has only a part: save at the next step"
            raise SaveError(name=path.name, cause=cause, rank=self.engine.rank, phase="signal handler")
        with self.io.saving_to(None), averages.in_their_places(self.swapped, self.trainer.lightning_module):
            checkpoint = self.trainer._checkpoint_connector.dump_checkpoint(weights_only)
            self.trainer.strategy.save_checkpoint(checkpoint, str(path))

    def _save_with_another(self, path: Path, weights_only: bool | None) -> None:
        """After ``fit``, with a strategy with which every rank writes: use another engine."""
        again = TrainerSaver(self.trainer, self.config, self.io)
        again.add_hooks(self._hooks)
        try:
            again.home(path.parent).held.start_after(self.next_sequence(path) - 1)
            again.save_pending(
                PendingActions(saves=[str(path)]), None, None, weights_only=weights_only, wait=True
            ).result()
        finally:
            again.close(quiet=True)

    @contextlib.contextmanager
    def _within(self, call: str = "") -> Iterator[None]:
        """All agreements within are one call, and a signal handler that saves must not start another one."""
        self._busy = True
        try:
            with self.engine.together(call):
                yield
        finally:
            self._busy = False

    def exists(self, paths: Sequence[str]) -> list[str]:
        """Which of ``paths`` exist, as rank 0 sees it. Every rank calls this."""
        with self._within():
            existing: list[str] = self.engine.agree(
                "look", must_match={"paths": list(paths)}, decide=lambda _: list(filter(os.path.exists, paths))
            )
        return existing

    def resume_from(self, directory: Path, suffix: str, rival: Path | None) -> Path | None:
        """The newest valid checkpoint in a held directory, verified on all ranks; None on a fresh run.

        Args:
            directory: the directory.
            suffix: of its files.
            rival: a file that Lightning would resume from; taken when it is the newer one.
        """
        home = self.homes[directory]
        if rival is None:
            self.resumed_from = resuming.choose(self, home, suffix)
        else:
            self.resumed_from = resuming.choose_beside(self, home, suffix, rival)
        self.io.trusted = self.resumed_from
        return self.resumed_from or rival

    def trusts(self, path: Path) -> bool:
        """Whether all ranks together have verified this one a moment ago. Once."""
        trusted, self.io.trusted = self.io.trusted, None
        return trusted == path

    def end(self) -> None:
        """Finish what is in flight and close the engine. After an exception nothing here raises, to not mask it."""
        if self.closed:
            return
        interrupted = self._interrupted
        try:
            if interrupted:
                with contextlib.suppress(RendezvousTimeout):  # closing says so, and gives up on what is left
                    self.land_on_exception()
            else:
                self.land()
        finally:
            try:
                self.undo.give_back()
            finally:  # the directory is free again, whatever an object of somebody else's raises
                self.close(quiet=interrupted, within_s=self._left_s() if interrupted else None)

    @property
    def _interrupted(self) -> bool:
        return str(getattr(self.trainer.state.status, "value", "")) == "interrupted"

    def _left_s(self) -> float:
        self._out_by = self._out_by or time.monotonic() + self.config.timeouts.shutdown_s
        return max(0.0, self._out_by - time.monotonic())

    def begin_training(self) -> None:
        """The loops are about to run, and Lightning's own signal handlers are in place. Every rank calls this."""
        if not self.training:
            self.training = True
            self.noted.watch(self.trainer, self.undo)
            self.swapped = averages.watch(self.trainer, self.undo)
            if self.resumed_from is None and self.trainer.ckpt_path:
                path = Path(os.path.abspath(self.trainer.ckpt_path))
                self.engine.extensions.ask("a resume", lambda one: one.named(path))
            go_on(self.engine, lambda: [self.trainer.lightning_module])
            self.prepare([self.trainer.lightning_module, *self.trainer.optimizers])
            asked = self._requeue_wished.set
            self.engine.watch_signals(functools.partial(signals.without_lightnings, at_requeue_signal=asked))

    def all_ranks_met_an_exception(self, wanted: Any) -> bool:
        """Whether all ranks save ``wanted`` at an exception; known within ``peer_stall_s``. Each rank that does calls this.

        A rank alone must not wait in a collective for ranks that continue to train. An error would mask the exception.
        """
        if self._alone is None:  # who did not come will not come any more
            try:
                signals.meet_at_exception(None if self.closed else self.engine, self.config)
            except SafeCheckpointError as error:
                self._alone = error
        if self._alone is not None:
            logger.warning("%s: not saved at an exception, for not all ranks met one: %s", wanted, self._alone)
        return self._alone is None

    def come_after(self, before: TrainerSaver) -> None:
        """Serve the ``fit`` after that of a saver that has ended."""
        self.noted.fit = before.noted.fit + 1
        unused = before.continuation if before.resumed_from is not None else None
        self.goes_on = unused is not None and unused.fit >= self.noted.fit

    def follow(self, before: TrainerSaver) -> None:
        """Continue for the ``fit`` of a saver that has ended."""
        self.training = before.training
        self.noted, self.swapped = before.noted, before.swapped

    def agree_on_requeue(self) -> bool:
        """Whether the signal that ended the run was the one at which Lightning requeues the job. Every rank calls this."""
        with self._within():
            self.requeue_due = self.engine.agree(
                "requeue", local=self._requeue_wished.is_set, decide=lambda answers: any(answers.values())
            )
        return self.requeue_due

    def _request(self, pending: PendingActions, *, weights_only: bool | None, overlap: bool) -> SaveRequest:
        primary = Path(os.path.abspath((pending.saves or [*pending.links, *pending.removals])[0]))
        home = self.of(primary)
        planned = Planned()
        note_models(self.engine, lambda: [self.trainer.lightning_module])
        if pending.saves:
            fitting = self.training and str(getattr(self.trainer.state.fn, "value", "")) == "fit"
            planned = contents.planned(self, primary, weights_only=weights_only, whole=fitting and not weights_only)
        links = [Link(path=Path(os.path.abspath(path))) for path in pending.saves[1:]]
        links += [Link(path=Path(os.path.abspath(path)), target=target) for path, target in pending.links.items()]
        to_delete = [Path(os.path.abspath(path)) for path in pending.to_delete]
        notes = resuming.notes(home, links=links, to_delete=to_delete, weights_only=bool(weights_only))
        form = strategies.form_of(self.trainer.strategy)
        is_directory = form is not None and form.sharded and bool(pending.saves)
        return SaveRequest(
            destination=Destination(home=home, path=primary, kind="directory" if is_directory else "file"),
            payload=planned.payload(
                overlap=contents.overlap_plan(self.trainer, self.config.snapshot) if planned.files and overlap else None
            ),
            facts=Facts(
                step=int(self.trainer.global_step),
                metrics=contents.numbers(self.trainer),
                notes={**planned.notes, **notes},
                unexamined=contents.UNEXAMINED,
            ),
            must_match={"names": ", ".join([*pending.saves, *pending.links])},
            on_commit=OnCommit(links=links, retention=delete_listed(to_delete) if to_delete else None),
        )
