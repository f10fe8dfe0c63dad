"""Histories of one loader, all in this process, beside torch's own loader that is not stopped.

The loop stops at any moment and goes on from a place that was saved then or before, with a new loader or the same one, again
and again, also within one epoch. Every batch, what was drawn for it, what training draws, and the generators behind each epoch
are those of the loader that goes through.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import pickle
import random
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils import data as torch_data

from programs_of.draw import Draw
from programs_of.loops import OwnBatches, OwnSampler, PlacedStream, Rows, Stream
from programs_of.runner import Verdict
from safe_ckpt.data import resumable
from safe_ckpt.errors import RestoreError

_WITH_WORKERS = 12
"""One in so many: they take most of the time."""
_BAD = 5


class Bad(Rows):
    """One row cannot be made."""

    def __getitem__(self, number: Any) -> torch.Tensor:
        if number == _BAD:
            raise OSError("a bad row")
        return super().__getitem__(number)


class Shuffles(torch_data.Sampler[int]):
    """Draws from Python's generator when the first index is asked for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.count))
        random.shuffle(order)
        yield from order


class Permutes(torch_data.RandomSampler):
    """Of a class of torch's, and draws from numpy's."""

    def __iter__(self) -> Iterator[int]:
        return iter(numpy.random.permutation(len(self)).tolist())


class Counts(torch_data.Sampler[int]):
    """Counts its epochs itself."""

    epoch = 0

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class SomeBatches(torch_data.BatchSampler):
    """What it does is not known from its type."""


def _orders(rows: Any, own: torch.Generator | None, batch: int) -> Mapping[str, Any]:
    """Name -> arguments of a DataLoader."""
    count = len(rows)
    randomly, weights = torch_data.RandomSampler, [1.0 + n % 3 for n in range(count)]
    return {
        "in order": lambda: {"batch_size": batch},
        "shuffle": lambda: {"batch_size": batch, "shuffle": True},
        "random": lambda: {"batch_size": batch, "sampler": randomly(rows, generator=own)},
        "replacement": lambda: {
            "batch_size": batch,
            "sampler": randomly(rows, replacement=True, num_samples=40, generator=own),
        },
        "more than there are": lambda: {
            "batch_size": batch,
            "sampler": randomly(rows, num_samples=count + 5, generator=own),
        },
        "twice as many": lambda: {"batch_size": batch, "sampler": randomly(rows, num_samples=2 * count, generator=own)},
        "weighted": lambda: {
            "batch_size": batch,
            "sampler": torch_data.WeightedRandomSampler(weights, count + 2, generator=own),
        },
        "subset": lambda: {
            "batch_size": batch,
            "sampler": torch_data.SubsetRandomSampler(range(1, count), generator=own),
        },
        "distributed": lambda: {
            "batch_size": batch,
            "sampler": torch_data.DistributedSampler(rows, num_replicas=2, rank=1, seed=3),
        },
        "own": lambda: {"batch_size": batch, "sampler": OwnSampler(count, False)},
        "told of epochs": lambda: {"batch_size": batch, "sampler": OwnSampler(count, True)},
        "counts epochs": lambda: {"batch_size": batch, "sampler": Counts(count)},
        "python's": lambda: {"batch_size": batch, "sampler": Shuffles(count)},
        "numpy's": lambda: {"batch_size": batch, "sampler": Permutes(rows)},
        "a list": lambda: {"batch_size": batch, "sampler": list(range(count))[::-1]},
        "own batches": lambda: {"batch_sampler": OwnBatches(count)},
        "torch's batches": lambda: {
            "batch_sampler": torch_data.BatchSampler(randomly(rows, generator=own), batch, False)
        },
        "some batches": lambda: {"batch_sampler": SomeBatches(randomly(rows, generator=own), batch, False)},
        "no batches": lambda: {"batch_size": None, "shuffle": True},
        "batches of indices": lambda: {
            "batch_size": None,
            "sampler": torch_data.BatchSampler(randomly(rows, generator=own), batch, False),
        },
        "stream": lambda: {"batch_size": batch},
        "stream read again": lambda: {"batch_size": batch},
    }


ORDERS = tuple(_orders(range(1), None, 1))
_WHOLE_BATCHES = ("own batches", "torch's batches", "some batches", "no batches", "batches of indices")
_NO_OWN_NUMBERS = ("no batches", "batches of indices", *ORDERS[-2:])


def choose(draw: Draw) -> dict[str, Any]:
    """The choices of both sides."""
    found: dict[str, Any] = {
        "order": draw.among("order", *ORDERS),
        "generator": draw.among("generator", "", "of the sampler", "of the loader"),
        "rows": draw.among("rows", 11, 16, 7),
        "batch": draw.among("batch", 2, 3, 1),
        "drop last": draw.flag("drop last", of=3),
        "workers": 2 * draw.flag("workers", of=_WITH_WORKERS),
        "persistent": draw.flag("persistent"),
        "draws": draw.among("draws", "", "torch", "all", "the collation"),
        "bad": draw.flag("bad row", of=5),
        "ahead": draw.among("ahead", 0, 0, 1, 2),
        "breaks": draw.among("breaks behind", 0, 0, 0, 3),
        "looks": draw.flag("looks at a batch first", of=4),
        "epochs": draw.number("epochs", 2, 4),
    }
    streams = found["order"].startswith("stream")
    if streams or found["order"] in _WHOLE_BATCHES:
        found["drop last"] = False
    if found["draws"] == "the collation" and found["order"] in _NO_OWN_NUMBERS:
        found["draws"] = "torch"
    if found["workers"]:
        found["epochs"] = 2
    # torch takes seconds to end the workers of a loader that raised and was dropped.
    if streams or found["ahead"] or found["workers"] or found["order"] == "batches of indices":
        found["bad"] = False
    if found["ahead"] or found["bad"]:
        found["breaks"] = 0
    if found["order"] == "stream read again":  # what nothing else may draw between
        found |= {"workers": 0, "draws": ""}
    found["persistent"] &= bool(found["workers"]) and not found["breaks"] and not found["looks"]
    return found


def _noisy(batch: Any) -> torch.Tensor:
    return torch.stack(batch) + torch.rand(()) + random.random()


def stock_of(chosen: Mapping[str, Any], more_rows: int = 0) -> Any:
    """Torch's own loader."""
    rows = (Bad if chosen["bad"] else Rows)(chosen["rows"] + more_rows, chosen["draws"])
    own = torch.Generator().manual_seed(5) if chosen["generator"] == "of the sampler" else None
    more = _orders(rows, own, chosen["batch"])[chosen["order"]]()
    if chosen["drop last"]:
        more["drop_last"] = True
    if chosen["generator"] == "of the loader":
        more["generator"] = torch.Generator().manual_seed(6)
    if chosen["workers"]:
        more |= {"num_workers": chosen["workers"], "persistent_workers": chosen["persistent"]}
    if chosen["draws"] == "the collation":
        more["collate_fn"] = _noisy
    streams = {"stream": PlacedStream, "stream read again": Stream}
    return torch_data.DataLoader(streams.get(chosen["order"], lambda one: one)(rows), **more)


def resumable_of(chosen: Mapping[str, Any], more_rows: int = 0) -> Any:
    """Ours."""
    made = resumable(stock_of(chosen, more_rows), skip="read" if chosen["order"] == "stream read again" else None)
    made.looks_ahead = chosen["ahead"]
    return made


@dataclasses.dataclass
class Loop:
    """A loop over a loader, which says each moment at which it may be stopped.

    Attributes:
        epoch: which one runs.
        done: how many of its batches were used.
        held: how many were taken and are not used yet.
    """

    loader: Any
    chosen: Mapping[str, Any]
    epoch: int = 0
    done: int = 0
    held: int = 0

    def moments(self) -> Iterator[Any]:
        """What came and was drawn: at each batch, and behind each epoch."""
        while self.epoch < self.chosen["epochs"]:
            if hasattr(self.loader.sampler, "set_epoch"):
                self.loader.sampler.set_epoch(self.epoch)
            yield from self._of_the_epoch()
            self.epoch, self.done, self.held = self.epoch + 1, 0, 0
            yield self.epoch, [_short(one.get_state()) for one in _own(self.loader)], _generators()

    def _of_the_epoch(self) -> Iterator[Any]:
        for batch in self._taken():
            if self.chosen["breaks"] and self.done >= self.chosen["breaks"]:
                return
            self.done += 1
            yield self.epoch, self.done, batch, self._drawn()

    def _drawn(self) -> Any:
        """By training: nothing where the stream is to draw alone."""
        if self.chosen["order"] == "stream read again":
            return None
        return torch.rand(()).item(), random.random(), numpy.random.rand()

    def _taken(self) -> Iterator[Any]:
        batches, ahead = iter(self.loader), deque[Any]()
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                break
            except OSError:
                batch = "a bad row"
            else:
                batch = batch.tolist()
            ahead.append(batch)
            if len(ahead) > self.chosen["ahead"]:
                self.held = self.chosen["ahead"]
                yield ahead.popleft()
        while ahead:
            self.held = len(ahead) - 1
            yield ahead.popleft()


def _own(loader: Any) -> list[torch.Generator]:
    places = [loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
    places += [getattr(loader.sampler, "sampler", None)]
    found = [getattr(one, "generator", None) for one in places]
    return [one for one in found if isinstance(one, torch.Generator)]


def _short(state: Any) -> int:
    return zlib.crc32(repr(state.tolist() if hasattr(state, "tolist") else state).encode())


def _generators() -> list[int]:
    found = torch.get_rng_state(), random.getstate(), list(numpy.random.get_state()[1:3])
    return [*map(_short, found)]


def _seed(number: int) -> None:
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a checkpoint has: behind how many moments, the loop's numbers, the loader's place, the generators."""

    at: int = 0
    epoch: int = 0
    done: int = 0
    place: str = ""
    rng: Any = None

    @classmethod
    def of(cls, loop: Loop, at: int, how: str) -> Saved:
        """Now."""
        loader = loop.loader
        if how == "a copy" and not loop.held:
            loader = copy.copy(loader)
        place = json.dumps(_place(loader, loop))
        if how == "twice" and json.dumps(_place(loader, loop)) != place:
            raise ValueError("a place that is asked for twice is another one")
        rng = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
        return cls(at, loop.epoch, loop.done, place, rng)

    def put_back(self) -> None:
        """The generators of this process."""
        torch.set_rng_state(self.rng[0])
        random.setstate(self.rng[1])
        numpy.random.set_state(self.rng[2])


def _place(loader: Any, loop: Loop) -> Any:
    """As the adapters ask for it: behind the last batch that was used, in the epoch of the loop."""
    over = loader.ended() if loop.done and not loop.held else None
    return (over.without(0) if over is not None else loader.position(loop.held)).to_json()


class Loaders:
    """See the module."""

    def run(self, draw: Draw, folder: Path) -> Verdict:
        """Through, and stopped as often as the seed says."""
        chosen = choose(draw)
        _seed(1)
        stock = stock_of(chosen)
        if chosen["looks"]:
            _look(stock)
        whole, length = list(Loop(stock, chosen).moments()), _length(stock)
        saved, loader = Saved(), None
        for number in range(min(draw.number("lives", 2, 6), 2 if chosen["workers"] else 6)):
            life = Life(draw, chosen, f"{number}", whole, length)
            loader, wrong = life.begun(loader, saved)
            if not wrong:
                saved, wrong = life.lived(loader, saved)
            if wrong:
                return Verdict(came_to="differs", wrong=f"{wrong} (start {number}, from {saved.at} of {len(whole)})")
        wrong = Life(draw, chosen, "last", whole, length).to_the_end(loader, saved)
        return Verdict(came_to="differs" if wrong else "equal", wrong=wrong)


def _look(loader: Any) -> None:
    with contextlib.suppress(OSError):
        next(iter(loader))


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


class Life:
    """One start: how it begins, how long it goes on, and what it saves."""

    def __init__(self, draw: Draw, chosen: Mapping[str, Any], name: str, whole: list[Any], length: int | None) -> None:
        self._chosen, self._whole, self._length = chosen, whole, length
        self._begins = draw.among(f"{name}/begins", "anew", "anew", "goes back", "from a pickle")
        self._other = draw.flag(f"{name}/other length first", of=4)
        self._goes_on = draw.number(f"{name}/goes on", 0, 9)
        self._back = draw.among(f"{name}/saved before", 0, 0, 0, 1, 3)
        self._how = draw.among(f"{name}/saves", "", "twice", "a copy")
        self._asks = draw.flag(f"{name}/asks for its length", of=3)

    def begun(self, loader: Any, saved: Saved) -> tuple[Any, str]:
        """The loader at its place; and what is wrong."""
        chosen = self._chosen
        goes_back = self._begins == "goes back" and bool(saved.at) and not chosen["looks"]
        if loader is None or not goes_back or self._keeps_more(saved):
            _seed(1 if not saved.at else 77)
            loader = resumable_of(chosen)
            if self._begins == "from a pickle" and chosen["generator"] == "":
                loader = pickle.loads(pickle.dumps(loader))
            if chosen["looks"]:
                _look(loader)
        if not saved.at:
            return loader, ""
        wrong = self._refused(saved)
        loader.load_state_dict(json.loads(saved.place))
        saved.put_back()
        return loader, wrong

    def _keeps_more(self, saved: Saved) -> bool:
        """What docs/data.md says of a stream that goes back to between two epochs."""
        return bool(self._chosen["order"] == "stream" and not json.loads(saved.place).get("begun"))

    def _refused(self, saved: Saved) -> str:
        """With more data there is no such place."""
        place = json.loads(saved.place)
        known = self._chosen["order"] not in ("stream", "stream read again", "own batches", "replacement")
        if not self._other or not known or not place.get("begun"):
            return ""
        other = resumable_of(self._chosen, 4)
        try:
            other.load_state_dict(place)
        except RestoreError as error:
            return "" if "indices" in str(error) or "it cannot be found" in str(error) else f"refused: {error}"
        return "taken: a place in data of another length"

    def lived(self, loader: Any, saved: Saved) -> tuple[Saved, str]:
        """What was saved last; and what is wrong."""
        loop = Loop(loader, self._chosen, saved.epoch, saved.done)
        at, when = saved.at, saved.at + max(0, self._goes_on - self._back)
        if at == when and at and not (self._chosen["breaks"] and not loop.done):
            saved = Saved.of(loop, at, self._how)  # at once, before anything else
        for found in loop.moments():
            if wrong := self._compared(found, at, loader):
                return saved, wrong
            at += 1
            # Behind a loop that was left the loader is still in that epoch: docs/data.md.
            if at == when and not (self._chosen["breaks"] and not loop.done):
                saved = Saved.of(loop, at, self._how)
            if at >= saved.at + self._goes_on or at >= when + self._back:
                break
        return saved, ""

    def _compared(self, found: Any, at: int, loader: Any) -> str:
        if self._asks and _length(loader) != self._length:
            return f"length: {_length(loader)} instead of {self._length}"
        if at >= len(self._whole):
            return f"more: {found[:3]} behind the end"
        expected = self._whole[at]
        if found == expected:
            return ""
        if len(found) != len(expected):
            return f"epoch: {found[:3]} instead of {expected[:3]}"
        if len(found) == 3:
            return f"generators: {'own' if found[1] != expected[1] else 'of the process'} behind epoch {found[0]}"
        what = "batch" if found[:3] != expected[:3] else "drawn by training"
        return f"{what}: {found} instead of {expected}"

    def to_the_end(self, loader: Any, saved: Saved) -> str:
        """The rest."""
        loader, wrong = self.begun(loader, saved)
        at = saved.at
        for found in () if wrong else Loop(loader, self._chosen, saved.epoch, saved.done).moments():
            wrong = self._compared(found, at, loader)
            if wrong:
                return wrong
            at += 1
        return wrong or ("" if at == len(self._whole) else f"less: {at} of {len(self._whole)} moments")
