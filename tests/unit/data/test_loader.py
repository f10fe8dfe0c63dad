"""A loader that goes on where it was: the same batches as the loader itself, and the rest of them after a resume."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from safe_ckpt.data import order, resumable
from safe_ckpt.errors import RestoreError

SIZE = 53


class Ids(Dataset):
    """Each sample is its index, and what was drawn for it."""

    def __init__(self, draws=False, size=SIZE):
        self.draws, self.size = draws, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not self.draws or isinstance(index, list):
            return index
        return index, torch.rand(()).item(), random.random(), float(np.random.rand())


class Custom(Sampler):
    """Draws from the generators of this process, in no way that is known."""

    def __iter__(self):
        order = list(range(SIZE))
        random.shuffle(order)
        yield from order

    def __len__(self):
        return SIZE


class Shuffled(RandomSampler):
    """Of a class of torch's, and draws its order in another way."""

    def __iter__(self):
        order = list(range(SIZE))
        random.shuffle(order)
        yield from order


class Permuted(SubsetRandomSampler):
    """The same, from numpy's generator."""

    def __iter__(self):
        yield from np.random.permutation(self.indices).tolist()


class CustomBatches(Sampler):
    """Batches of different sizes."""

    def __iter__(self):
        order = torch.randperm(SIZE).tolist()
        at = 0
        while at < SIZE:
            size = 1 + order[at] % 7
            yield order[at : at + size]
            at += size

    def __len__(self):
        return 15


class OwnBatches(BatchSampler):
    """What it does is not known from its type."""


class Endless(IterableDataset):
    """Does not know its place."""

    def __iter__(self):
        return iter(range(10))


class Counting(Sampler):
    """Counts its epochs itself."""

    epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter(torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self):
        return SIZE


def generator():
    return torch.Generator().manual_seed(3)


SAMPLERS = {
    "in order": dict,
    "shuffle": lambda: {"shuffle": True},
    "shuffle, generator": lambda: {"shuffle": True, "generator": generator()},
    "sampler's generator": lambda: {"sampler": RandomSampler(range(SIZE), generator=generator())},
    "replacement": lambda: {"sampler": RandomSampler(range(SIZE), replacement=True, num_samples=77)},
    "replacement, generator": lambda: {
        "sampler": RandomSampler(range(SIZE), replacement=True, num_samples=64, generator=generator())
    },
    "more than there are": lambda: {"sampler": RandomSampler(range(SIZE), num_samples=120)},
    "more, generator": lambda: {"sampler": RandomSampler(range(SIZE), num_samples=120, generator=generator())},
    "twice as many": lambda: {"sampler": RandomSampler(range(SIZE), num_samples=2 * SIZE)},
    "twice as many, generator": lambda: {
        "sampler": RandomSampler(range(SIZE), num_samples=2 * SIZE, generator=generator())
    },
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0 + i % 3 for i in range(SIZE)], 60)},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(5, 40))},
    "subset, generator": lambda: {"sampler": SubsetRandomSampler(range(5, 40), generator=generator())},
    "distributed": lambda: {"sampler": DistributedSampler(range(SIZE), num_replicas=3, rank=2, seed=4)},
    "subclass of random": lambda: {"sampler": Shuffled(range(SIZE))},
    "subclass of subset": lambda: {"sampler": Permuted(range(5, 40))},
    "custom": lambda: {"sampler": Custom()},
    "custom batches": lambda: {"batch_sampler": CustomBatches()},
    "own batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(SIZE)), 5, drop_last=True)},
    "no batches": lambda: {"batch_size": None, "shuffle": True},
    "batches as samples": lambda: {"batch_size": None, "sampler": BatchSampler(RandomSampler(range(SIZE)), 5, False)},
    "subclass of batches": lambda: {
        "batch_sampler": OwnBatches(RandomSampler(range(SIZE), generator=generator()), 5, False)
    },
    "epochs of its own": lambda: {"sampler": Counting()},
    "a list": lambda: {"sampler": list(range(7, SIZE))},
}


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def made(name, workers=0, draws=False, **more):
    kinds = SAMPLERS[name]()
    if "batch_sampler" not in kinds:
        kinds.setdefault("batch_size", 4)
    return DataLoader(
        Ids(draws), **kinds, num_workers=workers, collate_fn=list if kinds.get("batch_size", 1) else None, **more
    )


def epoch_of(loader, epoch):
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)
    return loader


def states():
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_states(kept):
    torch.set_rng_state(kept[0])
    random.setstate(kept[1])
    np.random.set_state(kept[2])


def run(loader, epochs, stop_at=None, resumed=None):
    """All batches, each with what training drew after it; or until one is to be the last, and then the state."""
    seen, first = [], 0
    if resumed is not None:
        first = resumed["epoch"]
        loader.load_state_dict(json.loads(resumed["loader"]))
        set_states(resumed["rng"])
    for epoch in range(first, epochs):
        for batch in epoch_of(loader, epoch):
            seen.append((epoch, batch, torch.rand(()).item(), random.random()))
            if stop_at is not None and len(seen) == stop_at:
                return seen, {"epoch": epoch, "loader": json.dumps(loader.state_dict()), "rng": states()}
    return seen, None


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_resumable_loader_gives_the_stock_batches_and_draws(name):
    """Three epochs of the same batches as the loader itself gives, and training draws the same numbers."""
    seed_all(1)
    expected, _ = run(made(name), 3)
    seed_all(1)
    found, _ = run(resumable(made(name)), 3)
    assert found == expected


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_resume_goes_on_with_the_next_batch(name, workers):
    """At places in every epoch, first and last batch among them: the rest is equal, element by element."""
    seed_all(1)
    whole, _ = run(resumable(made(name, workers)), 3)
    places = range(1, len(whole)) if not workers else range(1, len(whole), 11)
    for place in places:
        seed_all(1)
        first, state = run(resumable(made(name, workers)), 3, stop_at=place)
        seed_all(99)
        rest, _ = run(resumable(made(name, workers)), 3, resumed=state)
        assert first + rest == whole, (place, state["loader"])


ON_THE_PAGE = {
    "in order": "in order",
    "shuffle": "`shuffle=True`",
    "shuffle, generator": "`shuffle=True` with a `generator`",
    "sampler's generator": "`RandomSampler` with a `generator`",
    "replacement": "`RandomSampler(replacement=True)`",
    "replacement, generator": "`RandomSampler(replacement=True)` with a `generator`",
    "more than there are": "`RandomSampler` with `num_samples` above the length",
    "weighted": "`WeightedRandomSampler`",
    "subset": "`SubsetRandomSampler`",
    "subset, generator": "`SubsetRandomSampler` with a `generator`",
    "distributed": "`DistributedSampler`",
    "custom": "a sampler of your own",
    "custom batches": "a batch sampler of your own",
    "own batches": "`BatchSampler`",
    "no batches": "`batch_size=None`",
    "batches as samples": "`batch_size=None` with a `BatchSampler`",
    "subclass of batches": "a subclass of `BatchSampler`",
    "epochs of its own": "a sampler that counts its epochs",
    "a list": "a list of indices",
}


@pytest.mark.parametrize("name", ON_THE_PAGE)
def test_the_size_of_a_loaders_state_is_that_of_the_page(name):
    """A few hundred bytes of plain data, and more only where a generator is in it: the table in docs/data.md."""
    seed_all(1)
    loader = resumable(made(name))
    next(iter(loader))
    size = len(json.dumps(loader.state_dict()))
    said = "< 400 bytes" if size < 400 else "< 10 kB" if size < 10_000 else "< 30 kB"
    assert size < 30_000
    page = (Path(__file__).parents[3] / "docs/data.md").read_text()
    assert f"| {ON_THE_PAGE[name]} | {said} |" in page.splitlines(), (name, size)


def test_nothing_is_read_to_find_the_place():
    """After a resume only the samples that are left are made."""
    seen = []

    class Noting(Ids):
        def __getitem__(self, index):
            seen.append(index)
            return index

    loader = resumable(DataLoader(Noting(), batch_size=4, shuffle=True))
    batches = iter(loader)
    for _ in range(10):
        next(batches)
    state, before = loader.state_dict(), list(seen)
    seen.clear()
    again = resumable(DataLoader(Noting(), batch_size=4, shuffle=True))
    again.load_state_dict(state)
    assert len(list(again)) == 4
    assert sorted(before + seen) == list(range(SIZE))


def test_a_place_of_a_loader_that_seeded_each_sample_is_taken(caplog):
    """As earlier versions saved it: the order goes on, and a warning says what is another."""
    seed_all(1)
    whole, _ = run(resumable(made("shuffle", 0)), 1)
    seed_all(1)
    first, state = run(resumable(made("shuffle", 0)), 1, stop_at=3)
    state["loader"] = json.dumps({**json.loads(state["loader"]), "token": 7})
    rest, _ = run(resumable(made("shuffle", 0)), 1, resumed=state)
    assert first + rest == whole
    assert "per_sample" in caplog.text


@pytest.mark.parametrize("name", ["shuffle", "shuffle, generator", "weighted", "custom"])
def test_persistent_workers_are_seeded_once_also_after_a_resume(name):
    """With persistent_workers torch draws their seed once in the loader's life: also of a run that was resumed."""
    more = {"persistent_workers": True}
    seed_all(1)
    whole, _ = run(resumable(made(name, 1, **more)), 3)
    per_epoch = len(whole) // 3
    for place in (3, per_epoch, per_epoch + 1, per_epoch + 4, 2 * per_epoch):
        seed_all(1)
        first, state = run(resumable(made(name, 1, **more)), 3, stop_at=place)
        rest, _ = run(resumable(made(name, 1, **more)), 3, resumed=state)
        assert first + rest == whole, place
    seed_all(1)
    loader = resumable(made(name, 1, **more))
    first, _ = run(loader, 1)
    between = {"epoch": 1, "loader": json.dumps(loader.state_dict()), "rng": states()}
    rest, _ = run(resumable(made(name, 1, **more)), 3, resumed=between)
    assert first + rest == whole


@pytest.mark.slow
def test_spawned_workers_get_a_data_set_that_looks_like_the_users():
    """What stands in for the data set gets there by pickle, and looks like the data set."""
    loader = DataLoader(
        Ids(),
        batch_size=20,
        num_workers=1,
        multiprocessing_context="spawn",
        collate_fn=list,
        worker_init_fn=looks_like_ids,
    )
    assert list(resumable(loader)) == [
        list(range(20)),
        list(range(20, 40)),
        list(range(40, SIZE)),
    ]


def looks_like_ids(_):
    assert isinstance(get_worker_info().dataset, Ids)
    assert get_worker_info().dataset.size == SIZE


def test_a_loaded_place_is_saved_again_as_the_same_state():
    """Saved again before any batch, also after going back within one process: the same state."""
    for name in SAMPLERS:
        loader = resumable(made(name))
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.state_dict()
        again = resumable(made(name))
        again.load_state_dict(state)
        assert again.state_dict() == state
        rest = list(batches)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert list(loader) == rest


def test_a_loop_goes_on_behind_a_bad_sample():
    """As with the loader itself: the caller may go on with the next batch, and the place is behind it."""

    class Bad(Ids):
        def __getitem__(self, index):
            if index == 5:
                raise OSError("a bad sample")
            return index

    def given(loader):
        seen, batches = [], iter(loader)
        while True:
            try:
                seen.append(next(batches))
            except OSError:
                seen.append("bad")
            except StopIteration:
                return seen

    stock = given(DataLoader(Bad(), batch_size=4, collate_fn=list))
    loader = resumable(DataLoader(Bad(), batch_size=4, collate_fn=list))
    assert given(loader) == stock
    batches = iter(loader)
    next(batches)
    with pytest.raises(OSError, match="bad sample"):
        next(batches)
    again = resumable(DataLoader(Bad(), batch_size=4, collate_fn=list))
    again.load_state_dict(loader.state_dict())
    assert list(again) == stock[2:]


def test_loaders_whose_place_cannot_be_told_are_refused_by_name():
    """At once, and by name: order of arrival, classes that know their place, data sets without indices."""

    class Knows(DataLoader):
        def state_dict(self):
            return {}

    with pytest.raises(TypeError, match="takes a DataLoader, got list"):
        resumable([1, 2])
    with pytest.raises(TypeError, match="in_order"):
        resumable(DataLoader(Ids(), num_workers=2, in_order=False))
    with pytest.raises(TypeError, match="knows its place itself"):
        resumable(Knows(Ids()))
    loader = resumable(DataLoader(Endless(), batch_size=2))
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(RestoreError, match="skip='read'"):
        resumable(DataLoader(Endless(), batch_size=2)).load_state_dict(state)
    with pytest.raises(RestoreError, match="must have been saved that way"):
        resumable(DataLoader(Endless(), batch_size=2), skip="read").load_state_dict(state)
    reading = resumable(DataLoader(Endless(), batch_size=2), skip="read")
    next(iter(reading))
    again = resumable(DataLoader(Endless(), batch_size=2), skip="read")
    again.load_state_dict(reading.state_dict())
    assert [batch.tolist() for batch in again] == [[2, 3], [4, 5], [6, 7], [8, 9]]


def test_what_is_resumable_already_is_left_as_it_is():
    """A second call gives the loader itself, and its place with it. One that asks for another way to resume is heeded."""
    loader = resumable(DataLoader(Ids(), batch_size=4))
    assert resumable(loader) is loader
    reading = resumable(loader, skip="read")
    assert reading.skip == "read"
    assert resumable(reading, skip="read") is reading


def test_a_stream_that_is_read_again_goes_on_with_more_ranks(monkeypatch):
    """A rank that has saved no place reads up to that of rank 0."""

    def made():
        return resumable(DataLoader(Endless(), batch_size=2, collate_fn=list), skip="read")

    loader = made()
    next(iter(loader))
    state = loader.state_dict()
    monkeypatch.setattr(order, "world_rank", lambda: 1)
    again = made()
    again.start_anew(state, 1)
    assert list(again) == [[2, 3], [4, 5], [6, 7], [8, 9]]


def test_a_loader_that_iterates_in_its_own_way_fails_the_resume_by_name():
    """A subclass that gives batches past torch's: the resume fails by name, and does not begin at the start."""

    class Own(DataLoader):
        def __iter__(self):
            return iter([[1], [2], [3]])

    loader = resumable(Own(Ids(), batch_size=1))
    next(iter(loader))
    again = resumable(Own(Ids(), batch_size=1))
    again.load_state_dict(loader.state_dict())
    with pytest.raises(RestoreError, match="iteration of its own"):
        next(iter(again))


def test_a_dropped_loader_ends_its_workers():
    """No cycle keeps it: its workers end with the last reference, also of a loop that was broken off."""
    for persistent in (True, False):
        loader = resumable(DataLoader(Ids(), batch_size=4, num_workers=1, persistent_workers=persistent))
        batches = iter(loader)
        next(batches)
        (worker,) = batches._inner._workers
        del batches, loader
        worker.join(20)
        assert worker.exitcode is not None


def consumed(sizes, ranks_at, seed, drop_last=False):
    """Ids that all ranks see in one epoch, with another number of ranks after each place."""
    seen, state = [], None
    for (ranks, batches), size in zip(ranks_at, sizes, strict=True):
        states, given = [], []
        for rank in range(ranks):
            sampler = DistributedSampler(range(SIZE), num_replicas=ranks, rank=rank, seed=seed, drop_last=drop_last)
            sampler.set_epoch(2)
            loader = resumable(DataLoader(Ids(), batch_size=size, sampler=sampler, collate_fn=list))
            if state is not None:
                loader.load_state_dict(state)
            number = 0
            for number, batch in enumerate(loader, 1):
                seen += batch
                if number == batches:
                    states.append(loader.state_dict())
                    break
            given.append(number)
        assert len(set(given)) == 1  # or some ranks wait for the others for ever
        if batches is not None:
            assert states == [states[0]] * ranks
            state = states[0]
    return seen


@pytest.mark.parametrize("seed", range(30))
def test_another_number_of_ranks_sees_each_sample_once(seed):
    """4, then 2, then 3 ranks within an epoch, with other batch sizes: each sample once, but for the last turn."""
    chance = random.Random(seed)
    sizes = [chance.randint(1, 3) for _ in range(3)]
    seen = consumed(sizes, [(4, chance.randint(1, 3)), (2, chance.randint(1, 4)), (3, None)], seed)
    assert set(seen) == set(range(SIZE))
    assert len(seen) - SIZE <= 2
    dropped = consumed(sizes, [(4, 1), (2, 1), (3, None)], seed, drop_last=True)
    assert len(set(dropped)) == len(dropped) >= SIZE - 2


def test_a_place_in_another_order_of_the_data_is_refused():
    """Another length, another sampler, another rank's order: an error that names the loader and what differs."""
    loader = resumable(made("shuffle"))
    next(iter(loader))
    state = loader.state_dict()
    for other in (
        DataLoader(Ids(size=SIZE + 1), batch_size=4, shuffle=True),
        DataLoader(Ids(), batch_size=4),
    ):
        with pytest.raises(RestoreError, match="over Ids"):
            resumable(other).load_state_dict(state)
    with pytest.raises(
        RestoreError, match=r"indices.*from a save behind the loop of an epoch, or resume without the loader"
    ):
        resumable(DataLoader(Ids(size=SIZE + 1), batch_size=4, shuffle=True)).load_state_dict(state)
    with pytest.raises(RestoreError, match="it cannot be found again"):
        resumable(made("shuffle, generator")).load_state_dict(state)
    batches = resumable(made("subclass of batches"))
    next(iter(batches))
    without = DataLoader(Ids(), batch_sampler=OwnBatches(RandomSampler(range(SIZE)), 5, False))
    with pytest.raises(RestoreError, match="saved with generators"):
        resumable(without).load_state_dict(batches.state_dict())
    with pytest.raises(RestoreError, match="PerRank"):
        resumable(made("shuffle")).load_state_dict({**state, "facts": {**state["facts"], "rank": 1}})
    with pytest.raises(RestoreError, match="version 9"):
        resumable(made("shuffle")).load_state_dict({"version": 9})


@pytest.mark.parametrize("name", ["replacement", "replacement, generator"])
def test_a_number_of_samples_that_was_asked_for_does_not_hide_another_length(name):
    """``num_samples`` is as it was, and the data have another length: refused. Earlier versions noted no length: taken."""
    loader = resumable(made(name))
    next(iter(loader))
    state = loader.state_dict()
    asked = len(loader.sampler)
    given = {"generator": generator()} if "generator" in name else {}
    grown = RandomSampler(range(SIZE + 9), replacement=True, num_samples=asked, **given)
    with pytest.raises(RestoreError, match=f"saved with samples {SIZE}, and now it is {SIZE + 9}"):
        resumable(DataLoader(Ids(size=SIZE + 9), batch_size=4, sampler=grown)).load_state_dict(state)
    facts = {key: value for key, value in state["facts"].items() if key != "samples"}
    resumable(made(name)).load_state_dict({**state, "facts": facts})


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_resume_behind_every_batch_gives_the_same_batches(name):
    """A resume of a resume of a resume, within one epoch and on into the next: nothing comes twice or is left out."""
    seed_all(1)
    whole, _ = run(made(name), 2)
    seed_all(1)
    seen, state = run(resumable(made(name)), 2, stop_at=1)
    while state is not None:
        seed_all(99)
        more, state = run(resumable(made(name)), 2, stop_at=1, resumed=state)
        seen += more
    assert seen == whole
