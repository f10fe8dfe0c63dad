"""A resume in mid-epoch is exact, whatever prepared the loader."""

import contextlib
import random
import weakref

import accelerate
import numpy
import pytest
import torch
from accelerate.utils import DataLoaderConfiguration

from accelerate_runs import (
    CONFIG,
    Counter,
    Training,
    forget,
    fresh,
    make,
    registered,
    stateful,
)
from safe_ckpt.accelerate import register
from safe_ckpt.accelerate.dataloaders import Placed, count
from safe_ckpt.data import resumable
from safe_ckpt.errors import (
    NoValidCheckpointError,
)


@pytest.fixture(autouse=True)
def _alone():
    with fresh():
        yield


class Drawing(torch.utils.data.Dataset):
    """Draws from every generator while a batch is fetched."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        noise = torch.rand(1) + random.random() + numpy.random.rand()
        return (torch.full((4,), float(index)) + noise.float(),)


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("at", [1, 3, 5, 6, 8, 12])
@pytest.mark.parametrize("plain", [True, False])
def test_a_resume_in_mid_epoch_is_exact(tmp_path, seedable, at, plain):
    """From any step, also in the first epoch and at the end of one: the same batches, random numbers and bits."""
    config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=seedable)

    def run(folder, *, stops):
        with registered(folder, dataloader_config=config) as (accelerator, _):
            training = Training(accelerator, data=None if plain else Drawing())
            if not stops:
                training.scramble()
                with contextlib.suppress(NoValidCheckpointError):
                    accelerator.load_state()

            def after(count):
                if count == at:
                    accelerator.save_state()
                    if stops == "there":
                        raise KeyboardInterrupt

            with contextlib.suppress(KeyboardInterrupt):
                for epoch in range(training.counter.count // 6, 3):
                    if plain:
                        training.loader.set_epoch(epoch)
                    training.epoch(after)
            found = training.counter.count, training.fingerprint()
        forget()
        return found

    straight = run(tmp_path / "straight", stops="never")
    assert run(tmp_path / "broken", stops="there")[0] == at
    assert run(tmp_path / "broken", stops=None) == straight


def batches_until_saved(accelerator, loader, stop):
    """So many batches, over as many epochs as that takes, and a save behind the last one."""
    seen = []
    while len(seen) < stop:
        for (batch,) in loader:
            seen.append(batch.tolist())
            if len(seen) == stop:
                accelerator.save_state()
                break
    return seen


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("at", [1, 5])
def test_a_resume_with_a_worker_has_the_order_of_the_epoch(tmp_path, at, seedable):
    """In the first epoch, whose order a worker may have asked for before the loader was watched, and in the second one."""
    config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=seedable)

    def run(folder, *, stop, resumes=False):
        with registered(folder, dataloader_config=config) as (accelerator, _):
            torch.manual_seed(3)
            data = torch.utils.data.TensorDataset(torch.arange(12.0))
            loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=1))
            if resumes:
                accelerator.load_state()
            seen = batches_until_saved(accelerator, loader, stop)
        forget()
        return seen

    straight = run(tmp_path / "straight", stop=6)
    assert run(tmp_path / "broken", stop=at) == straight[:at]
    left = -at % 3
    assert run(tmp_path / "broken", stop=left, resumes=True) == straight[at : at + left]


@pytest.mark.parametrize("torchdata", [False, True], ids=["resumable", "torchdata"])
@pytest.mark.quick
def test_a_seedable_sampler_goes_on_with_its_seed(tmp_path, torchdata):
    """A script that begins with another seed gets the rest of the epoch, and the next one, of the run that was saved."""
    config = DataLoaderConfiguration(use_stateful_dataloader=torchdata, use_seedable_sampler=True)

    def run(folder, *, seed, stop, resumes=False):
        with registered(folder, dataloader_config=config) as (accelerator, _):
            torch.manual_seed(seed)
            data = torch.utils.data.TensorDataset(torch.arange(12.0))
            loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
            loader = accelerator.prepare(loader if torchdata else resumable(loader))
            if resumes:
                accelerator.load_state()
            seen = batches_until_saved(accelerator, loader, stop)
        forget()
        return seen

    straight = run(tmp_path / "straight", seed=3, stop=6)
    assert run(tmp_path / "broken", seed=3, stop=1) == straight[:1]
    assert run(tmp_path / "broken", seed=4, stop=5, resumes=True) == straight[1:]


@pytest.mark.parametrize("where", ["in the last step", "behind the loop"])
@pytest.mark.quick
def test_a_save_at_an_epochs_end_has_the_number_of_the_next_one(tmp_path, where):
    """A stateful loader: the next epoch after a resume has the order, and the number, that it would have had."""
    config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)

    def run(folder, epochs, *, saves=False, resumes=False):
        with registered(folder, dataloader_config=config) as (accelerator, _):
            torch.manual_seed(3)
            data = torch.utils.data.TensorDataset(torch.arange(12.0))
            loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
            if resumes:
                accelerator.load_state()
            seen = []
            for _ in range(epochs):
                for number, (batch,) in enumerate(loader, 1):
                    seen.append(batch.tolist())
                    if saves and number == 3 and where == "in the last step":
                        accelerator.save_state()
                if saves and where == "behind the loop":
                    accelerator.save_state()
            found = seen, loader.iteration
        forget()
        return found

    straight, number = run(tmp_path / "straight", 4)
    before, _ = run(tmp_path / "broken", 2, saves=True)
    after, then = run(tmp_path / "broken", 2, resumes=True)
    assert (before + after, then) == (straight, number)
    assert straight[:3] != straight[6:9]


def trained(held=0):
    """A shuffled loader of three batches as a Trainer has it, and its place."""
    accelerator = make(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    torch.manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.arange(12.0))
    loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
    assert count(loader, None, held)
    return loader, Placed(loader, between=True)


@pytest.mark.parametrize("held", [0, 1, 2])
@pytest.mark.parametrize("at", [2, 3])
@pytest.mark.quick
def test_a_place_in_the_last_step_has_the_number_of_the_next_epoch_under_a_trainer(at, held):
    """Which knows a place behind the last batch as one between two epochs: the next one has the order of the next one.

    Batches that are held by a step which is not done are given again, in the order of their own epoch.
    """
    loader, place = trained(held)
    states, straight = [], []
    for _ in range(2):
        for (batch,) in loader:
            straight.append(batch.tolist())
            states.append(place.state(held))
    again, other = trained(held)
    other.resume(states[at - 1])
    after = [batch.tolist() for _ in range(2 - (at - held) // 3) for (batch,) in again]
    assert straight[: at - held] + after == straight
    assert again.iteration == loader.iteration


def test_a_watched_loader_keeps_no_batch_that_the_loop_let_go(tmp_path):
    """A watched loader keeps no reference to a batch that the loop has let go of."""
    made = []

    class Batch:
        pass

    def collate(samples):
        batch = Batch()
        made.append(weakref.ref(batch))
        return batch

    with registered(tmp_path, dataloader_config=stateful()) as (accelerator, _):
        loader = accelerator.prepare(torch.utils.data.DataLoader(Drawing(), batch_size=2, collate_fn=collate))
        batches = iter(loader.base_dataloader.__iter__())  # as Accelerate calls it
        assert isinstance(next(batches), Batch)
        assert [batch() for batch in made] == [None]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.quick
def test_a_loader_prepared_by_two_accelerators_resumes_exactly(tmp_path, order):
    """One saves in mid-epoch where the other has resumed, and the resume is exact; both gone, the loader is as it was."""

    def run(folder, *, load=None, save=(None, 0)):
        with fresh():
            both = [make(folder / name, dataloader_config=stateful()) for name in ("one", "other")]
            handles = [register(accelerator, CONFIG) for accelerator in both]
            training = Training(both[0])
            parts = (training.model, training.head, training.optimizer, training.other, training.scheduler)
            assert both[1].prepare(*parts, training.loader)[-1] is training.loader
            both[1].register_for_checkpointing(training.counter)
            if load is not None:
                training.scramble()
                both[load].load_state()

            losses = []
            with contextlib.suppress(KeyboardInterrupt):
                for epoch in range(training.counter.count // 6, 2):
                    training.loader.set_epoch(epoch)
                    for batch in training.loader:
                        losses.append(training.step(batch))
                        if save == (training.counter.count, save[1]):
                            both[save[1]].save_state()
                            raise KeyboardInterrupt
            for number in order:
                handles[number].remove()
            assert "__iter__" not in vars(training.loader.base_dataloader)
            return losses

    straight = run(tmp_path / "straight")
    assert run(tmp_path / "broken", save=(2, 0)) == straight[:2]
    assert run(tmp_path / "broken", load=0, save=(4, 1)) == straight[2:4]
    assert run(tmp_path / "broken", load=1) == straight[4:]


PLAIN = {
    "generator": ({}, {}, True),
    "generator, dispatched": ({"dispatch_batches": True}, {}, True),
    "generator, workers stay": ({}, {"num_workers": 1, "persistent_workers": True}, True),
    "seedable": ({"use_seedable_sampler": True}, {}, False),
    "workers stay": ({}, {"num_workers": 1, "persistent_workers": True}, False),
}


def plain_epochs(folder, case, *, stop=None, where="behind", skips=None, stays=False):
    """The batches of a loader that knows no place, and the generators at the end; three epochs of three batches.

    A script that ``stays`` in an epoch behind its last step leaves out all of its batches.
    """
    how, loading, generator = PLAIN[case]
    with registered(folder, dataloader_config=DataLoaderConfiguration(**how)) as (accelerator, _):
        torch.manual_seed(3)
        own = torch.Generator().manual_seed(4) if generator else None
        data = torch.utils.data.TensorDataset(torch.arange(12.0))
        loader = accelerator.prepare(torch.utils.data.DataLoader(data, 4, shuffle=True, generator=own, **loading))
        at = Counter()
        accelerator.register_for_checkpointing(at)
        with contextlib.suppress(NoValidCheckpointError):
            accelerator.load_state()
        seen, first, skip = [], at.count // 3, at.count % 3
        if stays and at.count and not skip:
            first, skip = first - 1, 3
        for epoch in range(first, 3):
            batches = skips(accelerator, loader, skip) if epoch == first and skip else loader
            for (batch,) in batches:
                seen.append(batch.tolist())
                at.count += 1
                if where == "within" and at.count == stop:
                    accelerator.save_state()
                    break
            if where == "behind" and at.count == stop:
                accelerator.save_state()
            if at.count == stop:
                break
        found = seen, torch.get_rng_state().tolist() if where == "behind" else None
    forget()
    return found


@pytest.mark.parametrize("case", PLAIN)
@pytest.mark.quick
def test_a_loader_that_knows_no_place_goes_on_with_the_next_epoch(tmp_path, case):
    """Saved between two: in the order, and with the random numbers, that it would have had."""
    straight, end = plain_epochs(tmp_path / "straight", case)
    assert straight[:3] != straight[3:6] != straight[6:]
    seen = []
    for stop in (3, 6, None):
        more, then = plain_epochs(tmp_path / "broken", case, stop=stop)
        seen += more
    assert (seen, then) == (straight, end)


def by_method(accelerator, *args):
    return accelerator.skip_first_batches(*args)


def by_function(_, *args):
    return accelerate.skip_first_batches(*args)


@pytest.mark.parametrize(
    ("case", "skips", "stays"),
    [
        ("generator", by_method, True),
        ("generator", by_function, False),
        ("generator, dispatched", by_method, False),  # Accelerate raises where no batch is left
        ("seedable", by_method, False),
        ("seedable", by_function, True),
    ],
)
@pytest.mark.quick
def test_a_script_that_leaves_batches_out_gets_the_order_of_that_epoch(tmp_path, case, skips, stays):
    """With the method or the function: twice in one epoch, in its last step, and the epochs behind it."""
    straight, _ = plain_epochs(tmp_path / "straight", case)
    seen = []
    for stop in (4, 5, 6, 8, None):
        seen += plain_epochs(tmp_path / "broken", case, stop=stop, where="within", skips=skips, stays=stays)[0]
    assert seen == straight


@pytest.mark.quick
def test_an_evaluation_that_was_left_is_not_in_the_order_of_its_last_time(tmp_path):
    """Of a loader that knows no place, with a generator of its own: the next one is drawn as it would have been."""

    def run(folder, times):
        with registered(folder) as (accelerator, _):
            own = torch.Generator().manual_seed(4)
            data = torch.utils.data.TensorDataset(torch.arange(12.0))
            loader = accelerator.prepare(torch.utils.data.DataLoader(data, 2, shuffle=True, generator=own))
            with contextlib.suppress(NoValidCheckpointError):
                accelerator.load_state()
            seen = [next(iter(loader))[0].tolist() for _ in range(times)]
            accelerator.save_state()
        forget()
        return seen

    assert run(tmp_path / "a", 1) + run(tmp_path / "a", 2) == run(tmp_path / "b", 3)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.quick
def test_a_stateful_loader_that_was_not_read_yet_draws_as_it_would_have(tmp_path, workers):
    """Its first epoch behind a resume: the order, and the random numbers behind it."""

    def run(folder, *, stops):
        with registered(folder, dataloader_config=stateful()) as (accelerator, _):
            torch.manual_seed(3)
            data = torch.utils.data.TensorDataset(torch.arange(12.0))
            loader = accelerator.prepare(torch.utils.data.DataLoader(data, 4, shuffle=True, num_workers=workers))
            torch.rand(1)
            with contextlib.suppress(NoValidCheckpointError):
                accelerator.load_state()
            if stops:
                accelerator.save_state()
            found = [batch.tolist() for (batch,) in loader], torch.rand(1)
        forget()
        return found

    assert run(tmp_path, stops=True) == run(tmp_path, stops=False)
