"""A job is killed again and again at random moments: the samples that it trained on are those of a run without kills."""

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from kit.limits import PATIENT
from kit.ranks import spawn_ranks, values
from kit.thorough import THOROUGH
from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, Retention, RngState
from safe_ckpt.data import resumable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SIZE, EPOCHS, EVERY = 60, 3, 4
CONFIG = CheckpointConfig(
    retention=Retention(keep_last=2),
    timeouts=PATIENT,
)
FORK = (
    "fork"  # workers of a fork server outlive a killed rank: they watch the fork server, which lives as long as they do
)
KILLS = 5 if THOROUGH else 1


class Noisy(Dataset):
    """A number for each index, and noise that is drawn for it."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index, torch.tensor([float(index)]) + torch.rand(1), random.random()


def sampler_of(kind, rank, size):
    """None for ``shuffle``."""
    if kind == "distributed":
        return DistributedSampler(range(SIZE), num_replicas=size, rank=rank, seed=3)
    return {
        "in order": lambda: SequentialSampler(range(SIZE)),
        "replacement": lambda: RandomSampler(range(SIZE), replacement=True, num_samples=50),
        "weighted": lambda: WeightedRandomSampler([1.0 + index % 4 for index in range(SIZE)], 44),
        "shuffle": lambda: None,
    }[kind]()


def train(rank, size, folder, kind, workers, fatal):
    """The whole job, or up to a moment in a step. Each step is written down once it is done."""
    torch.manual_seed(5)
    random.seed(5)
    sampler = sampler_of(kind, rank, size)
    how = {"num_workers": workers, "multiprocessing_context": FORK if workers else None}
    loader = resumable(DataLoader(Noisy(), batch_size=3, sampler=sampler, shuffle=sampler is None, **how))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    # One place for all ranks where they share one order, unless workers of each rank draw on where they were.
    shared = loader if kind == "distributed" and not workers else PerRank(loader)
    state = {"model": model, "optimizer": optimizer, "data": shared, "rng": PerRank(RngState()), "epoch": 0}
    moment = threading.Event()
    threading.Thread(target=kill, args=(moment, fatal), daemon=True).start()
    with Checkpointer(folder, CONFIG) as ckpt, open(f"{folder}.{rank}", "a") as lines:
        info = ckpt.resume(state)
        step = info.step if info else 0
        for epoch in range(state["epoch"], EPOCHS):
            state["epoch"] = epoch
            if sampler is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            for indices, values_, noise in loader:
                step += 1
                if fatal is not None and step >= fatal[0]:
                    moment.set()
                loss = (model(values_) - noise.float().unsqueeze(1) - torch.rand(())).square().mean()
                optimizer.zero_grad()
                loss.backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                optimizer.step()
                drawn = [round(float(value), 9) for value in (*values_, *noise)]
                lines.write(json.dumps([step, epoch, indices.tolist(), drawn]) + "\n")
                lines.flush()
                if step % EVERY == 0:
                    ckpt.save(step, state)
    return [parameter.tolist() for parameter in model.parameters()]


def kill(moment, fatal):
    """At a random time after it."""
    moment.wait()
    time.sleep(fatal[1])
    os.kill(os.getpid(), signal.SIGKILL)


def trained_on(folder, size):
    """The samples of each step on each rank: what was done last counts, and doing it again must have been the same."""
    ranks = []
    for rank in range(size):
        steps = {}
        for line in Path(f"{folder}.{rank}").read_text().splitlines():
            if not line.endswith("]"):
                continue  # cut off by the kill
            step, *what = json.loads(line)
            assert steps.setdefault(step, what) == what, (folder, rank, step)
        ranks.append(steps)
    return ranks


CASES = [
    (kind, workers, size)
    for kind in ("in order", "shuffle", "replacement", "weighted", "distributed")
    for workers in (0, 2, 4)
    for size in (1, 2, 4)
    if kind != "distributed" or size > 1
]
CASES.sort(key=lambda case: case[1] * case[2])  # the quick ones first
SOME = [("shuffle", 2, 1), ("distributed", 2, 2)]


@pytest.mark.parametrize(("kind", "workers", "size"), CASES if THOROUGH else SOME)
def test_kills_change_no_sample(tmp_path, matrix, kind, workers, size):
    """Ids, what was drawn for them, and the final weights, element by element and bit for bit."""
    chance = random.Random(int(os.environ.get("SAFE_CKPT_KILL_SEED", "11")))
    arguments = (size, str(tmp_path / "whole"), kind, workers)
    whole = values(spawn_ranks(train, size, *arguments, None, timeout_s=100))
    expected = trained_on(tmp_path / "whole", size)
    total, folder, killed = len(expected[0]), str(tmp_path / "killed"), 0
    for number in range(KILLS):
        fatal = (1 + number * total // KILLS + chance.randrange(max(1, total // KILLS)), chance.random() * 0.01)
        outcomes = spawn_ranks(train, size, size, folder, kind, workers, fatal, timeout_s=100)
        killed += any(outcome.exit_code == -signal.SIGKILL for outcome in outcomes)
    found = values(spawn_ranks(train, size, size, folder, kind, workers, None, timeout_s=100))
    assert killed, "nothing was killed"
    assert trained_on(folder, size) == expected
    assert found == whole
    matrix("a job is killed within an epoch", f"{kind}, {workers} workers, {size} ranks", {"the same samples": killed})
