"""All ranks save at one step, whichever of them is slow."""

import random
import time
from pathlib import Path

import pytest

from kit.limits import QUICK
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer


def _train(rank, path):
    draw, due = random.Random(rank), []
    with Checkpointer(path / "run", CheckpointConfig(timeouts=QUICK)) as ckpt:
        for step in range(60):
            time.sleep(draw.uniform(0, 0.01))  # a step
            if ckpt.due(least_s=0.05, most_s=0.1):
                due.append(step)
                ckpt.save(step, {"a": step})
    return due


@pytest.mark.timeout(120)
def test_all_ranks_save_at_one_step(tmp_path):
    """Three ranks of unequal pace: the same steps, more than one, and not every one."""
    first, *others = values(spawn_ranks(_train, 3, Path(tmp_path)))
    assert all(other == first for other in others)
    assert 1 < len(first) < 40
