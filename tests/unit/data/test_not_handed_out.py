"""A batch that nobody was given was not trained on: after a resume it is made again."""

import json
import os
import signal
import time

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from safe_ckpt.data import resumable
from safe_ckpt.errors import RestoreError

SIZE, BAD = 24, 13
pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]


class Failing(Dataset):
    """Something happens to what makes sample 13, as long as a file is there."""

    def __init__(self, folder, what):
        self.file, self.what = folder / "fails", what
        self.file.touch()

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        drawn = torch.rand(()).item()
        if index == BAD and self.file.exists():
            if self.what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what in ("interrupted", "bad"):
                raise KeyboardInterrupt if self.what == "interrupted" else OSError("bad")
            while self.file.exists():  # a loader that waits for this comes to the end of its time
                time.sleep(0.01)
        return index, drawn


class Stream(IterableDataset):
    """The same as a stream that knows its place."""

    def __init__(self, folder, what):
        self.rows, self.at = Failing(folder, what), 0

    def __iter__(self):
        while self.at < SIZE:
            self.at += 1
            yield self.rows[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Raising(Sampler):
    """Fails at an index, as long as a file is there."""

    def __init__(self, folder):
        self.file = folder / "fails"
        self.file.touch()

    def __len__(self):
        return SIZE

    def __iter__(self):
        for index in range(SIZE):
            if index == BAD and self.file.exists():
                raise OSError("bad")
            yield index


def resumed(make, state):
    loader = make()
    loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def until_it_fails(loader, inside):
    """What was given, and the place: while the error is handled, or after that."""
    seen = []
    try:
        seen.extend(loader)
    except (OSError, RuntimeError, KeyboardInterrupt):
        state = loader.state_dict() if inside else None
    return seen, state or loader.state_dict()


FAILURES = {
    "killed worker": (Failing, "killed", {"num_workers": 1}, False),
    "killed worker, others": (Failing, "killed", {"num_workers": 2, "persistent_workers": True}, True),
    "killed worker of a stream": (Stream, "killed", {"num_workers": 1}, True),
    "time is up": (Failing, "stalled", {"num_workers": 1, "timeout": 1}, True),
    "time is up, batches ahead": (Failing, "stalled", {"num_workers": 2, "timeout": 1, "prefetch_factor": 3}, False),
    "time of a stream is up": (Stream, "stalled", {"num_workers": 1, "timeout": 1}, False),
    "bad sample": (Failing, "bad", {}, True),
    "bad sample of a stream": (Stream, "bad", {}, True),
    "bad sample, worker": (Failing, "bad", {"num_workers": 1}, True),
    "Ctrl-C": (Failing, "interrupted", {}, False),
    "Ctrl-C, handled here": (Stream, "interrupted", {}, True),
}


RARE = ("time is up", "time of a stream is up")  # torch takes 5 s to end their workers


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] if name in RARE else []) for name in FAILURES]
)
def test_a_batch_that_nobody_was_given_comes_after_a_resume(tmp_path, name):
    """A killed worker, a timeout, Ctrl-C, a bad sample whose error is not handled yet: nothing is left out, or comes twice."""
    kind, what, loading, inside = FAILURES[name]
    data = kind(tmp_path, what)

    def make():
        return resumable(DataLoader(data, batch_size=4, collate_fn=list, **loading))

    loader = make()
    seen, state = until_it_fails(loader, inside)
    assert len(seen) == 3 or what == "killed"  # then torch may give up before
    (tmp_path / "fails").unlink()
    rest = list(resumed(make, state))
    assert [index for batch in [*seen, *rest] for index, _ in batch] == list(range(SIZE))


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("batched", [True, False])
def test_batches_in_flight_when_a_sampler_raises_come_after_a_resume(tmp_path, workers, batched):
    """Workers were given indices ahead, and torch drops the batch in its hand: it comes after the resume."""

    def make():
        sampler = Raising(tmp_path)
        how = {"batch_sampler": Batched(sampler, 4, False)} if batched else {"sampler": sampler, "batch_size": 4}
        ahead = {0: None, 1: 2, 2: 1}[workers]
        return resumable(DataLoader(range(SIZE), collate_fn=list, num_workers=workers, prefetch_factor=ahead, **how))

    seen, state = until_it_fails(make(), False)
    (tmp_path / "fails").unlink()
    fresh = resumed(make, state)
    (tmp_path / "fails").unlink()
    assert [index for batch in [*seen, *fresh] for index in batch] == list(range(SIZE))


@pytest.mark.parametrize("how", ["as it is", "as another", "from it", "from none"])
def test_a_batch_is_not_left_out_while_its_error_is_on_its_way_up(tmp_path, how):
    """A loop may raise an error of its own instead: a save on the way out is one before that batch."""
    data = Failing(tmp_path, "bad")

    def make():
        return resumable(DataLoader(data, batch_size=4, collate_fn=list))

    def train(loader, seen):
        try:
            seen.extend(loader)
        except OSError as error:
            if how == "as it is":
                raise
            if how == "as another":
                raise RuntimeError("stopped")  # noqa: B904 - what a loop may do
            raise RuntimeError("stopped") from (error if how == "from it" else None)

    loader, seen = make(), []
    try:
        train(loader, seen)
    except (OSError, RuntimeError):
        state = loader.state_dict()
    (tmp_path / "fails").unlink()
    assert [index for batch in [*seen, *resumed(make, state)] for index, _ in batch] == list(range(SIZE))


class Batched(BatchSampler):
    """Not known by its type."""


def test_a_batch_given_after_a_timeout_counts_once(tmp_path):
    """A caller that asks again after a timeout is given that batch, and it counts once."""
    data = Failing(tmp_path, "stalled")

    def make(timeout):
        return resumable(DataLoader(data, batch_size=4, collate_fn=list, num_workers=1, timeout=timeout))

    loader = make(1)
    batches, seen = iter(loader), []
    with pytest.raises(RuntimeError, match="timed out"):
        seen.extend(batches)
    (tmp_path / "fails").unlink()
    seen.append(next(batches))
    state = loader.state_dict()
    seen += resumed(lambda: make(1), state)
    assert [index for batch in seen for index, _ in batch] == list(range(SIZE))


def test_a_place_that_is_loaded_within_a_loop_is_refused():
    """The loop would go on elsewhere: an error names the loader. A new loop begins at the place."""
    loader = resumable(DataLoader(range(8), batch_size=2, collate_fn=list))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    next(batches)
    loader.load_state_dict(state)
    with pytest.raises(RestoreError, match=r"DataLoader over range.*begin a new one"):
        next(batches)
    assert list(loader) == [[2, 3], [4, 5], [6, 7]]
