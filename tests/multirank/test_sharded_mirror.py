"""Sharded items and a mirror: what several ranks saved comes back from there for all of them."""

import dataclasses
import shutil

import pytest
from fsdp_runs import CONFIG, build, same, train, whole

from kit.ranks import spawn_ranks, values
from safe_ckpt import Checkpointer, Mirror
from safe_ckpt.errors import MirrorBehindError


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


def _falls_behind(rank, near, far):
    found = []
    with Checkpointer(near, dataclasses.replace(CONFIG, mirror=Mirror(url=str(far), max_behind=1))) as ckpt:
        for step in (1, 2, 3):
            try:
                ckpt.save(step, {"n": step}).result()
            except MirrorBehindError as error:
                found.append((step, str(error)))
        if rank == 0:
            far.unlink()
        ckpt.wait(mirrored=True)
        ckpt.save(4, {"n": 4})
        ckpt.wait(mirrored=True)  # also for what is in flight
        found.append((far / "step-00000004").exists())
    return found


@pytest.mark.timeout(120)
def test_a_mirror_that_is_behind_is_the_same_error_on_every_rank(tmp_path):
    """Only the first rank knows of the copies: all of them raise its words, at one step."""
    (tmp_path / "far").write_text("no folder")
    first, second = values(spawn_ranks(_falls_behind, 2, tmp_path / "near", tmp_path / "far"))
    assert first == second
    (step, _), is_there = first
    assert (step, is_there) == (3, True)
    assert "2 saves have no copy" in first[0][1]


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
