"""Continuing bit for bit: what Lightning's own checkpoint leaves out, gathered from all ranks and put back.

The generators of every rank, and the states of its stateful loaders, stand in the checkpoint under one key that stock Lightning
ignores. On a resume they are put back where the save was taken: after ``on_train_start``, before anything else of the loop.

``max_steps``, ``should_stop``, a Timer and EarlyStopping can end ``fit`` in the middle of an epoch. Lightning counts that epoch
as processed, as it does one that ended, and runs the hooks at the end of an epoch. What tells the two apart is
``batch_progress.is_last_batch``: whether the data, or ``limit_train_batches``, had nothing more to give after that batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safe_ckpt.adapters import Patch, pickles
from safe_ckpt.adapters.extras import get_rng_state
from safe_ckpt.adapters.planning import versions_of_buffers
from safe_ckpt.lightning import dataloader, results
from safe_ckpt.lightning.beside import epoch_start

logger = logging.getLogger(__name__)
_STEPS_OF_A_BATCH = ("started", "processed", "completed")
KEY = "safe_ckpt"


def capture(trainer: Any, noted: NotedStates) -> dict[str, Any]:
    """Return this rank's part of a save.

    Args:
        trainer: in ``fit``.
        noted: what the generators were where it is to go on, if that is not here.
    """
    loop = trainer.fit_loop
    ended = at_end(loop)
    broken_off = None if ended else noted.broken_off
    place = broken_off or noted.validation or _place(trainer)
    batches = loop.epoch_loop.batch_progress.current
    if noted.batch is not None and noted.trained == batches.processed:
        place |= noted.batch  # that batch is trained again
        if noted.versions != versions_of_buffers(trainer.lightning_module):
            logger.warning(
                "saved within a batch, which a resume trains again: its forward pass has changed buffers of the model (those "
                "of BatchNorm, for one), and will change them twice"
            )
    rng, states, own = place["rng"], [], []
    if loop._combined_loader is not None:
        own = dataloader.generators_at_start(loop._combined_loader) if ended else []
        # The fetcher has taken batches that it has not handed on: one, of loaders that have no length. It drops that one where
        # the next one cannot be fetched.
        fetcher = loop._data_fetcher
        dropped = fetcher.fetched - batches.ready if fetcher is not None else 0
        ahead = max(len(getattr(fetcher, "batches", ())), dropped)
        unseen, trained = unprocessed(vars(batches)) + ahead, batches.processed
        states = dataloader.states(loop._combined_loader, ended=ended, unseen=unseen, trained=trained, now=rng)
    again = broken_off is None and noted.validation is not None
    count = trainer.accumulate_grad_batches
    if loop.epoch_progress.current.processed > loop.epoch_progress.current.completed and ended and not noted.told:
        place["results"]["metrics"] = {}  # a hook is still to reset them, and is not called after a resume from here
    return {
        **place,
        "loaders": states,
        "generators": own,
        "mid_epoch": not ended,
        "validate_again": again,
        "accumulates": None if count == noted.accumulates else count,
        "following": noted.following,
        "fit": noted.fit,
    }


def _place(trainer: Any) -> dict[str, Any]:
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    return {
        "rng": get_rng_state(),
        "results": results.gather(trainer),
        "validated": dict(val_loop._seen_batches_per_dataloader),
        "validated_since": val_loop._last_val_dl_reload_epoch,
    }


def assemble_notes(texts: Mapping[int, str]) -> dict[str, Any]:
    """On rank 0: what goes into the checkpoint. A rank that has failed sends no text: then there are no ``ranks``.

    Raises:
        TamperedError: a text does not come from ``pickles.to_text``.
    """
    ranks = sorted(texts) if all(texts.values()) else ()
    return {"version": 1, "ranks": [pickles.from_text(texts[rank], f"the state of rank {rank}") for rank in ranks]}


@dataclass
class Continuation:
    """Work that is left before the loop goes on.

    Attributes:
        mine: what this rank contributed at the save; None for a checkpoint of stock Lightning, or of fewer ranks.
        mid_epoch: whether the epoch of the checkpoint had not ended.
        behind: whether the loop goes on behind a batch, with what follows that: validation, then schedulers.
        validated: whether the validation there is over.
        accumulates: how many batches made a step, if something had changed that.
        epoch_due: whether it was saved after an epoch, before the schedulers that follow a metric.
        fit: in which ``fit`` of its Trainer it was saved, counted from 1.
    """

    mine: dict[str, Any] | None
    mid_epoch: bool
    behind: bool
    validated: bool
    accumulates: int | None
    epoch_due: bool
    fit: int


def prepare(checkpoint: dict[str, Any], rank: int, size: int) -> Continuation | None:
    """At ``on_load_checkpoint``: give this rank its own loaders' states, and have the loops know where they were.

    Args:
        checkpoint: what was loaded; changed in place.
        rank: this process's.
        size: the number of ranks.

    Returns:
        What is left to be done; None where there is no state of the loops.
    """
    fit_loop: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {})
    if "epoch_loop.batch_progress" not in fit_loop:
        return None
    saved: Sequence[dict[str, Any]] = checkpoint.get(KEY, {}).get("ranks", [])
    if saved and len(saved) != size:
        saved = [{**one, "results": None} for one in saved]  # of all ranks or of none
        if rank == 0:
            message = (
                "the checkpoint was saved by %d ranks and is resumed by %d: the order of the data and the random numbers are "
                "not those of an uninterrupted run"
            )
            logger.warning(message, len(saved), size)
    state, batch = fit_loop.get("state_dict", {}), fit_loop["epoch_loop.batch_progress"]
    epochs = fit_loop["epoch_progress"]["total"]
    # ``on_train_batch_start`` may end an epoch: Lightning neither starts nor completes that batch in the total, for good. Nor
    # does it start one that is None. It would then take the last batch before a save for one that was not finished.
    total, current = batch["total"], batch["current"]
    current["started"] = max(current["started"], current["processed"])
    total.update({name: total["ready"] - current["ready"] + current[name] for name in _STEPS_OF_A_BATCH})
    if rank == 0 and any(map(_has_stopped, checkpoint.get("callbacks", {}).values())):
        logger.warning(
            "EarlyStopping ended the run that saved this: training goes on until its next look ends it again"
        )
    # Of the first rank: all ranks do the same, also those that were not there.
    first = saved[0] if saved else _as_stock_tells(fit_loop)
    mid_epoch, again, following = (bool(first.get(name)) for name in ("mid_epoch", "validate_again", "following"))
    if saved:
        mine = saved[rank] if rank < len(saved) else None
    else:
        unseen = unprocessed(batch["current"])
        mine = dataloader.of_stock(state.get("combined_loader", []), unseen=unseen) if size == 1 else None
    if mine is not None and "state_dict" in fit_loop:
        state["combined_loader"] = mine["loaders"]
    if not mid_epoch and "combined_loader" in state:
        state["combined_loader"] = [dataloader.state_at_end(one) for one in state["combined_loader"]]
    behind = _go_on_within_epoch(fit_loop) if mid_epoch else _let_epoch_end(fit_loop)
    return Continuation(
        mine=mine,
        mid_epoch=mid_epoch,
        behind=behind or again or following,
        validated=following and not again,
        accumulates=first.get("accumulates"),
        epoch_due=not mid_epoch and epochs["completed"] < epochs["processed"],
        fit=first.get("fit", 1),
    )


def _has_stopped(state: Any) -> bool:
    """Whether it is the state of an EarlyStopping that has ended its run. Its epoch is 0 for none, and for the first."""
    if not isinstance(state, dict) or not {"wait_count", "patience", "stopped_epoch"} <= state.keys():
        return False
    return bool(state["stopped_epoch"]) or state["wait_count"] >= state["patience"]


def _as_stock_tells(fit_loop: Mapping[str, Any]) -> dict[str, Any]:
    """Tell if stock Lightning saved it within an epoch, and, such as at an exception, within a step of a validation."""
    batch, validation = fit_loop["epoch_loop.batch_progress"], fit_loop.get("epoch_loop.val_loop.batch_progress")
    over = bool(batch["is_last_batch"]) and not unprocessed(batch["current"])
    again = validation is not None and validation["current"]["ready"] > validation["current"]["completed"]
    return {"mid_epoch": not over, "validate_again": again}


def let_next_epoch_begin(fit_loop: Any, undo: Patch) -> None:
    """At ``on_load_checkpoint``: after a save at the end of an epoch the loop begins the next one.

    With ``max_steps`` Lightning takes such a run for one that was interrupted within the epoch, trains one batch too many and
    ends the epoch a second time. With ``max_epochs`` it does what is arranged here.
    """
    reset, setup_data, val_loop = fit_loop.reset, fit_loop.setup_data, fit_loop.epoch_loop.val_loop
    setup_validation, counts = val_loop.setup_data, fit_loop.epoch_progress.current

    def begin_next() -> None:
        # An epoch that was broken off is not counted as processed any more: ``_go_on_within_epoch``.
        if fit_loop.restarting and counts.ready == counts.started == counts.processed:
            fit_loop._restarting = False
            fit_loop.epoch_loop.restarting = False
        reset()

    def set_up() -> None:
        _ask_as_of(fit_loop, range(counts.ready), setup_data)
        # It asks next whether there is anything to do. At ``max_steps`` nothing is left to train on: the last epoch counts, as
        # it does in the run that ended there.
        if 0 <= fit_loop.max_steps <= fit_loop.epoch_loop.global_step:
            for count in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
                count.processed = count.completed = count.ready

    def set_up_validation() -> None:
        every = fit_loop.trainer.check_val_every_n_epoch or 1
        _ask_as_of(fit_loop, range(every - 1, max(counts.ready, counts.completed + 1), every), setup_validation)

    # Until training begins: a finder of learning rates runs this loop before.
    undo.put_methods(fit_loop, {"reset": begin_next, "setup_data": set_up})
    undo.put_methods(val_loop, {"setup_data": set_up_validation})


def _go_on_within_epoch(fit_loop: dict[str, Any]) -> bool:
    """Count as in an epoch that goes on. Returns whether what follows its last batch is still to come.

    An exception came while a batch was trained on: it is to be done again, so that it does not count, as none does. Lightning
    leaves it in the total, which tells when a validation is due with ``check_val_every_n_epoch=None``.

    After an epoch was broken off, stock Lightning would train the rest of it under the number of the next one, so that a
    DistributedSampler shuffles anew, or with ``max_epochs`` leave the rest out.
    """
    epoch, batch = fit_loop["epoch_progress"], fit_loop["epoch_loop.batch_progress"]
    batch["is_last_batch"] = False
    for count in (batch["total"], batch["current"]):
        count["ready"] = count["started"] = count["processed"]
    if 0 < epoch["current"]["processed"] == epoch["current"]["ready"]:
        for count in (epoch["total"], epoch["current"]):
            count["processed"] -= 1
            count["completed"] = count["processed"]
        return False
    return bool(batch["total"]["completed"] == batch["total"]["processed"] - 1)


def _let_epoch_end(fit_loop: dict[str, Any]) -> bool:
    """Change the progress of a save after the last batch of an epoch so that the end of that epoch is not left out.

    Lightning would go straight to the next epoch, without validation and without the hooks at the end of one epoch and the
    start of the next. Counting that batch as completed, which is what happens next in a run that goes on, brings them back.
    """
    epoch, batch = fit_loop["epoch_progress"]["current"], fit_loop["epoch_loop.batch_progress"]
    last = batch["is_last_batch"] and epoch["processed"] < epoch["ready"]
    due = last and batch["total"]["completed"] == batch["total"]["processed"] - 1
    for count in (batch["total"], batch["current"]) if due else ():
        count["completed"] = count["processed"]
    return bool(due)


def continue_from(trainer: Any, continuation: Continuation, undo: Patch) -> None:
    """At ``on_train_start``: arrange that the loop goes on as it would have gone on; ``undo`` takes that back."""
    fit_loop, epoch_loop, mine = trainer.fit_loop, trainer.fit_loop.epoch_loop, continuation.mine
    undo.give_back(fit_loop, "reset", "setup_data")
    dataloader.refuse_unused(fit_loop)
    within = continuation.mid_epoch or continuation.behind
    rng = mine["rng"] if mine is not None else None
    epoch_start.set_at_epoch_start(trainer, rng, continuation.accumulates, undo, within=within)
    # Its loaders do not know where they were. Lightning would begin them anew and end the validation after the number of
    # batches that is left of it, which is one where it was over: a metric of those is none. It is done whole, or not at all.
    epoch_loop.val_loop.restarting = False
    epoch_loop.val_loop._has_run = False  # a finder of learning rates has validated, too
    if mine is not None and mine.get("results") is not None:
        results.put_logged_back(trainer, mine["results"], undo, over=not within)
        if continuation.epoch_due:
            _let_schedulers_catch_up(trainer)
    elif within:
        results.do_without(trainer, undo)
    if mine is not None:
        _count_on(epoch_loop.val_loop, mine, undo)
    if mine is not None and not continuation.mid_epoch:
        dataloader.put_own_back(fit_loop._combined_loader, mine.get("generators", []))
        dataloader.load_again(fit_loop, mine["loaders"])
    _begin_with(epoch_loop, continuation, undo)


def _count_on(val_loop: Any, mine: Mapping[str, Any], undo: Patch) -> None:
    """Log a validation's steps at the number of batches that all validations have had.

    All since its loaders were loaded: where an uninterrupted run loads them again by now, it counts from 0.
    """

    def count() -> None:
        since = val_loop._last_val_dl_reload_epoch
        if not val_loop.trainer.reload_dataloaders_every_n_epochs or mine.get("validated_since", since) == since:
            val_loop._seen_batches_per_dataloader.update(mine.get("validated", {}))

    def set_up(original: Callable[[], None]) -> None:
        original()
        count()

    if val_loop._combined_loader is not None:
        count()
    else:  # the set-up counts from 0
        undo.once(val_loop, "setup_data", set_up)


def _ask_as_of(fit_loop: Any, epochs: Iterable[int], setup_data: Callable[[], None]) -> None:
    """With ``reload_dataloaders_every_n_epochs`` ask for loaders, if it is time to, as an uninterrupted run did the last time.

    Args:
        fit_loop: has all counts.
        epochs: those that were begun, as far as these loaders were looked at in them.
        setup_data: what asks for them. Lightning would ask as of now, and count on from here.
    """
    found, every = float("-inf"), fit_loop.trainer.reload_dataloaders_every_n_epochs
    for epoch in epochs if every else ():
        found = epoch if epoch - found >= every else found
    with Patch(fit_loop.epoch_progress.current, {"completed": found} if found >= 0 else {}):  # trainer.current_epoch
        setup_data()


def let_schedulers_step(trainer: Any) -> None:
    """At ``on_train_epoch_end``: also in the epoch that was resumed, schedulers that follow a metric step, if it is known.

    Lightning leaves them out there, because its checkpoint has no metrics: the learning rate would be another one from then on.
    """
    if trainer.fit_loop.restarting and _metrics_are_known(trainer):
        trainer.fit_loop._restarting = False


def _let_schedulers_catch_up(trainer: Any) -> None:
    """Step the schedulers that follow a metric: at the end of an epoch they step after the save."""
    counts = trainer.fit_loop.epoch_progress.current
    if _metrics_are_known(trainer):
        with Patch(counts, {"completed": counts.completed - 1}):  # the number of that epoch
            trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)


def _metrics_are_known(trainer: Any) -> bool:
    """Whether there are schedulers that follow a metric, and all of theirs were logged."""
    known = trainer.callback_metrics
    follow = [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    return bool(follow) and all(name in known for name in follow)


def _begin_with(epoch_loop: Any, continuation: Continuation, undo: Patch) -> None:
    """Do what follows the last batch, as far as it was not done before the save: validation, then schedulers.

    Lightning would leave out a validation that was not over. Where it was over, Lightning would draw from the generators again.
    """

    def leave_out_the_batch(_: Callable[[Any], None], __: Any) -> None:
        if not epoch_loop.restarted_on_last and not epoch_loop._should_accumulate():
            epoch_loop._batches_that_stepped -= 1  # counted once already, for the restart

    def begin(on_run_start: Callable[[Any], None], data_fetcher: Any) -> None:
        validation_due = epoch_loop.restarting and epoch_loop._should_check_val_fx(data_fetcher)
        if continuation.behind:
            epoch_loop._skip_next_val = continuation.validated
            undo.once(epoch_loop, "advance", leave_out_the_batch)
        elif not continuation.mid_epoch and not validation_due and not epoch_loop.done:
            # Lightning made this epoch's iterator before the generators were put back, and makes no other on a restart.
            iter(data_fetcher)
        on_run_start(data_fetcher)
        if continuation.mid_epoch and not continuation.behind:
            epoch_loop.restarting = False

    undo.once(epoch_loop, "on_run_start", begin)


def at_end(fit_loop: Any) -> bool:
    """Whether the loop has trained on the last batch of an epoch, and has not begun the next one."""
    # A loader that gives fewer batches than its length says ends an epoch without a last batch.
    fetcher, batches = fit_loop._data_fetcher, fit_loop.epoch_loop.batch_progress
    last = batches.is_last_batch or (fetcher is not None and fetcher.done)
    return bool(last) and not unprocessed(vars(batches.current))


def unprocessed(batches: Mapping[str, int]) -> int:
    """How many batches were fetched and not trained on: one where an exception came in between."""
    return max(0, batches["ready"] - batches["processed"])


class NotedStates:
    """Notes what the random generators are where a resume may have to go on, if a save comes later than that.

    What follows when an epoch is broken off is not part of a run that goes on: the hooks at the end of an epoch, and the
    validation that Lightning adds when it was told to stop. A validation that an exception breaks off is done again. All of
    them may be random, and a validation loader is.

    What was logged is noted with them: the end of a broken epoch resets it.

    Attributes:
        broken_off: what they were when this epoch was broken off; None while it goes on.
        validation: what they were before the validation that is under way; None where there is none, or it is over.
        batch: what is logged before the batch that is trained on, where an exception is to be saved at, and what the
            generators were once that batch was made, or before it is: a resume makes it again with what it drew then.
        trained: how many batches of the epoch were trained on before that one.
        versions: of the module's buffers there, as torch counts their changes.
        accumulates: how many batches made a step when ``fit`` began; what differs from that was set by something.
        following: whether what follows a batch is under way.
        told: whether the module's hook at the end of this epoch was called.
        fit: which one of its Trainer this is, counted from 1.
    """

    def __init__(self) -> None:
        self.broken_off: dict[str, Any] | None = None
        self.validation: dict[str, Any] | None = None
        self.batch: dict[str, Any] | None = None
        self.trained = 0
        self.versions: list[int] = []
        self.accumulates: int | None = None
        self.following = self.told = False
        self.fit = 1

    def watch(self, trainer: Any, undo: Patch) -> None:
        """Note them from now on, until ``undo`` takes that back."""
        epoch_loop = trainer.fit_loop.epoch_loop
        val_loop = epoch_loop.val_loop
        self.accumulates = trainer.accumulate_grad_batches
        advanced, run, ended = epoch_loop.on_advance_end, val_loop.run, val_loop._on_evaluation_end

        def on_advance_end(data_fetcher: Any) -> None:
            self.following, self.told = True, False
            self.broken_off = _place(trainer) if _adds_a_validation(trainer, data_fetcher) else None
            advanced(data_fetcher)
            self.following = False
            if not epoch_loop.done:
                self.broken_off = None  # a hook of that validation may have it go on after all
            elif self.broken_off is None and not at_end(trainer.fit_loop):
                self.broken_off = _place(trainer)

        def validate() -> Any:
            self.validation = _place(trainer)
            found = run()  # after an exception it is not over
            self.validation = None  # where there is nothing to validate on, it has no end of which a hook would tell
            return found

        def on_evaluation_end(*args: Any, **kwargs: Any) -> None:
            self.validation = None  # from here on its result is used
            ended(*args, **kwargs)

        if any(getattr(one, "save_on_exception", False) for one in trainer.checkpoint_callbacks):
            self._watch_batches(trainer, undo)
        undo.put_methods(epoch_loop, {"on_advance_end": on_advance_end})
        undo.put_methods(val_loop, {"run": validate, "_on_evaluation_end": on_evaluation_end})

    def _watch_batches(self, trainer: Any, undo: Patch) -> None:
        epoch_loop, precision = trainer.fit_loop.epoch_loop, trainer.precision_plugin
        train, convert = epoch_loop.advance, precision.convert_input

        def advance(data_fetcher: Any) -> None:
            # On the device: to look at it here would have each batch wait.
            self.batch = {"rng": get_rng_state(), "results": results.gather(trainer, device=None)}
            self.trained = epoch_loop.batch_progress.current.processed
            self.versions = versions_of_buffers(trainer.lightning_module)
            try:
                train(data_fetcher)
            except StopIteration:  # the epoch is over
                self.batch = None
                raise
            self.batch = None

        def convert_input(batch: Any) -> Any:
            if self.batch is not None:
                self.batch["rng"] = get_rng_state()  # the batch is there, and nothing was done with it
            return convert(batch)

        undo.put_methods(epoch_loop, {"advance": advance})
        undo.put_methods(precision, {"convert_input": convert_input})


def _adds_a_validation(trainer: Any, data_fetcher: Any) -> bool:
    """Whether Lightning validates at this batch only because it was told to stop."""
    loop = trainer.fit_loop
    if not trainer.should_stop or not loop._can_stop_early or at_end(loop):
        return False
    with Patch(trainer, {"should_stop": False}):
        return not loop.epoch_loop._should_check_val_fx(data_fetcher)
