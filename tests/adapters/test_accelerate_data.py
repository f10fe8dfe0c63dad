"""resumable(loader) under Accelerate: a stock DataLoader goes on where it was, whatever Accelerate makes of it."""

import contextlib
import json
import logging
from pathlib import Path

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from accelerate_launch import run as run_ranks
from drawn_samples import SIZE, Drawing, Placed, Stream
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from accelerate_runs import Counter, Training, forget, fresh, make, registered
from safe_ckpt.data import resumable
from safe_ckpt.errors import NoValidCheckpointError, RestoreError

PER_EPOCH = 6


@pytest.fixture(autouse=True)
def _alone():
    with fresh():
        yield


class Plain(Drawing):
    def __getitem__(self, index):
        return (torch.full((4,), float(index)),)


def batches():
    return BatchSampler(RandomSampler(range(SIZE)), 4, drop_last=False)


CASES = {
    "shuffle": ({}, {}, resumable),
    "in order": ({"shuffle": False}, {}, resumable),
    "nothing drawn": ({"data": Plain, "shuffle": False}, {}, resumable),
    "workers": ({"num_workers": 2}, {}, resumable),
    "workers that stay": ({"num_workers": 2, "persistent_workers": True}, {}, resumable),
    "seedable": ({}, {"use_seedable_sampler": True}, resumable),
    "batches of its own": ({"batch_sampler": batches, "shuffle": False, "batch_size": 1}, {}, resumable),
    "stream": ({"data": Placed, "shuffle": False}, {}, resumable),
    "stream that is read again": (
        {"data": Stream, "shuffle": False},
        {},
        lambda loader: resumable(loader, skip="read"),
    ),
    "dispatched": ({}, {"dispatch_batches": True}, resumable),
    "dispatched stream": ({"data": Placed, "shuffle": False}, {"dispatch_batches": True}, resumable),
}


def run(folder, case, *, stop_at=None, skips=False, skip=None):
    loading, how, wrap = CASES[case]
    loading = {name: value() if name in ("data", "batch_sampler") else value for name, value in loading.items()}
    loading.setdefault("data", Drawing())
    with registered(folder, dataloader_config=DataLoaderConfiguration(**how)) as (accelerator, _):
        training = Training(accelerator, wrap=wrap, **loading)
        with contextlib.suppress(NoValidCheckpointError):
            accelerator.load_state()
        begun = training.counter.count

        def after(count):
            if count == stop_at:
                accelerator.save_state()
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            # A script saves the number of its epoch, or counts steps and says how many to skip.
            first = begun // PER_EPOCH if skips else max(begun - 1, 0) // PER_EPOCH
            for epoch in range(first, 3):
                whole = training.loader
                if skips and epoch == first:
                    training.loader = accelerator.skip_first_batches(whole, begun % PER_EPOCH if skip is None else skip)
                training.epoch(after)
                training.loader = whole
        found = training.seen, training.fingerprint()
    forget()
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_resume_within_an_epoch_is_exact(tmp_path, case):
    """At places in each epoch, also at its last batch: the samples, what was drawn for them, generators and weights."""
    seen, end = run(tmp_path / "whole", case)
    assert len(seen) == 3 * PER_EPOCH
    for place in (1, 4, 5, 6, 9, 17):
        folder = tmp_path / str(place)
        before, _ = run(folder, case, stop_at=place)
        after, found = run(folder, case)
        assert json.dumps(before + after) == json.dumps(seen), place
        assert found == end


def documented(folder, case, stop_at=None, *, numbered=False, epochs=2):
    """The loop of docs/data.md: the number of the epoch is saved, and the loop begins with it."""
    loading, how, wrap = CASES[case]
    loading = {name: value() if name in ("data", "batch_sampler") else value for name, value in loading.items()}
    loading.setdefault("data", Drawing())
    with registered(folder, dataloader_config=DataLoaderConfiguration(**how)) as (accelerator, _):
        training, epoch_number = Training(accelerator, wrap=wrap, **loading), Counter()
        accelerator.register_for_checkpointing(epoch_number)
        with contextlib.suppress(NoValidCheckpointError):
            accelerator.load_state()

        def after(count):
            if count == stop_at:
                accelerator.save_state()
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            for epoch in range(epoch_number.count, epochs):
                epoch_number.count = epoch
                if numbered:
                    training.loader.set_epoch(epoch)
                training.epoch(after)
        found = training.seen, training.fingerprint(), training.loader.iteration
    forget()
    return found


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("case", ["shuffle", "workers that stay", "seedable", "stream", "dispatched"])
def test_the_last_step_of_an_epoch_belongs_to_that_epoch(tmp_path, case, numbered):
    """As without Accelerate: the loop that begins with the saved number trains each epoch once, from any step."""
    whole = documented(tmp_path / "whole", case, numbered=numbered)
    assert len(whole[0]) == 2 * PER_EPOCH
    for place in (4, PER_EPOCH, 2 * PER_EPOCH):
        before, _, _ = documented(tmp_path / str(place), case, place, numbered=numbered)
        after = documented(tmp_path / str(place), case, numbered=numbered)
        assert (json.dumps(before + after[0]), *after[1:]) == (json.dumps(whole[0]), *whole[1:]), place


def test_a_place_loaded_before_its_loader_is_prepared_is_used_or_refused(tmp_path):
    """A loader that is prepared after the load goes there; one that knows no place is named, and nothing is restored."""
    seen, _ = run(tmp_path / "whole", "nothing drawn")
    run(tmp_path / "x", "nothing drawn", stop_at=PER_EPOCH + 2)
    with registered(tmp_path / "x") as (accelerator, _):
        training = Training(accelerator, data=Plain(), shuffle=False)
        before = training.fingerprint()
        with pytest.raises(RestoreError, match=r"DataLoaderShard over Plain.*resumable\(loader\)"):
            accelerator.load_state()
        assert training.fingerprint() == before
        accelerator._dataloaders.clear()
        accelerator.load_state()
        training.loader = accelerator.prepare(resumable(DataLoader(Plain(), batch_size=4)))
        training.epoch()
        assert training.seen == seen[PER_EPOCH + 2 : 2 * PER_EPOCH]


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.quick
def test_loaders_prepared_after_the_load_go_to_their_own_places(tmp_path, early):
    """Several of them, in the order in which they are prepared, whether another one was prepared before the load or not."""

    def prepared(accelerator, first):
        data = TensorDataset(torch.arange(first, first + 12))
        return accelerator.prepare(resumable(DataLoader(data, batch_size=2)))

    places = {0: 1, 100: 4, 200: 2}
    with registered(tmp_path) as (accelerator, _):
        loops = {first: iter(prepared(accelerator, first)) for first in places}
        for first, count in places.items():
            assert [next(loops[first])[0][0].item() for _ in range(count)][-1] == first + 2 * count - 2
        accelerator.save_state()
    forget()
    with registered(tmp_path) as (accelerator, _):
        loaders = [prepared(accelerator, first) for first in list(places)[:early]]
        accelerator.load_state()
        loaders += [prepared(accelerator, first) for first in list(places)[early:]]
        found = [next(iter(loader))[0].tolist() for loader in loaders]
    assert found == [[first + 2 * count, first + 2 * count + 1] for first, count in places.items()]


@pytest.mark.quick
def test_a_loop_that_begins_with_the_next_epoch_says_so(tmp_path, caplog):
    """With set_epoch it trains that epoch. Without, the loop is the rest of the epoch that was saved, and a warning says so."""
    seen, _ = run(tmp_path / "whole", "nothing drawn")
    run(tmp_path / "x", "nothing drawn", stop_at=PER_EPOCH)
    with registered(tmp_path / "x") as (accelerator, _), caplog.at_level(logging.WARNING, "safe_ckpt"):
        training = Training(accelerator, wrap=resumable, data=Plain(), shuffle=False)
        for numbered, given in ((True, PER_EPOCH), (False, 0)):
            accelerator.load_state()
            training.seen.clear()
            if numbered:
                training.loader.set_epoch(1)
            training.epoch()
            assert training.seen == seen[:given]
    assert ["gives no batch" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("place", [9, PER_EPOCH])
def test_scripts_that_skip_batches_stay_as_they_are(tmp_path, place, caplog):
    """skip_first_batches to the place where the loader is anyway skips nothing twice, also where that is the next epoch."""
    seen, end = run(tmp_path / "whole", "workers")
    before, _ = run(tmp_path / "x", "workers", stop_at=place)
    with caplog.at_level(logging.WARNING, "safe_ckpt"):
        after, found = run(tmp_path / "x", "workers", skips=True)
    assert json.dumps(before + after) == json.dumps(seen)
    assert found == end
    assert not caplog.records


@pytest.mark.parametrize("skip", [0, pytest.param(2, marks=pytest.mark.quick), 4])
def test_a_script_that_skips_another_number_gets_what_it_asks_for(tmp_path, caplog, skip):
    """Its number counts, as with a stock loader: that many batches are left out, and a warning says so."""
    seen, _ = run(tmp_path / "whole", "nothing drawn")
    run(tmp_path / "x", "nothing drawn", stop_at=PER_EPOCH + 3)
    with caplog.at_level(logging.WARNING, "safe_ckpt"):
        after, _ = run(tmp_path / "x", "nothing drawn", skips=True, skip=skip)
    assert after[: PER_EPOCH - skip] == seen[PER_EPOCH + skip : 2 * PER_EPOCH]
    assert [f"skip_first_batches({skip})" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.quick
def test_a_loader_that_does_not_know_its_place_is_named(tmp_path, caplog):
    """At the first save within an epoch, once, with the remedy; never between epochs."""
    with registered(tmp_path) as (accelerator, _):
        training = Training(accelerator)
        with caplog.at_level(logging.WARNING, "safe_ckpt"):
            accelerator.save_state()
            assert not caplog.records
            training.epoch(lambda _: accelerator.save_state())
    (said,) = [record.getMessage() for record in caplog.records]
    assert "over TensorDataset" in said
    assert "resumable(loader)" in said


EVEN = {
    "as it is": ({}, {}),
    "workers": ({}, {"num_workers": 1}),
    "seedable": ({"use_seedable_sampler": True}, {}),
    "split": ({"split_batches": True}, {}),
    "not even": ({"even_batches": False}, {"drop_last": True}),
    "dispatched": ({"dispatch_batches": True}, {"drop_last": True}),
    "dispatched, split": ({"dispatch_batches": True, "split_batches": True}, {"drop_last": True}),
    "dispatched, left out": ({"dispatch_batches": True}, {"drop_last": True, "leaves out": True}),
    "dispatched, split, left out": (
        {"dispatch_batches": True, "split_batches": True},
        {"drop_last": True, "leaves out": True},
    ),
    "dispatched stream": ({}, {"data": "stream", "shuffle": False, "drop_last": True}),
    "stream": ({"dispatch_batches": False}, {"data": "blind", "shuffle": False, "skip": "read", "drop_last": True}),
}


@pytest.mark.parametrize(
    "case",
    [
        name
        if name in ("as it is", "dispatched stream", "dispatched, split, left out")
        else pytest.param(name, marks=pytest.mark.thorough)
        for name in EVEN
    ],
)
def test_two_ranks_go_on_with_their_own_batches(tmp_path, case):
    """Two ranks, as Accelerate shares batches out: each rank's samples and what was drawn for them.

    Also where the script says how many to leave out, and only the main process has a place.
    """
    how, loading = map(json.dumps, EVEN[case])
    whole = run_ranks(tmp_path, "stops_among_its_batches", tmp_path / "whole", how, loading, 0)
    for stop in (1, 3) if "left out" in case else (2, 4):  # an epoch has two steps
        folder = tmp_path / str(stop)
        before = run_ranks(tmp_path, "stops_among_its_batches", folder, how, loading, stop)
        after = run_ranks(tmp_path, "stops_among_its_batches", folder, how, loading, 0)
        for rank in (0, 1):
            seen = json.loads(before[rank][0]) + json.loads(after[rank][0])
            assert seen == json.loads(whole[rank][0]), (case, stop, rank)
            assert after[rank][1] == whole[rank][1]


def accumulating(folder, saved_at, stop_at=None):
    """Two epochs of six batches, with a step of the optimizer after each second batch."""
    with registered(folder, gradient_accumulation_steps=2) as (accelerator, _):
        training = Training(accelerator, data=Plain(), shuffle=False, wrap=resumable)
        model = training.model
        with contextlib.suppress(NoValidCheckpointError):
            accelerator.load_state()
        for _ in range(training.counter.count // PER_EPOCH, 2):
            for (rows,) in training.loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(rows).pow(2).mean())
                    training.optimizer.step()
                    training.optimizer.zero_grad()
                training.counter.count += 1
                if training.counter.count in saved_at:
                    accelerator.save_state()
                if training.counter.count == stop_at:
                    break
            if training.counter.count == stop_at:
                break
        found = training.fingerprint()
    forget()
    return found


@pytest.mark.quick
def test_a_save_within_an_accumulation_window_is_warned_of_once(tmp_path, caplog):
    """It lacks gradients, as with stock Accelerate, and the resume differs. One at a step of the optimizer is exact."""
    whole = accumulating(tmp_path / "whole", ())
    accumulating(tmp_path / "between", (2, 8), 8)
    assert accumulating(tmp_path / "between", ()) == whole
    assert "sync_gradients" not in caplog.text
    accumulating(tmp_path / "within", (3, 5, 9), 9)
    (warning,) = [one for one in caplog.records if "sync_gradients" in one.getMessage()]
    assert warning.levelno == logging.WARNING
    assert "checkpoint_0 lacks the gradients" in warning.getMessage()
    assert accumulating(tmp_path / "within", ()) != whole


@pytest.mark.quick
def test_a_checkpoint_without_the_generators_of_a_rank_says_so(tmp_path, caplog):
    """As one of fewer ranks, or a stock one: what is there is loaded, and this rank does not continue exactly."""
    stock = Training(make(tmp_path))
    saved = Path(stock.accelerator.save_state())
    expected = [one.clone() for one in stock.net.state_dict().values()]
    forget()
    with registered(tmp_path) as (accelerator, _), caplog.at_level(logging.WARNING, "safe_ckpt"):
        training = Training(accelerator, number=5)
        for lost in (False, True):
            if lost:
                (saved / "random_states_0.pkl").unlink()
            training.scramble()
            caplog.clear()
            accelerator.load_state(saved)
            assert all(map(torch.equal, training.net.state_dict().values(), expected))
            assert caplog.text.count("holds no random state of rank 0: it does not continue exactly there") == lost
