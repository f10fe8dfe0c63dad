"""``PerRank`` on another number of ranks: a rank without a part of its own starts it anew, or refuses, and one line says so."""

import logging
import random

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

import safe_ckpt
from kit.limits import QUICK
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, RngState
from safe_ckpt.data import resumable
from safe_ckpt.errors import RestoreError
from support import flip_bit

CONFIG = CheckpointConfig(timeouts=QUICK)


def _drawn():
    return torch.rand(1).item(), random.random(), float(np.random.random())


def _save_own(rank, path):
    with Checkpointer(path, CONFIG) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"own": PerRank({"at": [step, rank]})}).result()


def _resume_own(rank, path):
    state = {"own": PerRank({"at": None})}
    with Checkpointer(path, CONFIG) as ckpt:
        return ckpt.resume(state).step, state["own"].value["at"]


def test_what_is_damaged_of_ranks_that_are_gone_is_found(tmp_path):
    """Two of four ranks go on: nobody needs what rank 3 has saved, and a checkpoint is good as a whole or not at all."""
    values(spawn_ranks(_save_own, 4, tmp_path))
    flip_bit(tmp_path / "step-00000002/own.rank00003.json", 0)
    assert values(spawn_ranks(_resume_own, 2, tmp_path)) == [(1, [1, 0]), (1, [1, 1])]


class _Log(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def _run(rank, path, step):
    """One start of the program of docs/clusters.md: resume, draw, save."""
    torch.manual_seed(1000 * step + rank)
    state = {"rng": PerRank(RngState()), "step": 0}
    log = _Log()
    logging.getLogger("safe_ckpt").addHandler(log)
    with Checkpointer(path, CONFIG) as ckpt:
        info = ckpt.resume(state)
        found = _drawn()
        ckpt.save(step, {**state, "step": step}).result()
    return info and info.step, found, [line for line in log.lines if "each its own" in line]


def test_a_job_goes_on_with_one_rank_less_and_one_more(tmp_path):
    """2 ranks, 1, 2, 3, 1: each start resumes the newest. Rank 0 is exact, and others are at the same place at each try."""
    sizes, known = [2, 1, 2, 3, 1], {}
    for step, size in enumerate(sizes, 1):
        found = values(spawn_ranks(_run, size, tmp_path, step))
        assert [one[0] for one in found] == [step - 1 or None] * size
        draws = [one[1] for one in found]
        assert len({*draws}) == size, "ranks draw the same numbers"
        said = [len(one[2]) for one in found]
        assert said == [int(step > 1), *[0] * (size - 1)]
        known[step] = draws, found[0][2]
    assert (
        "saved by 2 ranks, each its own, and this job has 1: what ranks 1 to 1 saved is not restored" in known[2][1][0]
    )
    assert "saved by 1 ranks, each its own, and this job has 2: ranks 1 to 1 start anew from rank 0's" in known[3][1][0]
    assert "ranks 2 to 2 start anew" in known[4][1][0]
    again = values(spawn_ranks(_again, 3, tmp_path))
    assert again == known[4][0]


def _again(rank, path):
    safe_ckpt.load(path, {"rng": PerRank(RngState())}, step=3)
    return _drawn()


def _loader(rank, size, *, shared):
    data = list(range(24))
    sampler = DistributedSampler(data, size, rank, seed=3) if shared else None
    return resumable(DataLoader(data, batch_size=2, sampler=sampler, shuffle=None if shared else True))


def _begin(rank, path, *, shared):
    loader = _loader(rank, dist.get_world_size() if dist.is_initialized() else 1, shared=shared)
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(2)]
    with Checkpointer(path, CONFIG) as ckpt:
        ckpt.save(1, {"data": PerRank(loader), "own": PerRank({"rank": rank})}).result()
    return [index for batch in seen for index in batch]


def _go_on(rank, path, shared, names):
    state = {"data": PerRank(_loader(rank, 2, shared=shared)), "own": PerRank({"rank": -1})}
    try:
        safe_ckpt.load(path, {name: state[name] for name in names})
    except RestoreError as error:
        return str(error)
    return [index for batch in state["data"].value for index in batch.tolist()]


def test_loaders_go_on_by_their_own_rule(tmp_path):
    """Where all ranks share one order, a further rank takes its part of the rest; an order of each rank's own is refused."""
    seen = _begin(0, tmp_path / "shared", shared=True)
    one, other = values(spawn_ranks(_go_on, 2, tmp_path / "shared", True, ("data",)))
    assert sorted([*seen, *one, *other]) == list(range(24))
    _begin(0, tmp_path / "own", shared=False)
    for told in values(spawn_ranks(_go_on, 2, tmp_path / "own", False, ("data",))):
        assert "place of rank 0: save PerRank(loader), and resume with as many ranks" in told


def test_what_cannot_start_anew_says_what_it_needs(tmp_path):
    """A dict of each rank: only the program knows what a further rank would have."""
    _begin(0, tmp_path, shared=True)
    for told in values(spawn_ranks(_go_on, 2, tmp_path, True, ("own",))):
        assert "saved by 1 ranks, each its own, and this is rank 1" in told
        assert "start_anew(state, rank)" in told
