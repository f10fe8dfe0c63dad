"""Ranks that end, or whose time ends, while a save is under way: each says what came of it, or that it does not know."""

import errno
import time
from dataclasses import replace

from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, Timeouts
from safe_ckpt.core.storage import durable
from safe_ckpt.errors import CommitOutcomeUnknown, DirectoryError, SafeCheckpointError

TIMES = Timeouts(lengthy_s=60, barrier_s=30, peer_stall_s=20, shutdown_s=1)


def _leave_while_rank_0_waits_for_its_disk(rank, path, over):
    if rank == 0:
        real = durable.write_durably

        def write_late(*given):  # a disk that does not answer until the other rank has ended
            deadline = time.monotonic() + 40
            while not over.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            return real(*given)

        durable.write_durably = write_late
    ckpt = Checkpointer(path, CheckpointConfig(timeouts=TIMES))
    handle = ckpt.save(1, {"at": 1})
    if rank == 0:
        return handle.result().step
    try:
        ckpt.close()
    except CommitOutcomeUnknown:
        said = "unknown"
    else:
        said = "no error"
    over.touch()
    return said


def test_a_rank_that_ends_first_does_not_say_that_nothing_was_saved(tmp_path):
    """Rank 0 waits for its disk, and rank 1 ends after ``shutdown_s``: rank 0 commits, so rank 1 cannot know."""
    found = values(spawn_ranks(_leave_while_rank_0_waits_for_its_disk, 2, tmp_path / "run", tmp_path / "over"))
    assert found == [1, "unknown"]
    with Checkpointer(tmp_path / "run") as ckpt:
        state = {"at": 0}
        assert ckpt.resume(state).step == state["at"] == 1


LIMIT_S = 3.0


def _fails_right_behind_the_limit(rank, path):
    ckpt = Checkpointer(path, CheckpointConfig(timeouts=replace(TIMES, lengthy_s=LIMIT_S)))
    ckpt.save(1, {"at": 1}).result()
    if rank == 0:

        def fail_late(path, _):  # a disk that refuses the manifest when the time of the save is over on every rank
            time.sleep(LIMIT_S + 2)
            raise OSError(errno.EIO, "Input/output error", str(path))

        durable.write_durably = fail_late
    try:
        return ckpt.save(2, {"at": 2}).result()
    except SafeCheckpointError as error:
        return error
    finally:
        ckpt.close()


def test_who_waits_for_the_verdict_waits_longer_than_the_one_who_gives_it(tmp_path):
    """Rank 0 fails right behind ``lengthy_s``, and says so: the other rank raises that error, and not an unknown outcome."""
    found = [one.value for one in spawn_ranks(_fails_right_behind_the_limit, 2, tmp_path)]
    assert [type(one) for one in found] == [DirectoryError, DirectoryError]
    assert [one.rank for one in found] == [0, 0]
