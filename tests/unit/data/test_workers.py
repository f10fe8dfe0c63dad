"""What workers draw, and where iterable data sets are: the same after a resume, unasked."""

import functools
import itertools
import json
import logging
import random
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from safe_ckpt.data import resumable
from safe_ckpt.errors import RestoreError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
SIZE = 53


class Draws(Dataset):
    """What was drawn for a sample, and in which worker."""

    def __init__(self, kinds=("torch", "random", "numpy"), late=0):
        self.kinds, self.late = kinds, late

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        if index < self.late:
            return index, get_worker_info().id
        drawn = {"torch": torch.rand(()).item(), "random": random.gauss(0, 1), "numpy": float(np.random.randn())}
        return index, get_worker_info().id, [drawn[kind] for kind in self.kinds]


class Lines(IterableDataset):
    """Each worker reads lines of its own, knows where it is, and draws a number for each."""

    def __init__(self, sizes=(23, 9, 16), draws=False):
        self.sizes, self.draws, self.at = sizes, draws, 0

    def __iter__(self):
        info = get_worker_info()
        worker = info.id if info is not None else 0
        while self.at < self.sizes[worker]:
            self.at += 1
            yield worker, self.at, torch.rand(()).item() if self.draws else 0.0
        self.at = 0  # for the next epoch

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def batches(loader, epochs, stop_at=None, state=None):
    seen, first = [], 0
    if state is not None:
        loader.load_state_dict(json.loads(state["loader"]))
        first = state["epoch"]
        torch.set_rng_state(state["rng"])
    for epoch in range(first, epochs):
        for batch in loader:
            seen.append(batch)
            if len(seen) == stop_at:
                return seen, {
                    "epoch": epoch,
                    "loader": json.dumps(loader.state_dict()),
                    "rng": torch.get_rng_state(),
                }
    return seen, None


def is_exact(make, places, epochs=2):
    """The rest after a resume at these places is that of a run without."""
    torch.manual_seed(1)
    whole, _ = batches(make(), epochs)
    for place in places:
        torch.manual_seed(1)
        first, state = batches(make(), epochs, stop_at=place)
        torch.manual_seed(77)
        rest, _ = batches(make(), epochs, state=state)
        assert first + rest == whole, place


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "kinds",
    [
        *(pytest.param(kinds, marks=pytest.mark.thorough) for kinds in (("torch",), ("random", "numpy"))),
        ("torch", "random", "numpy"),
    ],
)
def test_workers_go_on_drawing_where_they_were(kinds, persistent):
    """With the batches in flight made again, each by the worker that would have made it."""

    def make():
        data = Draws(kinds)
        more = {"num_workers": 2, "persistent_workers": persistent, "prefetch_factor": 3}
        return resumable(DataLoader(data, batch_size=4, shuffle=True, collate_fn=list, **more))

    is_exact(make, (1, 2, 7, 13, 14, 15, 20), epochs=3)


@pytest.mark.parametrize("own", [False, True], ids=["global", "own"])
@pytest.mark.parametrize(("stop_at", "persistent"), [(14, False), (14, True), (5, False)])
def test_an_epoch_that_begins_by_its_number_draws_what_it_would_have_drawn(stop_at, persistent, own):
    """``set_epoch`` behind a resume at the last batch of the epoch before, or within one that was broken off there."""

    def make():
        more = {"generator": torch.Generator().manual_seed(3)} if own else {}
        more |= {"num_workers": 1, "persistent_workers": persistent}
        sampler = DistributedSampler(range(SIZE), num_replicas=1, rank=0)
        return resumable(DataLoader(Draws(("torch",)), batch_size=4, sampler=sampler, collate_fn=list, **more))

    def epoch(loader, number, stop_at=None):
        loader.sampler.set_epoch(number)
        return list(itertools.islice(loader, stop_at))

    torch.manual_seed(1)
    loader = make()
    assert len(epoch(loader, 0, stop_at)) == stop_at
    state, drawn = loader.state_dict(), torch.get_rng_state()
    expected = epoch(loader, 1)
    again = make()
    again.load_state_dict(state)
    torch.set_rng_state(drawn)
    assert epoch(again, 1) == expected


def test_draws_of_collate_fn_go_on_where_they_were():
    """What collate_fn draws counts, too, and batch_size=None has batches of one."""

    def noisy(samples):
        return samples, torch.rand(()).item()

    is_exact(lambda: resumable(DataLoader(range(SIZE), batch_size=4, num_workers=2, collate_fn=noisy)), (3, 8))
    is_exact(lambda: resumable(DataLoader(Draws(), batch_size=None, num_workers=2, collate_fn=list)), (3, 40))


def test_workers_that_start_to_draw_late_go_on_exactly_from_then():
    """From the batch on at which a worker is seen to draw, the place is exact; until then it needs nothing."""
    is_exact(lambda: resumable(DataLoader(Draws(late=20), batch_size=4, num_workers=2, collate_fn=list)), (2, 4, 8, 11))


def test_workers_that_draw_nothing_cost_nothing():
    """Nothing comes along with their batches, and the state stays small."""
    loader = resumable(DataLoader(range(SIZE), batch_size=4, num_workers=2))
    given = iter(loader)
    for _ in range(9):
        next(given)
    assert len(json.dumps(loader.state_dict())) < 400
    assert "workers" not in loader.state_dict()


def test_a_place_of_another_ranks_workers_is_told(caplog):
    """The place of all ranks together holds one rank's workers: the others say that they draw other numbers, and how not to."""

    def make(rank, workers=2):
        sampler = DistributedSampler(range(SIZE), num_replicas=2, rank=rank)
        return resumable(DataLoader(Draws(), batch_size=4, sampler=sampler, num_workers=workers, collate_fn=list))

    loader = make(0)
    next(iter(loader))
    state = loader.state_dict()
    make(0).load_state_dict(state)
    assert not caplog.records
    other = make(1, workers=3)
    with caplog.at_level(logging.WARNING):
        other.load_state_dict(state)
    assert "PerRank(loader)" in caplog.text
    assert len(list(other)) == 6


def test_a_place_of_as_many_workers_of_another_rank_is_told(caplog):
    """A rank that loads what another one saved goes on with workers of its own, not with that one's numbers, and says so."""

    def make():
        return resumable(DataLoader(Draws(), batch_size=4, num_workers=2, collate_fn=list))

    loader = make()
    given = iter(loader)
    for _ in range(3):
        next(given)
    state, left = loader.state_dict(), list(given)
    assert state["rank"] == 0
    same, other = make(), make()
    same.load_state_dict(state)
    assert list(same) == left
    assert not caplog.records
    other.load_state_dict({**state, "rank": 1})  # as rank 1 saves it
    assert "2 workers of rank 1 drew random numbers" in caplog.text
    assert "PerRank(loader)" in caplog.text
    found = list(other)
    assert [sample[0] for batch in found for sample in batch] == [sample[0] for batch in left for sample in batch]
    assert not any(sample in batch for batch, before in zip(found, left, strict=True) for sample in before)


@pytest.mark.parametrize("data", [Draws, functools.partial(Lines, draws=True)])
def test_workers_that_stay_go_back_with_the_loop(data):
    """A program that goes on takes its loader back, within an epoch and behind it: its persistent workers go back, too."""
    more = {"shuffle": True} if data is Draws else {}
    loader = resumable(
        DataLoader(data(), batch_size=4, num_workers=2, persistent_workers=True, collate_fn=list, **more)
    )
    torch.manual_seed(1)
    given = iter(loader)
    for _ in range(3):
        next(given)
    state, drawn = json.dumps(loader.state_dict()), torch.get_rng_state()
    expected = [list(given), list(loader)]
    for stop_at in (2, None):
        loader.load_state_dict(json.loads(state))
        torch.set_rng_state(drawn)
        again = iter(loader)
        assert list(itertools.islice(again, stop_at)) == expected[0][:stop_at]
    assert list(loader) == expected[1]


@pytest.mark.slow
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize(
    ("workers", "size"),
    [
        *((0, 4), (3, 4), (3, None)),
        *(pytest.param(*one, marks=pytest.mark.thorough) for one in ((1, 4), (3, 1))),
    ],
)
def test_iterable_data_sets_go_to_their_place(workers, size, draws):
    """Workers that have read all stay so, the others go on in turn; as in a run without a resume, at any place."""

    def make():
        return resumable(DataLoader(Lines(draws=draws), batch_size=size, num_workers=workers, collate_fn=collected))

    total = len(list(make()))
    is_exact(make, sorted({1, 2, 5, total - 5, total - 1, total, total + 1, total + 3} & set(range(1, 2 * total))))


def collected(samples):
    return samples


def test_a_worker_that_has_read_all_of_its_stream_stays_so():
    """A resume at places where one worker is at its end and another one is not: it begins no second time."""

    def make():
        return resumable(DataLoader(Lines((3, 8)), batch_size=2, num_workers=2, collate_fn=collected))

    is_exact(make, (3,), epochs=1)


def test_an_epoch_that_is_begun_anew_with_new_workers_has_a_place_of_its_own():
    """A place was loaded, and not used: its workers' numbers are none of the new ones', which a later resume goes on with."""

    def make():
        more = {"num_workers": 2, "persistent_workers": True, "collate_fn": list}
        return resumable(DataLoader(Draws(), batch_size=9, **more))

    loader = make()
    list(zip(range(3), loader, strict=False))
    anew = make()
    anew.load_state_dict(loader.state_dict())
    anew.begin_anew()
    given = iter(anew)
    next(given)
    again = make()
    again.load_state_dict(anew.state_dict())
    assert list(again) == list(given)


def test_an_iterables_place_of_another_rank_is_refused(monkeypatch):
    """Another rank, another number of workers, or data without a place: an error that says what to do."""
    monkeypatch.setenv("RANK", "0")

    def made(workers=0, **more):
        return resumable(DataLoader(Lines(), batch_size=4, num_workers=workers, **more))

    loader = made()
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(RestoreError, match="num_workers"):
        made(2).load_state_dict(state)
    with pytest.raises(RestoreError, match="PerRank"):
        made().load_state_dict({**state, "facts": {**state["facts"], "rank": 1}})


def test_a_loader_that_cannot_be_exact_is_one_warning_when_made(caplog):
    """One warning when the loader is made, with its name, the reason and the remedy."""

    class Plain(IterableDataset):
        def __iter__(self):
            return iter(range(10))

    with caplog.at_level(logging.WARNING):
        resumable(DataLoader(Lines()))
        resumable(DataLoader(Plain()), skip="read")
        assert not caplog.records
        resumable(DataLoader(Plain()))
    assert len(caplog.records) == 1
    assert "DataLoader over Plain" in caplog.text
    assert "skip='read'" in caplog.text


def test_a_loaders_place_can_go_back_by_batches_not_yet_trained_on():
    """A framework has taken more batches than training was given: the place before them, workers and all."""
    for data, more in ((Lines(draws=True), {}), (Draws(), {"shuffle": True})):
        make = lambda data=data, more=more: resumable(  # noqa: E731
            DataLoader(data, batch_size=2, num_workers=2, collate_fn=list, **more)
        )
        torch.manual_seed(1)
        whole = list(make())
        for unseen in (1, 2):
            torch.manual_seed(1)
            loader = make()
            given = iter(loader)
            for _ in range(9):
                next(given)
            place = loader.position(unseen).to_json()
            again = make()
            again.load_state_dict(json.loads(json.dumps(place)))
            assert list(again) == whole[9 - unseen :]


@pytest.mark.parametrize("has_tqdm", [True, False])
def test_reading_batches_again_shows_progress_and_logs_its_time(caplog, capsys, monkeypatch, has_tqdm):
    """A progress bar where tqdm is installed, and one line in the log."""
    if not has_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    loader = resumable(DataLoader(range(SIZE), batch_size=4), skip="read")
    given = iter(loader)
    for _ in range(5):
        next(given)
    again = resumable(DataLoader(range(SIZE), batch_size=4), skip="read")
    again.load_state_dict(loader.state_dict())
    with caplog.at_level(logging.INFO):
        assert len(list(again)) == 9
    assert "read 5 batches again in" in caplog.text
    assert ("reading up to its place" in capsys.readouterr().err) == has_tqdm


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_streams_of_hugging_face_resume_exactly(workers, caplog):
    """``datasets.IterableDataset`` in shards, with a map that draws: exact in this epoch, and the next one is whole."""
    datasets = pytest.importorskip("datasets")

    def noisy(row):
        return {**row, "noise": torch.rand(()).item()}

    def make(buffer=0, **more):
        rows = datasets.Dataset.from_dict({"x": list(range(SIZE))}).to_iterable_dataset(num_shards=4)
        rows = rows.shuffle(seed=3, buffer_size=buffer) if buffer else rows.map(noisy)
        return resumable(DataLoader(rows, batch_size=4, num_workers=workers, collate_fn=list), **more)

    is_exact(make, (1, 5, 10, 15, 20))
    assert not caplog.records
    make(buffer=5)
    assert "shuffle buffer" in caplog.text
    is_exact(lambda: make(buffer=5, skip="read"), (3,))


def test_a_data_set_whose_state_needs_its_own_loader_has_no_place(caplog):
    """litdata's ``state_dict`` takes what only its own loader knows: such a one has no place for a stock loader."""

    class Asks(IterableDataset):
        def __iter__(self):
            return iter(range(10))

        def state_dict(self, num_samples_yielded, num_workers, batch_size):
            raise AssertionError

        def load_state_dict(self, state):
            raise AssertionError

    assert len(list(resumable(DataLoader(Asks(), batch_size=2)))) == 5
    assert "skip='read'" in caplog.text
