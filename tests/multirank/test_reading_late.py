"""A rank that sees later what rank 0 sees already, or that reads for longer than the others wait for each other."""

import os
import shutil
import time

import torch.distributed as dist

from kit import inside
from kit.limits import QUICK
from kit.patience import factor, wait_until
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, Timeouts
from safe_ckpt.core.resuming.candidate import FileReader
from safe_ckpt.core.resuming.visit import visiting

CONFIG = CheckpointConfig(timeouts=QUICK)
RUN = "/proc/self/cwd/run"  # one path on all ranks, which leads elsewhere where a rank has another working directory


def _sees_late(rank, path):
    old, seen = path / "old", []
    os.chdir(path)
    with Checkpointer(RUN, CONFIG) as ckpt:
        ckpt.save(1, {"own": PerRank({"save": 1}), "shared": 1}).result()
        if rank == 1:
            shutil.copytree("run/step-00000001", old / "run/step-00000001")
        dist.barrier()
        ckpt.save(1, {"own": PerRank({"save": 2}), "shared": 2}).result()
        if rank == 1:
            os.chdir(old)
            inside.once_compared(lambda: (seen.append(True), os.chdir(path)))
        state = {"own": PerRank({"save": 0}), "shared": 0}
        ckpt.resume(state)
        os.chdir(path)
    return state["own"].value["save"], state["shared"], bool(seen)


def test_a_rank_that_still_sees_the_checkpoint_that_had_this_name_waits(tmp_path):
    """Step 1 was saved again. Rank 1 sees the earlier one at first, as through a cache: no rank restores that."""
    assert values(spawn_ranks(_sees_late, 2, tmp_path)) == [(2, 2, False), (2, 2, True)]


def _reads_for_long(rank, path, barrier_s):
    limits = Timeouts(lengthy_s=20 * barrier_s, barrier_s=barrier_s, peer_stall_s=barrier_s / 2)

    def load(folder):
        until = time.monotonic() + 1.2 * barrier_s
        if rank == 1:
            wait_until(lambda: time.monotonic() > until, 2 * barrier_s, "the others to have waited for barrier_s")
        return folder.name

    with visiting(CheckpointConfig(timeouts=limits), None) as ranks:
        return FileReader(ranks, load).try_one(path / "step-00000001", ours=True)


def test_a_rank_may_read_for_longer_than_ranks_wait_for_each_other(tmp_path):
    """Reading is lengthy: ``barrier_s`` is not its limit."""
    with Checkpointer(tmp_path, CONFIG) as ckpt:
        ckpt.save(1, {"a": 1}).result()
    found = values(spawn_ranks(_reads_for_long, 2, tmp_path, 4.0 * min(factor(), 3)))
    assert found == [("step-00000001", None)] * 2
