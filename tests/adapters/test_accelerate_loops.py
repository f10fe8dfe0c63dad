"""Which loops over loaders of Accelerate are places in their data, and which were left for good."""

import contextlib
import logging

import accelerate
import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset

from accelerate_runs import Counter, forget, fresh, registered
from safe_ckpt.data import resumable
from safe_ckpt.errors import NoValidCheckpointError, RestoreError

WORKERS = {"num_workers": 1, "persistent_workers": True}
KINDS = {
    "resumable": (False, {}),
    "resumable, workers stay": (False, WORKERS),
    "torchdata": (True, {}),
    "torchdata, workers stay": (True, WORKERS),
}


@pytest.fixture(autouse=True)
def _alone():
    with fresh():
        yield


class Program:
    """Trains on 6 batches an epoch; ``evaluate`` uses some of 6 others. ``save`` ends the program at a save."""

    def __init__(self, accelerator, handle, kind, stop):
        torchdata, loading = KINDS[kind]
        torch.manual_seed(3)
        net = torch.nn.Linear(1, 1)
        loaders = [
            DataLoader(TensorDataset(torch.arange(first, first + 12.0)[:, None]), 2, shuffle=shuffle, **loading)
            for first, shuffle in ((0, True), (100, False))
        ]
        loaders = loaders if torchdata else map(resumable, loaders)
        self.accelerator, self.handle, self.stop = accelerator, handle, stop
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        self.net, self.optimizer, self.train, self.other = accelerator.prepare(net, optimizer, *loaders)
        self.counter, self.steps, self.seen, self.saves = Counter(), Counter(), [], 0
        accelerator.register_for_checkpointing(self.counter, self.steps)
        with contextlib.suppress(NoValidCheckpointError):
            accelerator.load_state()

    def step(self, batch):
        self.seen.append(batch.flatten().tolist())
        self.accelerator.backward(self.net(batch).sum())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps.count += 1

    def evaluate(self, how):
        if how == "next":
            self.seen.append(next(iter(self.other))[0].flatten().tolist())
            return
        for number, (batch,) in enumerate(self.other):
            self.seen.append(batch.flatten().tolist())
            if number == 2:
                break

    def save(self):
        self.accelerator.save_state()
        self.saves += 1
        if self.saves == self.stop:
            raise KeyboardInterrupt


def run(folder, kind, program, stop=None):
    """What the program saw, and the optimizer's weights in the end."""
    config = DataLoaderConfiguration(use_stateful_dataloader=KINDS[kind][0])
    with registered(folder, dataloader_config=config) as (accelerator, handle):
        one = Program(accelerator, handle, kind, stop)
        with contextlib.suppress(KeyboardInterrupt):
            program(one)
        found = one.seen, [p.tolist() for p in one.net.parameters()], torch.get_rng_state().tolist()
    forget()
    return found


def same_after_a_resume(folder, kind, program, stops):
    whole = run(folder / "whole", kind, program)
    for stop in stops:
        before = run(folder / str(stop), kind, program, stop)[0]
        after = run(folder / str(stop), kind, program)
        assert (before + after[0], *after[1:]) == whole, stop


@pytest.mark.parametrize("how", ["break", "next"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_that_was_left_begins_at_its_beginning(tmp_path, kind, how):
    """By break or next(iter(loader)), within an epoch of training and behind one, before and after a resume."""

    def program(one):
        for epoch in range(one.counter.count, 2):
            for (batch,) in one.train:
                one.step(batch)
                if one.steps.count % 6 == 4:
                    one.evaluate(how)
                    one.save()
            one.counter.count = epoch + 1
            one.evaluate(how)
            one.save()

    same_after_a_resume(tmp_path, kind, program, (1, 2))


@pytest.mark.parametrize("kind", ["resumable", "torchdata"])
def test_an_evaluation_that_was_left_is_not_taken_for_the_training(tmp_path, kind):
    """With gradient accumulation, from the save on: the last step of the epoch is made, as after a resume."""

    def program(one):
        one.accelerator.gradient_accumulation_steps = 4
        for (batch,) in one.train:
            with one.accelerator.accumulate(one.net):
                one.step(batch)
            one.seen.append(one.accelerator.sync_gradients)
            if one.steps.count == 4:
                one.evaluate("break")
                one.save()
                one.save()

    same_after_a_resume(tmp_path, kind, program, (1, 2))
    assert run(tmp_path / "1", kind, lambda one: one.evaluate("next"))[0] == [[100.0, 101.0]]


@pytest.mark.parametrize("kind", ["resumable", "torchdata"])
def test_two_loaders_that_are_read_in_turn_keep_their_places(tmp_path, kind):
    """Zipped, and one by one from an iterator that the program holds."""

    def program(one):
        for _ in range(one.counter.count, 2):
            for (batch,), (other,) in zip(one.train, one.other, strict=True):
                one.step(batch + other)
                one.save()
            one.counter.count += 1

    same_after_a_resume(tmp_path, kind, program, (2, 4))


@pytest.mark.parametrize("how", ["break", "raise"])
@pytest.mark.parametrize("kind", ["resumable", "torchdata"])
def test_a_training_loop_that_was_broken_off_goes_on(tmp_path, kind, how):
    """By a signal, say, and saved behind the loop; also where it is broken off again before a step of the optimizer."""

    def epoch(one, stop, steps=True):
        for number, (batch,) in enumerate(one.train, 1):
            one.step(batch) if steps else one.seen.append(batch.flatten().tolist())
            if number == stop and how == "raise":
                raise InterruptedError
            if number == stop:
                break

    def broken_off(stop, steps):
        def program(one):
            with contextlib.suppress(InterruptedError):
                epoch(one, stop, steps)
            one.save()

        return program

    def straight(one):
        epoch(one, None)
        epoch(one, None)

    whole = run(tmp_path / "whole", kind, straight)[0]
    seen = []
    for stop, steps in ((2, True), (1, False), (1, True)):
        seen += run(tmp_path / "broken", kind, broken_off(stop, steps))[0]
    assert len(seen) == 4
    assert seen + run(tmp_path / "broken", kind, straight)[0] == whole


@pytest.mark.parametrize("kind", ["resumable", "torchdata"])
def test_a_place_that_was_loaded_and_saved_again_is_the_same(tmp_path, kind):
    """Before the first batch: in a new process, and in one that had gone on from there."""

    def straight(one):
        for _ in range(2):
            for (batch,) in one.train:
                one.step(batch)

    def stopped(one):
        for number, (batch,) in enumerate(one.train, 1):
            one.step(batch)
            if number == 2:
                one.accelerator.save_state()
            if number == 4:
                break
        one.accelerator.load_state()
        one.accelerator.save_state()

    whole = run(tmp_path / "whole", kind, straight)[0]
    run(tmp_path / "stopped", kind, stopped)
    run(tmp_path / "stopped", kind, lambda one: one.accelerator.save_state())
    assert run(tmp_path / "stopped", kind, straight)[0] == whole[2:]


@pytest.mark.parametrize("kind", ["resumable", "torchdata"])
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.quick
def test_the_place_that_was_loaded_last_counts(tmp_path, kind, number):
    """One behind the last batch of an epoch, loaded before it, leaves no batch out: of that epoch or the next."""

    def straight(one):
        for _ in range(2):
            for (batch,) in one.train:
                one.step(batch)
                if one.steps.count in (2, 6, 8):
                    one.save()

    def chosen(one):
        for name in (1, number):
            one.accelerator.load_state(str(tmp_path / f"checkpoints/checkpoint_{name}"))
        for (batch,) in one.train:
            one.step(batch)

    whole = run(tmp_path, kind, straight)[0]
    first = (2, 6, 8)[number]
    assert run(tmp_path, kind, chosen)[0] == whole[first : first + 4]


@pytest.mark.quick
def test_the_warning_within_an_epoch_names_its_loader(tmp_path, caplog):
    """By its number among those that were prepared. It does not come behind the last batch of an epoch."""
    with (
        registered(tmp_path) as (accelerator, handle),
        caplog.at_level(logging.WARNING, "safe_ckpt"),
    ):
        data = TensorDataset(torch.arange(8.0))
        other, train = accelerator.prepare(DataLoader(data, 4), DataLoader(data, 2))
        for epoch in (0, 1):
            for number, _ in enumerate(train):
                if epoch or number == 3:
                    accelerator.save_state()
            assert len(caplog.records) == epoch
    assert "loader 1 of those that were prepared, a DataLoaderShard over TensorDataset" in caplog.text
    assert len(other) == 2


def skipping(function):
    """A script that counts steps, and leaves out as many batches as it made in the epoch."""

    def program(one):
        for _ in range(one.counter.count, 2):
            loader, made = one.train, one.steps.count % 6
            if made:
                skip = accelerate.skip_first_batches if function else one.accelerator.skip_first_batches
                loader = skip(loader, made)
            for (batch,) in loader:
                one.step(batch)
                if one.steps.count == 4:
                    one.save()
            one.counter.count += 1

    return program


@pytest.mark.parametrize("kind", ["resumable", "torchdata", "torchdata, workers stay"])
def test_leaving_batches_out_of_a_loader_that_begins_at_its_place(tmp_path, kind):
    """The method leaves nothing out twice. The function, after which the next epoch would lack batches, is refused."""
    same_after_a_resume(tmp_path, kind, skipping(function=False), (1,))
    with pytest.raises(RestoreError, match=r"accelerator\.skip_first_batches"):
        run(tmp_path / "1", kind, skipping(function=True))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(8))


@pytest.mark.parametrize("dispatch", [False, True])
def test_the_function_that_skips_is_refused_for_streams_too(tmp_path, dispatch):
    """And for a loader that reads nothing of one that begins at a place, nothing changes."""
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    for again in (False, True):
        with registered(tmp_path, dataloader_config=config) as (accelerator, _):
            data = Stream()
            loader = accelerator.prepare(resumable(DataLoader(data, 2), skip="read"))
            if again:
                accelerator.load_state()
                with pytest.raises(RestoreError, match=r"accelerator\.skip_first_batches"):
                    next(iter(accelerate.skip_first_batches(loader, 1)))
                assert len(list(accelerator.prepare(DataLoader(data, 2)))) == 4
            for number, batch in enumerate(loader, 2 if again else 1):
                assert batch.tolist() == [2 * number - 2, 2 * number - 1]
                if number == 1:
                    accelerator.save_state()
                    break
        forget()


@pytest.mark.parametrize("last", [False, True])
def test_loaders_that_are_read_side_by_side_go_on_together(tmp_path, last):
    """zip leaves the second one before its end. No epoch is lost, whether the save was in the last step or behind the loop."""

    def program(one):
        for epoch in range(one.counter.count, 3):
            for (batch,), (other,) in zip(one.train, one.other, strict=False):
                one.step(batch + other)
                if last and one.steps.count % 6 == 0:
                    one.save()
            one.counter.count = epoch + 1
            if not last:
                one.save()

    same_after_a_resume(tmp_path, "resumable", program, (1, 2))
