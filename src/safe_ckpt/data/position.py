"""The place of training in the data, as a value: small, the same on all ranks, plain data."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from safe_ckpt.core.state import rng
from safe_ckpt.errors import RestoreError

logger = logging.getLogger(__name__)

VERSION = 2
RNG = "rng"
_KEY = "loader"


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place within an epoch, or between two.

    Attributes:
        epoch: how many epochs were begun before this one.
        begun: whether this one was begun.
        batches: how many batches of it this rank has been given.
        first_batch: how many of these came before the last resume.
        first_sample: how many indices those had, of all ranks together if they share one order.
        each: how many indices a batch has, likewise; 0 where only batches count.
        most: how many indices there are, likewise; None where that is not known.
        seed: what the sampler drew at its start; None where it draws none.
        sampler_epoch: what ``set_epoch`` was given; None where the sampler has none.
        generators: as they were at its start, those that the order depends on, by name, encoded.
        now: the user's own generators, as they are now, by name, encoded.
        warm: whether workers were running already when it was begun, or are now, between two epochs.
        stay: whether workers stay for the next epoch.
        num_workers: how many there are.
        rank: whose workers these are.
        base_seed: from which torch derived the seeds of the workers that run; None without workers.
        turn: which worker makes the next batch of an iterable data set.
        workers: what each of them was at after its last batch that was given, by number: see ``safe_ckpt.data.workers``.
        undo: of the last few batches: how many had been given then, which worker made it, what that was at before, and what
            the generators of this process were before, where it makes the batches.
        again: how many batches are to be made before anything else, with the generators of this process at ``before``.
        before: what they were before each of those was made first; nothing where making the one before it changed nothing.
        facts: what the order depends on besides.
    """

    epoch: int = 0
    begun: bool = False
    batches: int = 0
    first_batch: int = 0
    first_sample: int = 0
    each: int = 0
    most: int | None = None
    seed: int | None = None
    sampler_epoch: int | None = None
    generators: Mapping[str, str] = field(default_factory=dict)
    now: Mapping[str, str] = field(default_factory=dict)
    warm: bool = False
    stay: bool = False
    num_workers: int = 0
    rank: int | None = None
    base_seed: int | None = None
    turn: int = 0
    workers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    undo: Sequence[tuple[int, str, Mapping[str, Any] | None, Mapping[str, Any] | None]] = ()
    again: int = 0
    before: Sequence[Mapping[str, Any]] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """The number of indices that were used up, of all ranks together if they share one order."""
        given = self.first_sample + (self.batches - self.first_batch) * self.each
        return given if self.most is None else min(given, self.most)

    def without(self, unseen: int) -> Position:
        """The place before the last ``unseen`` batches, which are as many as ``undo`` has at most. As plain data."""
        if not self.begun:
            return self
        batches, turn = max(0, self.batches - unseen), self.turn
        workers, drawn = dict(self.workers), list[Mapping[str, Any]]()
        for given, worker, state, before in reversed(self.undo):
            if given <= batches:
                break
            workers.pop(worker, None) if state is None else workers.update({worker: plain_state(state)})
            turn = int(worker)
            if before is not None:
                drawn.insert(0, before)
        place = dataclasses.replace(self, batches=batches, turn=turn, workers=workers, undo=())
        if not drawn:
            return place
        # {} where a snapshot is the one before it.
        changes = [{} if n and one == drawn[n - 1] else rng.snapshot_to_text(one) for n, one in enumerate(drawn)]
        return dataclasses.replace(place, again=len(drawn), before=changes)

    def at_end(self) -> Position:
        """The place after the last batch of this epoch. Workers that stay go on drawing where they are."""
        place = Position(epoch=self.epoch + self.begun, now=self.now, facts=self.facts)
        if not self.stay:
            return place
        drawn = {worker: {RNG: state[RNG]} for worker, state in self.workers.items() if RNG in state}
        theirs = {"num_workers": self.num_workers, "rank": self.rank, "base_seed": self.base_seed, "workers": drawn}
        return dataclasses.replace(place, warm=True, stay=True, **theirs)  # type: ignore[arg-type]

    def for_workers(self, count: int, rank: int, what: str) -> Position:
        """This place without what only other workers could go on with. Says so if they drew random numbers.

        Args:
            count: how many workers there are now.
            rank: whose they are.
            what: the loader, for messages.
        """
        if (self.num_workers, self.rank) in ((count, rank), (0, None)):
            return self
        if self.workers:
            logger.warning(
                "%s: %d workers of rank %s drew random numbers before the save, and these are %d of rank %d: what they draw "
                "differs from an uninterrupted run. Save PerRank(loader), and resume with as many workers",
                *(what, self.num_workers, self.rank, count, rank),
            )
        return dataclasses.replace(self, base_seed=None, workers={}, undo=())

    def to_json(self) -> dict[str, Any]:
        """Return plain data, without the fields that say nothing."""
        plain = Position()
        facts = {name: value for name, value in vars(self).items() if value != getattr(plain, name)}
        return {"version": VERSION, **facts}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Position:
        """Build from what ``to_json`` returned.

        Raises:
            RestoreError: it is not the position of a loader, or of a newer version.
        """
        facts = dict(data)
        version = facts.pop("version", None)
        if facts.pop("token", None) is not None:
            logger.warning(
                "the place was saved with worker_seeding='per_sample', which there is no more: the order of the data goes on, "
                "and what is drawn for its samples is another"
            )
        if isinstance(facts.get("before"), Mapping):  # as earlier versions saved it: before the first of them
            facts["before"] = [facts["before"]]
        known = {one.name for one in dataclasses.fields(cls)}
        if version != VERSION or not facts.keys() <= known:
            raise RestoreError(key=_KEY, message=f"is not a position that this version knows (version {version!r})")
        return cls(**facts)

    def refuse_other(self, facts: Mapping[str, Any], what: str) -> None:
        """Raise ``RestoreError`` where the order was another one, so that this is no place in it.

        Args:
            facts: what the order depends on now.
            what: the loader, for messages.
        """
        if not self.begun:
            return  # it is at the beginning of an order, whatever that is
        for name in (*self.facts, *facts):
            then, now = self.facts.get(name), facts.get(name)
            if now == then or (name == "samples" and name not in self.facts):  # earlier versions did not note it
                continue
            message = f"its place was saved with {name} {then!r}, and now it is {now!r}: it cannot be found again"
            if name in ("samples", "indices"):  # such as of a data set that has grown
                message += (
                    ". Go on from a save behind the loop of an epoch, or resume without the loader: leave its name out of "
                    "the state, and the epoch begins anew"
                )
            if name == "rank" and then is not None and now is not None:
                message = (
                    f"each rank has an order of its own, and this is the place of rank {then}: save PerRank(loader), and "
                    "resume with as many ranks"
                )
            raise RestoreError(key=what, message=message)


def plain_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of a worker as plain data."""
    return {**state, RNG: rng.snapshot_to_text(state[RNG])} if RNG in state else state
