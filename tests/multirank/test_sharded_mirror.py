"""Sharded items and a mirror: what several ranks saved comes back from there for all of them."""

import dataclasses
import shutil

import pytest
from fsdp_runs import CONFIG, build, same, train, whole

from kit.ranks import spawn_ranks, values
from safe_ckpt import Checkpointer, Mirror


def _sharded(rank, near, far, way):
    model, optimizer = build(2)
    settings = dataclasses.replace(CONFIG, mirror=Mirror(url=str(far)))
    with Checkpointer(near, settings) as ckpt:
        state = {"model": model, "optimizer": optimizer}
        if way == "go on":
            return ckpt.resume(state).step, whole(model, optimizer)
        for step in (1, 2):
            train(model, optimizer, 1, rank)
            ckpt.save(step, state).result()
        return 2, whole(model, optimizer)


@pytest.mark.timeout(120)
def test_a_lost_disk_of_two_ranks_is_made_up_for(tmp_path):
    """Sharded items lie in a folder of the checkpoint; each rank reads its part of what came back."""
    near, far = tmp_path / "near", tmp_path / "far"
    expected = values(spawn_ranks(_sharded, 2, near, far, "save"))
    shutil.rmtree(near)
    found = values(spawn_ranks(_sharded, 2, near, far, "go on"))
    for (step, one), (_, other) in zip(found, expected, strict=True):
        assert step == 2
        same(one, other)
