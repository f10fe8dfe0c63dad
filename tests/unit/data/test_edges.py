"""Loops that are not the usual one: several loaders at a time, batches that cannot be made, samplers that draw at once."""

import copy
import json
import pickle
import random

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from safe_ckpt.data import resumable
from safe_ckpt.data.position import Position

FORKED = {"num_workers": 1, "multiprocessing_context": "fork"}
pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]


def stored(loader):
    return json.loads(json.dumps(loader.state_dict()))


def loaded(loader, state):
    loader.load_state_dict(state)
    return loader


class Bad(Dataset):
    """Sample 3 draws, and then cannot be made."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        drawn = random.random()
        if index == 3:
            raise ValueError("bad")
        return index, drawn


def go_on(batches, seen, count=None):
    """So many batches, those that cannot be made included."""
    while count is None or count > 0:
        try:
            seen.append(next(batches))
        except StopIteration:
            return seen
        except ValueError as error:
            seen.append("bad" if "bad" in str(error) else repr(error))
        count = None if count is None else count - 1
    return seen


# torch takes 5 s to end the workers of a loader that raised and was dropped, so there are but two of these.
@pytest.mark.slow
@pytest.mark.parametrize(("stop", "workers", "where"), [(4, 1, "sample"), (5, 2, "collate")])
def test_a_resume_behind_a_batch_that_failed_counts_its_draws(stop, workers, where):
    """A worker draws for a batch and cannot make it: after a resume right behind it, the draws are as they would have been."""

    def collate(samples):
        if where == "collate" and samples[0][0] == 4 and random.random() >= 0:
            raise ValueError("bad")
        return samples

    def made():
        torch.manual_seed(0)
        return resumable(DataLoader(Bad(), collate_fn=collate, **{**FORKED, "num_workers": workers}))

    whole = go_on(iter(made()), [])
    assert whole.count("bad") == (2 if where == "collate" else 1)
    loader = made()
    seen = go_on(iter(loader), [], stop)
    assert go_on(iter(loaded(made(), stored(loader))), seen) == whole


class AtOnce(Sampler):
    """Draws in ``__iter__``, as a sampler does that is no generator."""

    def __init__(self, batched):
        self.batched = batched

    def __iter__(self):
        return iter([[i] if self.batched else i for i in torch.randperm(6).tolist()])

    def __len__(self):
        return 6


@pytest.mark.parametrize("workers", [{}, FORKED], ids=["here", "in a worker"])
@pytest.mark.parametrize("batched", [True, False])
def test_a_sampler_that_draws_at_once_gives_the_stock_order(batched, workers):
    """The order is that of the stock loader, and a resume goes on in it."""

    def made():
        how = {"batch_sampler": AtOnce(True)} if batched else {"sampler": AtOnce(False), "batch_size": None}
        return DataLoader(range(6), collate_fn=list if batched else None, **how, **workers)

    torch.manual_seed(3)
    stock = [*made(), *made()]
    torch.manual_seed(3)
    loader = resumable(made())
    batches, seen = iter(loader), []
    seen = [next(batches) for _ in range(4)]
    state, now = stored(loader), torch.get_rng_state()
    assert [*seen, *batches, *resumable(made())] == stock
    torch.set_rng_state(now)
    again = loaded(resumable(made()), state)
    torch.set_rng_state(now)
    assert [*seen, *again, *resumable(made())] == stock


class Own(Sampler):
    """Batches by a generator of its own; drawn in ``__iter__``, or when the first one is asked for."""

    def __init__(self, at_once):
        self.generator, self.at_once = torch.Generator().manual_seed(5), at_once

    def __len__(self):
        return 6

    def __iter__(self):
        return iter(self.batches()) if self.at_once else (batch for wait in (1,) for batch in self.batches())

    def batches(self):
        return torch.randperm(12, generator=self.generator).view(6, 2).tolist()


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("kind", ["at once", "later", "a subclass"])
def test_a_batch_sampler_with_a_generator_of_its_own(kind, stays):
    """torch asks it for two orders where there are workers, and takes one: the batches are those of the stock loader."""

    def made():
        given = Own(kind == "at once")
        if kind == "a subclass":
            given = type("Batched", (BatchSampler,), {})(RandomSampler(range(12), generator=given.generator), 2, False)
        return DataLoader(range(12), batch_sampler=given, collate_fn=list, persistent_workers=stays, **FORKED)

    def train(loader, seen, begun=0, stop=None):
        for epoch in range(begun, 3):
            for batch in loader:
                seen.append(batch)
                if len(seen) == stop:
                    return seen, stored(loader), epoch
        return seen

    whole = train(made(), [])
    assert train(resumable(made()), []) == whole
    for stop in (2, 6, 7, 15):
        seen, state, epoch = train(resumable(made()), [], stop=stop)
        assert train(loaded(resumable(made()), state), seen, epoch) == whole, stop


def test_two_loaders_read_by_zip_lose_no_epoch():
    """zip() asks the second one no more when the first has ended. With ``strict`` it does, and no epoch is lost."""

    def made():
        return [resumable(DataLoader(range(at, at + 4), batch_size=2, collate_fn=list)) for at in (0, 10)]

    def train(loaders, begun=0):
        for epoch in range(begun, 3):
            for row in zip(*loaders, strict=True):
                seen.append(row)
                states.append((len(seen), epoch, [stored(one) for one in loaders]))
            states.append((len(seen), epoch + 1, [stored(one) for one in loaders]))

    seen, states = [], []
    train(made())
    whole, places = seen, states
    assert len(whole) == 6
    for count, epoch, saved in places:
        seen, states = [], []
        train([loaded(one, state) for one, state in zip(made(), saved, strict=True)], epoch)
        assert whole[:count] + seen == whole, count


def test_a_second_loader_that_nothing_is_asked_of_goes_on_with_the_next_epoch():
    """Saved in the step of the last batch: zip() finds the first one at its end then, and does not ask the second."""
    loaders = [resumable(DataLoader(range(4), batch_size=2, collate_fn=list)) for _ in range(2)]
    for loader in loaders:
        batches = iter(loader)
        next(batches)
        next(batches)
        loader.load_state_dict(stored(loader))
    assert list(zip(*loaders, strict=False)) == []
    assert list(zip(*loaders, strict=False)) == [([0, 1], [0, 1]), ([2, 3], [2, 3])]


class Epochs(IterableDataset):
    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 4:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("kind", ["stream", "indices"])
def test_persistent_workers_take_no_random_numbers_from_the_process(kind):
    """Between epochs, with persistent workers: what training draws, and the order, are those of an uninterrupted run."""

    def made():
        how = {**FORKED, "persistent_workers": True, "batch_size": 2, "collate_fn": list}
        if kind == "stream":
            return resumable(DataLoader(Epochs(), **how))
        return resumable(DataLoader(range(6), shuffle=True, **how))

    def run(stop):
        torch.manual_seed(0)
        loader, seen = made(), []
        for epoch in range(3):
            seen += [(batch, torch.rand(()).item()) for batch in loader]
            if stop == epoch:
                state, now = stored(loader), torch.get_rng_state()
                loader = made()
                torch.set_rng_state(now)
                loader.load_state_dict(state)
        return seen

    assert run(0) == run(1) == run(None)


class Fails(IterableDataset):
    """The third sample cannot be made; the stream goes on behind it."""

    def __iter__(self):
        self.at = -1
        return self

    def __next__(self):
        self.at += 1
        if self.at == 2:
            raise ValueError("bad")
        if self.at >= 6:
            raise StopIteration
        return self.at


class PlacedFails(Fails):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise AssertionError(state)


@pytest.mark.parametrize("data", [Fails, PlacedFails])
def test_a_stream_goes_on_behind_what_could_not_be_made(data):
    """As the stock loader does; and read again after a resume, too."""
    expected = go_on(iter(DataLoader(data(), batch_size=None)), [])
    assert expected == [0, 1, "bad", 3, 4, 5]
    assert go_on(iter(resumable(DataLoader(data(), batch_size=None))), []) == expected
    loader = resumable(DataLoader(data(), batch_size=None), skip="read")
    seen = go_on(iter(loader), [], 4)
    again = loaded(resumable(DataLoader(data(), batch_size=None), skip="read"), stored(loader))
    assert go_on(iter(again), seen) == expected


@pytest.mark.parametrize("copied", [copy.copy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_a_copy_knows_the_place(copied):
    """Within an epoch, of a loader and of its copy."""
    loader = resumable(DataLoader(range(6)))
    batches = iter(loader)
    next(batches)
    next(batches)
    assert copied(loader).state_dict() == loader.state_dict()


@pytest.mark.parametrize("copied", [copy.copy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_a_copy_knows_what_workers_are_at(copied):
    """The generators of workers, and whose turn it is in a stream, are part of the place: of a copy's, too."""
    for data in (Bad(), Epochs()):
        loader = resumable(DataLoader(data, **FORKED))
        batches = iter(loader)
        next(batches)
        next(batches)
        place = loader.state_dict()
        assert place["workers"]
        assert copied(loader).state_dict() == place


def test_a_place_with_one_state_before_its_batches_is_read():
    """As earlier versions saved it: the generators before the first of the batches that are made again."""
    place = Position.from_json({"version": 2, "begun": True, "again": 2, "before": {"torch": "state"}})
    assert place.before == [{"torch": "state"}]
