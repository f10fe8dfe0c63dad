"""The README's five promises, each with the default settings and several real ranks."""

import ast
import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist

from kit.patience import wait_until
from kit.ranks import spawn_ranks, values
from safe_ckpt import Checkpointer, PerRank
from safe_ckpt.errors import NotEnoughSpaceError, PeerLostError
from support import needs_root, small_disk, writer_processes

LARGE = 4_000_000  # numbers, 16 MB: a save of them takes long enough to be killed in its middle


def _steps(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".safe_ckpt")


def _state(step):
    return {
        "model": {"w": torch.full((LARGE,), float(step))},
        "own": PerRank({"t": torch.full((10,), step)}),
        "at": step,
    }


def _save_until_killed(rank, path, told, kill_after):
    with Checkpointer(path) as ckpt:
        state = _state(0)
        info = ckpt.resume(state)
        whole = state["model"]["w"].unique().tolist(), state["own"].value["t"].unique().tolist(), state["at"]
        step = info.step if info is not None else 0
        (told / f"resumed-{rank}").write_text(repr((step, whole)))
        dist.barrier()
        begun = time.monotonic()
        while True:
            step += 1
            handle = ckpt.save(step, _state(step))
            if time.monotonic() - begun > kill_after:
                os.kill(os.getpid(), signal.SIGKILL)  # within the writing of this save
            handle.result()
            (told / f"committed-{rank}").write_text(str(step))


@pytest.mark.timeout(180)
def test_a_killed_job_goes_on_from_the_newest_whole_checkpoint(tmp_path):
    """Both ranks are killed within a save, three times: each start finds what was reported as committed, or newer, whole."""
    chance = random.Random(int.from_bytes(os.urandom(2)))
    told = tmp_path / "told"
    told.mkdir()
    committed = 0
    for _ in range(3):
        spawn_ranks(_save_until_killed, 2, tmp_path / "run", told, 0.3 + chance.random())
        found = {(told / f"resumed-{rank}").read_text() for rank in range(2)}
        assert len(found) == 1
        step, whole = ast.literal_eval(found.pop())
        assert step >= committed
        assert step == 0 or whole == ([float(step)], [step], step)
        committed = max([committed, *(int(file.read_text()) for file in told.glob("committed-*"))])
    assert committed > 0


def _lose_one(rank, path):
    with Checkpointer(path) as ckpt:
        ckpt.save(1, {"at": 1}).result()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        try:
            ckpt.save(2, {"at": 2}).result()
        except PeerLostError as error:
            return str(error), time.monotonic() - begun
    return "no error", 0.0


def test_a_killed_rank_is_named_within_seconds(tmp_path):
    """A rank that is killed between two saves is named on the others, long before ``barrier_s`` (300 s)."""
    outcomes = spawn_ranks(_lose_one, 3, tmp_path / "run")
    for outcome in (outcomes[0], outcomes[2]):
        said, seconds = outcome.value
        assert "lost ranks [1]" in said
        assert seconds < 15  # 5 s on a quiet machine
    assert _steps(tmp_path / "run") == ["step-00000001"]


def _fill(rank, path):
    found = None
    with Checkpointer(path) as ckpt:
        ckpt.save(1, {"own": PerRank({"t": torch.ones(10)})}).result()
        try:
            ckpt.save(2, {"own": PerRank({"t": torch.ones(LARGE if rank == 1 else 10)})}).result()
        except NotEnoughSpaceError as error:
            found = str(error)
        ckpt.save(3, {"own": PerRank({"t": torch.ones(10)})}).result()
    return found


@needs_root
def test_a_full_disk_fails_on_all_ranks_and_costs_nothing(tmp_path):
    """The disk has no room for rank 1's part: all ranks raise the same named error, the one before stays, the next works."""
    with small_disk(tmp_path / "disk", "8m") as disk:
        (said,) = set(values(spawn_ranks(_fill, 3, disk)))
        assert "bytes needed" in said
        assert _steps(disk) == ["step-00000001", "step-00000003"]


def _damage(rank, path):
    with Checkpointer(path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"own": PerRank({"t": torch.full((10,), step)})}).result()
        if rank == 0:
            file = path / "step-00000002/own.rank00001.safetensors"
            data = bytearray(file.read_bytes())
            data[-3] ^= 1
            file.write_bytes(data)
        dist.barrier()
        state = {"own": PerRank({"t": torch.zeros(10, dtype=torch.int64)})}
        return ckpt.resume(state).step, state["own"].value["t"].unique().tolist()


def test_all_ranks_pass_over_a_damaged_checkpoint_together(tmp_path):
    """One bit of rank 1's file flips: all ranks resume from the checkpoint before it, and the damaged one is kept aside."""
    assert values(spawn_ranks(_damage, 3, tmp_path / "run")) == [(1, [1])] * 3
    assert _steps(tmp_path / "run") == ["step-00000001"]
    assert _steps(tmp_path / "run/.safe_ckpt/quarantine") == ["step-00000002"]


def _save_and_leave(rank, path):
    ckpt = Checkpointer(path)
    ckpt.save(1, _state(1))
    ckpt.close()
    return rank


def test_closing_waits_until_the_save_is_committed(tmp_path):
    """Closing right after ``save`` loses nothing: the checkpoint is there, and no process stays."""
    assert values(spawn_ranks(_save_and_leave, 2, tmp_path / "run")) == [0, 1]
    assert _steps(tmp_path / "run") == ["step-00000001"]
    wait_until(lambda: not writer_processes(), what="the end of all writers")
