"""The position in the data: the state with which a stateful loader continues in mid-epoch, bit for bit.

Accelerate saves one count for all ranks: how many batches a ``StatefulDataLoader`` has given. The next batches also depend on
the random generators at two moments: when the epoch began, and when Accelerate fetched the batch that it always has ahead. A
new iterator draws from the generators as well, after Accelerate has restored them. So every rank saves its own state, the
states of the generators at those two moments, and the number of the epoch. A loader that is continued begins with the first
states and fetches its first batch with the second. Then the generators get the states that they had at the save.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderStateMixin, SkipBatchSampler
from accelerate.state import PartialState

from safe_ckpt.accelerate import contents
from safe_ckpt.accelerate.epochs import Epochs, Watch, seed, seed_as
from safe_ckpt.accelerate.loops import Loop, is_within
from safe_ckpt.adapters import Engine, Patch
from safe_ckpt.adapters.data_position import DataPosition
from safe_ckpt.adapters.extras import get_rng_state, set_rng_state
from safe_ckpt.adapters.patch import replace_for_good
from safe_ckpt.data.loader import Resumable, Skip, made_of
from safe_ckpt.data.order import is_map, is_placed, is_warm, name_of
from safe_ckpt.errors import RestoreError

logger = logging.getLogger(__name__)
_living: weakref.WeakSet[Loaders] = weakref.WeakSet()

_FINISHED = "_iterator_finished"
KEY = "safe_ckpt_loaders"
"""In each rank's ``random_states_<rank>.pkl``; stock Accelerate ignores it."""


class Loaders:
    """The stateful loaders of one Accelerator, watched from ``prepare`` on."""

    def __init__(self) -> None:
        self._watched: dict[int, Placed | _Watched] = {}
        self._epochs: dict[int, Epochs] = {}  # of those that know no place
        self._said = False
        self._late: list[dict[str, Any] | None] = []  # of loaders that were not prepared yet
        _living.add(self)
        replace_for_good(DataLoaderStateMixin, "begin", _announced)

    def watch(self, loader: Any, given: Any = None) -> None:
        """From now on record the state with which ``loader`` can be continued.

        Args:
            loader: a prepared one.
            given: what the user gave to have it prepared. Then a state that was loaded before is used now.

        Raises:
            RestoreError: a place within an epoch was loaded for it, and it cannot go there.
        """
        stateful = getattr(loader, "use_stateful_dataloader", False)
        if isinstance(given, Resumable) and not stateful:
            count(loader, type(given).skip)
        inner = getattr(loader, "base_dataloader", None)
        if self._of(loader) is None and (stateful or isinstance(inner, ForAccelerate)):
            placed = isinstance(inner, ForAccelerate)
            self._watched[id(inner)] = Placed(loader, self._watched) if placed else _Watched.on(loader)
        elif inner is not None and id(inner) not in {**self._watched, **self._epochs}:
            self._epochs[id(inner)] = Epochs.on(loader)
        if given is not None and self._late:
            self._go_to(loader, self._late.pop(0) or {})

    def is_at(self, loader: Any, batches: int, engine: Engine) -> bool:
        """Whether the next loop over ``loader`` begins behind so many batches of its epoch anyway.

        If it begins elsewhere, it is made to begin the epoch, so that leaving out batches leaves out those.

        Args:
            loader: a prepared one.
            batches: as training counts them.
            engine: where the processes meet; each of them calls this.
        """
        placed = self._of(loader)
        if placed is None:
            return False
        pending = agreed(placed, loader, batches, engine)
        if placed.over is not None and batches == 0:  # of the next epoch
            placed.begin_anew()
            return True
        if pending is not None and pending != batches:
            logger.warning(
                "skip_first_batches(%d), and the checkpoint was saved behind batch %d of the epoch: the script's number "
                "counts, and random numbers that the data set draws are other ones",
                batches,
                pending,
            )
            placed.begin_anew()
        return (pending or 0) == batches

    def states(self, loaders: Sequence[Any]) -> list[dict[str, Any] | None]:
        """Return what to save, loader by loader. Call this before a stateful one's own ``state_dict``."""
        watched = [self._of(loader) for loader in loaders]
        blind = [
            f"loader {number} of those that were prepared, a {_told(loader)},"
            for number, (loader, one) in enumerate(zip(loaders, watched, strict=True))
            if one is None and is_within(loader) and not loader.end_of_dataloader
        ]
        if blind and not self._said and PartialState().is_main_process:
            self._said = True
            logger.warning(
                "saving within an epoch, and %s cannot tell where it is: after a resume this epoch begins anew, or, with "
                "skip_first_batches, where the script says. Give accelerator.prepare safe_ckpt.data.resumable(loader) after "
                "register(accelerator), or use DataLoaderConfiguration(use_stateful_dataloader=True)",
                " and ".join(blind),
            )
        known = [one or self._epochs_of(loader) for loader, one in zip(loaders, watched, strict=True)]
        return [one.state() if one is not None else None for one in known]

    def resume(self, loaders: Sequence[Any], states: Sequence[dict[str, Any] | None]) -> None:
        """After Accelerate has restored everything: loaders in mid-epoch continue exactly, the others begin anew."""
        self._late = list(states[len(loaders) :])
        for loader, state in itertools.zip_longest(loaders, states[: len(loaders)]):
            self.watch(loader)
            self._go_to(loader, state or {})

    def refuse_unused(self, loaders: Sequence[Any], states: Sequence[dict[str, Any] | None]) -> None:
        """Refuse, before anything is restored, a place to which no loader can go.

        Raises:
            RestoreError: a loader cannot go to the place within an epoch that the checkpoint has for it.
        """
        for loader, state in zip(loaders, states, strict=False):
            self.watch(loader)
            self._refuse(loader, state or {})

    def _refuse(self, loader: Any, state: Mapping[str, Any]) -> None:
        within = state["position"].get("begun") if "position" in state else state.get("within")
        if self._of(loader) is None and within:
            message = (
                "the checkpoint was saved within an epoch of this loader, which knows no place now. Prepare it as it was then: "
                "resumable(loader) after register(accelerator), or use_stateful_dataloader"
            )
            raise RestoreError(key=_told(loader), message=message)

    def _go_to(self, loader: Any, state: dict[str, Any]) -> None:
        self._refuse(loader, state)
        if (watched := self._of(loader) or self._epochs_of(loader)) is not None:
            watched.resume(state)

    def forget(self) -> None:
        """Leave the loaders as they were."""
        for watched in (*self._watched.values(), *self._epochs.values()):
            watched.forget()
        self._watched.clear()
        self._epochs.clear()

    def begins(self, loop: Any) -> None:
        """A loop over a prepared loader begins, or over one that leaves out batches of it.

        Raises:
            RestoreError: that one goes on at its place by itself.
        """
        self.refuse_beside(loop)
        for one in self._epochs.values():
            if one.base is loop.base_dataloader or _leaves_out_of(loop, one.base):
                one.begins(loop)

    def _of(self, loader: Any) -> Placed | _Watched | None:
        return self._watched.get(id(getattr(loader, "base_dataloader", None)))

    def _epochs_of(self, loader: Any) -> Epochs | None:
        return self._epochs.get(id(getattr(loader, "base_dataloader", None)))

    def refuse_beside(self, loader: Any) -> None:
        """Raise ``RestoreError`` where ``loader`` leaves out batches of one that begins at a place: that is begun, too."""
        inner = loader.base_dataloader
        for one in self._watched.values():
            if one.pending() is not None and one.base is not inner and _leaves_out_of(loader, one.base):
                message = (
                    "the function accelerate.skip_first_batches was called for a loader that goes on at its place by itself: "
                    "the next epoch would lack its first batches. Call accelerator.skip_first_batches(loader, num_batches), "
                    "the method of the Accelerator that is registered"
                )
                raise RestoreError(key=_told(loader), message=message)


def agreed(placed: Placed | _Watched, loader: Any, batches: int, engine: Engine) -> int | None:
    """Return ``placed.pending()``; where batches are dispatched, that of the main process: it alone reads, and has a place."""
    pending = placed.pending()
    if not isinstance(loader, DataLoaderDispatcher):
        return pending
    # Else one process would leave out batches, and the others would wait for it.
    answer: int | None = engine.agree("place", must_match={"num_batches": batches}, decide=lambda _: pending)
    return answer


def _announced(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    def begin(self: Any) -> None:
        for loaders in list(_living):
            loaders.begins(self)
        stock(self)

    return begin


def _leaves_out_of(loader: Any, base: Any) -> bool:
    """Whether ``accelerate.skip_first_batches`` made this prepared loader of the one around ``base``."""
    inner = loader.base_dataloader
    skipping = [one for one in (inner.sampler, inner.batch_sampler) if isinstance(one, SkipBatchSampler)]
    if not skipping:
        return inner.dataset is base.dataset and bool(loader.skip_batches)
    return any(one.batch_sampler in (base.sampler, base.batch_sampler) for one in skipping)


def _told(loader: Any) -> str:
    return f"{type(loader).__name__} over {type(loader.dataset).__name__}"


class _Watched(Watch):
    """The record of a stateful loader."""

    over = None  # a place behind the last batch of an epoch is one between two

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.ahead: Mapping[str, Any] | None = None
        self._begun: Mapping[str, Any] | None = None
        self._pending: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        if self.base.num_workers and self._is_ready():
            # Its workers have asked for their first batches, so the order was drawn before anybody noted the generators.
            self.base.load_state_dict({})

    def state(self) -> dict[str, Any]:
        if self._pending is not None:
            return {**self._pending[0], "place": self.loader.state_dict()}
        if is_within(self.loader) and self._loop.is_left():
            self.loader.end()  # else Accelerate takes it for the one that is trained on; torchdata is told as well
            self.loader.dl_state_dict = {**self.loader.dl_state_dict, _FINISHED: True}
        return {
            "begun": self._begun,
            "ahead": self.ahead,
            "place": self.loader.state_dict(),
            "iteration": getattr(self.loader, "iteration", None),
            "within": is_within(self.loader),
            **seed(self.loader),
            **self._now(),
        }

    def resume(self, state: dict[str, Any]) -> None:
        now, state = contents.random_states(0), {} if "epoch" in state else state  # it knew no place then
        self._was_warm = bool(state.get("warm"))
        if state:
            seed_as(self.loader, state)
            self.base.load_state_dict(state["place"])
        self._pending = None
        position = getattr(self.base, "next_iter_state", None)
        if not isinstance(position, Mapping):
            return
        self._loop, self.loader.dl_state_dict = Loop(left=True), position  # a save may come before the next loop
        over = bool(position.get(_FINISHED))
        if state.get("iteration") is not None:
            self.loader.iteration = state["iteration"] + (over and state["within"])
        if not over and _given(position):
            self._pending = (state, now)
            return
        # A continued iterator without further batches is started twice, and draws twice.
        self.base.next_iter_state = None
        self._set_generator(state.get("generator"))
        if state.get("ready"):
            self.base.state_dict()  # starts the iterator, which was started at the save
            contents.restore_random_states(now)

    def pending(self) -> int | None:
        """How many batches of the epoch were given before the place that is gone to next; None where none is."""
        if self._pending is None:
            return None
        return _given(self.base.next_iter_state) // _ahead(self.loader)

    def begin_anew(self) -> None:
        """Have the next loop begin an epoch, not at the place that was loaded."""
        self._pending = self.base.next_iter_state = None

    def _begin(self) -> Iterator[Any]:
        resumed = self._pending is not None
        batches = self._fetched(*self._begun_iterator())
        self._loop = Loop(batches, resumed=resumed)
        return batches

    def _begun_iterator(self) -> tuple[Iterator[Any], Mapping[str, Any] | None, Mapping[str, Any] | None]:
        """An iterator, and the states of the generators before and after its first fetch; None to leave them."""
        pending, self._pending = self._pending, None
        if pending is None:
            self._begun = self._now()
            with self.drawing_nothing(self._begun["warm"]):
                return self.iterate(), None, None
        state, now = pending
        begun = state.get("begun")
        if begun is None:  # not recorded then, or saved by a stock Accelerator
            return self.iterate(), None, now
        self._begun = begun
        torch.set_rng_state(begun["torch"])
        self._set_generator(begun["generator"])
        with self.drawing_nothing(begun["ready"] or begun.get("warm")):
            iterator: Any = self.iterate()
            skipping = getattr(iterator, "_sampler_iter", None)
            if isinstance(skipping, itertools.islice):
                # Draw the order now: torchdata skips the batches that were given only at the next fetch.
                iterator._sampler_iter = itertools.chain(list(itertools.islice(skipping, 1)), skipping)
            return iterator, state.get("ahead"), now

    def _fetched(
        self, iterator: Iterator[Any], first: Mapping[str, Any] | None, then: Mapping[str, Any] | None
    ) -> Iterator[Any]:
        """The batches; before each is fetched, the state of the generators is noted."""
        while True:
            if first is not None:
                contents.restore_random_states(first)
            self.ahead = contents.random_states(0, devices=False)
            try:
                batch = [next(iterator)]
            except StopIteration:
                return
            finally:
                if then is not None:
                    contents.restore_random_states(then)
            first = then = None
            yield batch.pop()  # bound to no name here: the loop lets go of it

    def _now(self) -> dict[str, Any]:
        generator = self._generator()
        state = generator.get_state() if generator is not None else None
        ready, warm = self._is_ready(), self._was_warm or is_warm(self.base)
        return {"torch": torch.get_rng_state(), "generator": state, "ready": ready, "warm": warm and not ready}

    def _is_ready(self) -> bool:
        """Whether the loader's next iterator exists already: ``state_dict`` of a new loader starts one."""
        return bool(getattr(self.base, "_initial_iter_for_state_dict", False))

    def _set_generator(self, state: torch.Tensor | None) -> None:
        generator = self._generator()
        if generator is not None and state is not None:
            generator.set_state(state)

    def _generator(self) -> torch.Generator | None:
        sampler: Any = getattr(self.loader, "batch_sampler", None)
        while hasattr(sampler, "batch_sampler"):
            sampler = sampler.batch_sampler
        generator = getattr(getattr(sampler, "sampler", sampler), "generator", None)
        return generator if isinstance(generator, torch.Generator) else None


def _given(position: Mapping[str, Any]) -> int:
    """How many batches of the epoch torchdata had given then."""
    if "_num_yielded" in position:
        return int(position["_num_yielded"])
    return int(position["_snapshot"]["_snapshot_step"] + position["_steps_since_snapshot"])  # with workers


class ForAccelerate(Resumable):
    """A loader that ``safe_ckpt.data.resumable`` made, once Accelerate has prepared it.

    Accelerate makes a loader of its own around a new ``DataLoader`` with the data set and a sampler for this rank. That inner
    one is this, and counts. Accelerate takes a batch, or with ``dispatch_batches`` one for each rank, before it gives the last
    one to training: those are given again after a resume. It has no ``state_dict``: Accelerate would ask for it at each batch.
    """

    looks_ahead = 1
    loop = Loop()

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        self.__dict__["loop"] = Loop(batches, resumed=self.pending() is not None)
        return batches

    @property
    def state_dict(self) -> Any:
        """Not there."""
        raise AttributeError("state_dict")


def count(loader: Any, skip: Skip, held: int = 0) -> bool:
    """Have the inner loader of a prepared one count. Returns whether it does.

    Args:
        loader: a prepared one.
        skip: see ``safe_ckpt.data.resumable``.
        held: how many batches training may have been given that are given again: see ``Placed.state``.
    """
    inner = getattr(loader, "base_dataloader", None)
    if inner is None or isinstance(inner, Resumable):
        return isinstance(inner, ForAccelerate)
    skip = skip if is_map(inner) or is_placed(inner) else "read"
    try:
        counted: Any = made_of(inner, skip, ForAccelerate)
    except TypeError as error:
        logger.warning("%s", error)
        return False
    # An exception may come in the middle of the next turn.
    counted.__dict__["looks_ahead"] = (2 + held) * _ahead(loader) - 1
    loader.base_dataloader = counted
    return True


class Placed(DataPosition):
    """The place of one loader whose inner one counts.

    Args:
        loader: a prepared one.
        others: those that are watched.
        between: whether a place behind the last batch of an epoch is one between two epochs. Else it belongs to that epoch, and
            the next loop, which is the rest of that epoch, gives nothing: as with a loader that nobody prepared.

    Attributes:
        loader: as given.
        base: the inner one, which counts.
        over: how many batches the epoch had that is over, until the next loop; None where none is.
    """

    def __init__(
        self, loader: Any, others: Mapping[int, Placed | _Watched] | None = None, *, between: bool = False
    ) -> None:
        self.loader, self._others = loader, {} if others is None else others
        self._between = between
        self.base: Any = loader.base_dataloader
        self.over: int | None = None
        self._patch = Patch()

    def state(self, held: int = 0) -> dict[str, Any]:
        """See ``DataPosition``.

        Args:
            held: how many of the last batches training was given and has not used; they are given again after a resume.
        """
        here = self.base.pending() is None
        left, iteration, over = here and self.base.loop.is_left(), self.loader.iteration, self.over
        if left:
            self.loader.end()  # else Accelerate takes it for the one that is trained on
        within, last = here and is_within(self.loader), bool(getattr(self.loader, "end_of_dataloader", False))
        if over is not None:
            place = self.base.position()
        elif within and last and not self._between:
            over, place = self._steps(), self.base.position(self._taken())
        else:
            unseen = self._taken() + (held - last) * _ahead(self.loader) if (within or held) and held >= last else 0
            place = self.base.left() if left else self.base.position(unseen)
            # The number of the epoch increases only when the loop is left, and the resume begins the next one.
            iteration += (within and last) - (last and held > 0)
        told = {} if over is None else {"over": over}
        return {"position": place.to_json(), "iteration": iteration, **told, **seed(self.loader)}

    def resume(self, state: dict[str, Any]) -> None:
        """Go to a place that ``state`` told; nowhere where nothing was saved.

        Raises:
            RestoreError: another kind of loader was saved.
        """
        if not state:
            return
        if "epoch" in state:  # it knew no place then, and begins an epoch
            seed_as(self.loader, state)
            self.loader.iteration = state["epoch"]
            return
        if "position" not in state:
            message = "the checkpoint has the place of a loader of another kind: prepare it as it was prepared then"
            raise RestoreError(key=name_of(self.base), message=message)
        seed_as(self.loader, state)
        self.base.load_state_dict(state["position"])
        self.base.__dict__["loop"] = Loop(left=True)
        self.loader.iteration, self.over = state["iteration"], state.get("over")
        self._patch.give_back(self.loader, "begin")  # of a place that was loaded before
        if self.over is not None:
            self._patch.once(self.loader, "begin", functools.partial(self._leave_out, state["iteration"]))

    def pending(self) -> int | None:
        """How many batches of the epoch were given before the place that is gone to next; None where none is."""
        place = self.base.pending()
        return place.batches // _ahead(self.loader) if self.over is None and place is not None else self.over

    def begin_anew(self) -> None:
        """Have the next loop begin at the beginning: of the next epoch where this one is over."""
        if self.over is not None:
            self.loader.iteration, self.over = self.loader.iteration + 1, None
            self._patch.give_back(self.loader, "begin")
        self.base.begin_anew()

    def forget(self) -> None:
        """It counts on: that takes nothing away."""

    def _leave_out(self, saved_iteration: int, begin: Callable[[], None]) -> None:
        """At the start of the loop over the rest of an epoch that is over: its last batch is taken again, and not given."""
        loader, skipped, self.over = self.loader, self.loader.skip_batches, None
        # zip asks the others for nothing where the first one is at its end: this loop is beside the next epoch of that one.
        beside = any(isinstance(one, Placed) and one.base.loop.is_new() for one in self._others.values())
        if beside or loader.iteration != saved_iteration:  # set_epoch was called: the loop is over another epoch
            self.base.begin_anew()
            begin()
            return
        drawn = get_rng_state()
        begin()
        logger.warning(
            "the checkpoint was saved behind the last batch of epoch %d, so this loop gives no batch. If your loop begins with "
            "the next epoch, call accelerator.skip_first_batches(loader, 0), or loader.set_epoch",
            loader.iteration,
        )

        def end(stock: Callable[[], None]) -> None:
            loader.skip_batches = skipped
            stock()
            set_rng_state(drawn)  # what was drawn to find the end was drawn before the save

        loader.skip_batches = skipped + 1
        self._patch.once(loader, "end", end)

    def _steps(self) -> int:
        """How many steps the epoch had that is over. Where batches are dispatched, only the main process reads them."""
        end = self.base.ended()
        try:
            return len(self.loader)
        except TypeError:
            return -(-end.batches // _ahead(self.loader)) if end is not None else 0

    def _taken(self) -> int:
        """How many batches were taken that training was not given; behind the last one, how many the last turn took."""
        ahead, end = _ahead(self.loader), self.base.ended()
        if end is None:  # an exception may have come between the batches of one turn
            return ahead + int(self.base.position().batches) % ahead
        rest = int(end.batches) % ahead  # the last turn may not have one for each rank; with drop_last it was none
        return rest + ahead if not rest or bool(self.loader._drop_last) else rest


def _ahead(loader: Any) -> int:
    if isinstance(loader, DataLoaderDispatcher) and not loader.split_batches:
        return int(loader.state.num_processes)
    return 1
