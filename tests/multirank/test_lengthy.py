"""The lengthy-operation timeout: raised on every group that is meant, put back by everybody, entered by all or by none."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from kit.ranks import spawn_ranks, values
from safe_ckpt import events, lengthy_timeouts
from safe_ckpt.core.coordination import process_groups
from safe_ckpt.errors import ConfigError, DesyncError
from support import heeds_raised_timeouts


def timeouts_of(groups):
    return [
        seconds
        for group in process_groups.process_groups(groups)
        for _, seconds in process_groups.backend_timeouts(group)
    ]


def _nest(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    seen, told = [timeouts_of(mesh)], []
    with lengthy_timeouts(mesh, 3600, hooks=[told.append]):
        seen.append(timeouts_of(mesh))
        with lengthy_timeouts(None, 5000):
            seen.append(timeouts_of(mesh))
        with lengthy_timeouts([mesh.get_group(0), None], 7):
            seen.append(timeouts_of(mesh))
        seen.append(timeouts_of(mesh))
    seen.append(timeouts_of(mesh))
    try:
        if rank == 1:
            with lengthy_timeouts(mesh, 3600):
                raise KeyError("mine")
        else:
            with lengthy_timeouts(mesh, 3600):
                pass
    except KeyError:
        pass
    seen.append(timeouts_of(mesh))
    return seen, told


def test_a_mesh_stands_for_all_its_groups_and_blocks_nest():
    """WORLD and every group of the mesh get the long timeout; each block puts back what it found, after an exception too."""
    for seen, told in values(spawn_ranks(_nest, 4, group_timeout_s=60)):
        before, raised, inner, shorter, again, after, after_error = seen
        assert len(before) == 3
        assert raised == again == [3600.0] * 3
        assert sorted(inner) == [3600.0, 3600.0, 5000.0]
        assert shorter == raised
        assert after == after_error == before
        assert [type(event) for event in told] == [events.TimeoutsRaised, events.TimeoutsRestored]
        assert told[0].seconds == 3600
        assert len(told[0].groups) == 3


def _overlap(rank, first_s, second_s):
    first, second = lengthy_timeouts(None, first_s), lengthy_timeouts(None, second_s)
    seen = [timeouts_of(None)]
    for change in (
        first.__enter__,
        second.__enter__,
        lambda: first.__exit__(*[None] * 3),
        lambda: second.__exit__(*[None] * 3),
    ):
        change()
        seen.append(timeouts_of(None))
    return [one for (one,) in seen]


@pytest.mark.parametrize(("first_s", "second_s"), [(3600, 5000), (5000, 3600)])
def test_blocks_that_overlap_have_their_time_until_they_end(first_s, second_s):
    """Two threads, or two generators: the one that began first may end first. Afterwards the timeout is what it was."""
    (seen,) = values(spawn_ranks(_overlap, 1, first_s, second_s, group_timeout_s=60))
    assert seen == [60, first_s, max(first_s, second_s), second_s, 60]


def _outlast(rank):
    with lengthy_timeouts(None, 60):
        if rank == 1:
            time.sleep(5)
        dist.barrier()
    return timeouts_of(None)


@heeds_raised_timeouts
def test_a_collective_within_a_lengthy_block_outlasts_the_groups_timeout():
    """Under a group timeout of 3 s a rank that is 5 s late is awaited; afterwards the timeout is 3 s again."""
    assert values(spawn_ranks(_outlast, 2, group_timeout_s=3)) == [[3.0]] * 2


def _disagree(rank):
    try:
        with lengthy_timeouts(None, 100 + rank):
            return "entered"
    except DesyncError as error:
        return error.what, timeouts_of(None)


def test_a_lengthy_block_with_times_that_differ_is_refused_on_all():
    """Ranks that give different times are all refused, and nothing was changed."""
    assert values(spawn_ranks(_disagree, 2, group_timeout_s=60)) == [("seconds", [60.0])] * 2


def test_a_lengthy_block_without_a_process_group_does_nothing():
    """A run on one rank uses the same code."""
    with lengthy_timeouts(None, 10):
        pass


@pytest.mark.parametrize("seconds", [0, -1, "60", True])
def test_a_lengthy_timeout_that_is_no_time_is_refused(seconds):
    """At the call, with the name of the argument."""
    with pytest.raises(ConfigError, match="seconds"), lengthy_timeouts(None, seconds):
        pass


def _odd_group(rank):
    with pytest.raises(ConfigError, match="DeviceMesh"), lengthy_timeouts([torch.ones(1)], 5):
        pass


def test_a_lengthy_block_on_no_group_is_refused():
    """The message says what is expected."""
    values(spawn_ranks(_odd_group, 1))
