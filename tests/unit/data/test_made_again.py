"""Batches that a framework took and training was not given: a resume makes them again, each as it was made the first time."""

import json
import pickle
import weakref

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from safe_ckpt.data.loader import Resumable, made_of, resumable


class Ahead(Resumable):
    """As under a framework that takes two batches before it uses them."""

    looks_ahead = 2


class Draws(Dataset):
    """Each sample draws."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index, torch.rand(()).item()


def make(kind=Ahead):
    return made_of(DataLoader(Draws(), batch_size=2, shuffle=True, collate_fn=list), None, kind)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("unseen", [0, 1, 2])
def test_each_batch_is_made_again_with_the_generators_that_it_had(unseen, trains):
    """Training draws between the batches, or does not: those that come again are the same, sample for sample."""
    torch.manual_seed(3)
    loader, given = make(), []
    batches = iter(loader)
    for _ in range(4):
        given.append(next(batches))
        if trains:
            torch.rand(5)
    place = json.loads(json.dumps(loader.position(unseen).to_json()))
    torch.manual_seed(99)
    again = make()
    again.load_state_dict(place)
    batches = iter(again)
    assert [next(batches) for _ in range(unseen)] == given[4 - unseen :]


@pytest.mark.parametrize("unseen", [1, 2])
def test_a_batch_that_was_made_again_and_not_used_is_made_again_once_more(unseen):
    """Resumed, and stopped before that batch was trained on: the next resume gives the same one."""
    torch.manual_seed(3)
    loader = make()
    batches = iter(loader)
    given = [next(batches) for _ in range(4)]
    for back in (unseen, 1):
        place = json.loads(json.dumps(loader.position(back).to_json()))
        torch.manual_seed(99 + back)
        loader = make()
        loader.load_state_dict(place)
        assert next(iter(loader)) == given[4 - unseen]


def test_a_place_that_is_pending_keeps_what_is_to_be_made_again():
    """Loaded and saved again before its first batch: nothing of it is lost."""
    torch.manual_seed(3)
    loader = make()
    batches = iter(loader)
    for _ in range(4):
        next(batches)
        torch.rand(5)
    place = loader.position(2).to_json()
    again = make()
    again.load_state_dict(place)
    assert json.dumps(again.position().to_json()) == json.dumps(place)


def test_what_looks_at_a_batch_while_another_iteration_trains_has_no_part_in_the_place():
    """Where a framework tells which iterators train: the place is theirs, before and after the look."""
    loader = resumable(DataLoader(range(12), batch_size=2, collate_fn=list))
    trains = iter(loader)
    loader.reading = lambda: (trains,)
    assert next(trains) == [0, 1]
    place = loader.state_dict()
    assert next(iter(loader)) == [0, 1]
    assert loader.state_dict() == place
    assert next(trains) == [2, 3]


def test_a_look_that_takes_from_a_stream_is_warned_of_once(caplog):
    """A stream read in this process has one place for all who read it: what a look takes, training is not given."""

    class Lines(IterableDataset):
        def __iter__(self):
            return iter(range(12))

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            raise AssertionError(state)

    loader = resumable(DataLoader(Lines(), batch_size=2))
    trains = iter(loader)
    loader.reading = lambda: (trains,)
    next(trains)
    for _ in range(2):
        next(iter(loader))
    (record,) = caplog.records
    assert "DataLoader over Lines: what is read of its stream beside training is missing" in record.getMessage()


class Training:
    """A framework's object."""


def test_a_loader_that_a_framework_reads_goes_to_another_process():
    """What tells which iterators train stays here: it names objects of this process."""
    loader, training = resumable(DataLoader(range(6))), Training()
    loader.reading = weakref.ref(training)
    assert pickle.loads(pickle.dumps(loader)).reading is None


def test_the_place_behind_an_epoch_left_for_good_is_that_of_the_next_one():
    """The sampler has been told of the next epoch by then, and a resume begins that one."""

    class Told(torch.utils.data.RandomSampler):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

    sampler = Told(range(6))
    loader = resumable(DataLoader(range(6), sampler=sampler))
    next(iter(loader))
    sampler.set_epoch(1)
    left = loader.left()
    assert (left.begun, left.epoch, left.sampler_epoch) == (False, 1, 1)
