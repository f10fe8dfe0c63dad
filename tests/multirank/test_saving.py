"""The whole save on several ranks: agreement, per-rank files, failure of one, lateness, order of exit."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from kit import warm
from kit.limits import QUICK, stretched
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, PerRank, Retention, RngState, Timeouts, WriterConfig
from safe_ckpt.core.resuming import candidate
from safe_ckpt.core.staging.snapshot import StagingCopy
from safe_ckpt.errors import (
    CheckpointNotFoundError,
    CommitOutcomeUnknown,
    DesyncError,
    DirectoryInUseError,
    DirectoryNotSharedError,
    NotEnoughSpaceError,
    NoValidCheckpointError,
    PeerLostError,
    RendezvousTimeout,
    RestoreError,
    SaveError,
    StateError,
)
from support import names_in, needs_root, program_path, small_disk, writers_of

CONFIG = CheckpointConfig(timeouts=QUICK)


def steps(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".safe_ckpt")


def _save_and_resume(rank, path):
    torch.manual_seed(rank)
    state = {
        "model": torch.nn.Linear(50, 50),
        "own": PerRank({"rank": torch.full((3,), rank)}),
        "rng": PerRank(RngState()),
    }
    with Checkpointer(path, CONFIG) as ckpt:
        assert ckpt.resume(state) is None
        for step in range(10):
            info = ckpt.save(step, state).result(timeout_s=30)
            assert info.step == step
        drawn = torch.rand(4)
        fresh = {
            "model": torch.nn.Linear(50, 50),
            "own": PerRank({"rank": torch.zeros(3, dtype=torch.int64)}),
            "rng": PerRank(RngState()),
        }
        assert ckpt.resume(fresh).step == 9
        assert torch.rand(4).equal(drawn)
    assert (fresh["own"].value["rank"] == rank).all()
    return fresh["model"].weight.sum().item(), len(writers_of(os.getpid()))


def test_four_ranks_save_and_resume(tmp_path):
    """Shared items come from rank 0, per-rank items from each rank; generators continue; no process is left."""
    results = values(spawn_ranks(_save_and_resume, 4, tmp_path))
    assert len({weight for weight, _ in results}) == 1
    assert all(writers == 0 for _, writers in results)
    manifest = json.loads((tmp_path / "step-00000009/manifest.json").read_bytes())
    assert manifest["world_size"] == 4
    assert {entry["rank"] for entry in manifest["files"]} == {0, 1, 2, 3}


def _different_steps(rank, path):
    with Checkpointer(path, CONFIG) as ckpt:
        found = []
        for calls in ((1, 2), (1, 1)):
            state = {"a": 1} if rank != 1 or calls[0] != calls[1] else {"b": 1}
            try:
                ckpt.save(calls[1] if rank == 1 else calls[0], state)
            except DesyncError as error:
                found.append(error)
        ckpt.save(5, {"a": 1}).result(timeout_s=20)
    return found


def test_ranks_at_different_steps_are_told(tmp_path):
    """Other steps, or other names, on one rank: DesyncError on all with ranks and both values; the next save works."""
    for step, names in values(spawn_ranks(_different_steps, 4, tmp_path)):
        assert (step.what, step.values) == ("step", {"0": "1", "1": "2", "2": "1", "3": "1"})
        assert (names.what, names.values["1"]) == ("names", "b")
    assert steps(tmp_path) == ["step-00000005"]


def _one_does_not_come(rank, path):
    timeouts = Timeouts(lengthy_s=60, barrier_s=3, peer_stall_s=3, shutdown_s=10)
    with Checkpointer(path, CheckpointConfig(timeouts=timeouts)) as ckpt:
        if rank == 2:
            time.sleep(5)
        begun = time.monotonic()
        try:
            ckpt.save(1, {"a": 1})
        except RendezvousTimeout as error:
            found = error, time.monotonic() - begun
        if rank != 2:
            time.sleep(2.5)
        ckpt.save(2, {"a": 1}).result(timeout_s=20)
    return found


def test_a_rank_that_never_arrives_is_named_within_the_barrier(tmp_path):
    """The others raise within barrier_s and name it; when all come again, the next save works."""
    results = values(spawn_ranks(_one_does_not_come, 4, tmp_path))
    for rank, (error, seconds) in enumerate(results):
        assert error.missing == (2,)
        assert seconds < (1 if rank == 2 else 4)
    assert steps(tmp_path) == ["step-00000002"]


def _destroy_at_once(rank, path):
    ckpt = Checkpointer(path, CONFIG)
    ckpt.save(1, {"w": {"t": torch.ones(8_000_000)}, "own": PerRank({"t": torch.ones(1_000_000)})})
    dist.destroy_process_group()
    if rank != 0:
        time.sleep(1.5)  # rank 0's interpreter ends first


def test_ranks_that_end_right_after_save_lose_nothing(tmp_path):
    """destroy_process_group() right after save(), nobody closes, rank 0 exits first: the save is committed."""
    values(spawn_ranks(_destroy_at_once, 3, tmp_path))
    assert steps(tmp_path) == ["step-00000001"]
    with Checkpointer(tmp_path, CONFIG) as ckpt:
        assert ckpt.resume({"w": {"t": torch.zeros(8_000_000)}}).step == 1


def _bad_on_one(rank, path):
    with Checkpointer(path, CONFIG) as ckpt:
        try:
            ckpt.save(1, {"x": PerRank({"f": lambda: 1} if rank == 1 else 1)})
        except StateError as error:
            found = error
        ckpt.save(2, {"x": PerRank(rank)}).result(timeout_s=20)
    return found


def test_an_object_that_one_rank_cannot_save_stops_all_at_the_call(tmp_path):
    """An object that only rank 1 has: every rank raises at save(), naming the key and rank 1; the next save works."""
    for error in values(spawn_ranks(_bad_on_one, 3, tmp_path)):
        assert error.key == "state['x']['f']"
        assert error.rank == 1
    assert steps(tmp_path) == ["step-00000002"]


@needs_root
@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_on_one_rank_fails_the_save_on_all(tmp_path, victim):
    """ENOSPC while one rank writes: the same named error on all ranks, nothing committed, the previous one intact."""
    with small_disk(tmp_path / "disk", "8m") as disk:
        for error in values(spawn_ranks(_fill, 3, disk, victim)):
            assert isinstance(error, NotEnoughSpaceError)
            assert error.rank == victim
        assert steps(disk) == ["step-00000001", "step-00000003"]
        assert not list((disk / ".safe_ckpt").glob("pending/*"))


def _fill(rank, path, victim):
    import shutil

    real = shutil.disk_usage
    shutil.disk_usage = lambda _: real("/")  # let it fail in the middle of a file, not in the preflight
    with Checkpointer(path, CONFIG) as ckpt:
        ckpt.save(1, {"own": PerRank({"t": torch.ones(10)})}).result(timeout_s=20)
        try:
            ckpt.save(2, {"own": PerRank({"t": torch.ones(4_000_000 if rank == victim else 10)})}).result(timeout_s=20)
        except NotEnoughSpaceError as error:
            found = error
        ckpt.save(3, {"own": PerRank({"t": torch.ones(10)})}).result(timeout_s=20)
    return found


def _damaged(rank, path):
    with Checkpointer(path, CONFIG) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"own": PerRank({"t": torch.full((10,), step)})}).result(timeout_s=20)
        if rank == 0:
            (path / "step-00000002/own.rank00001.safetensors").write_bytes(b"damaged")
        dist.barrier()
        target = {"own": PerRank({"t": torch.zeros(10, dtype=torch.int64)})}
        info = ckpt.resume(target)
        ckpt.save(3, {"own": PerRank({"t": torch.ones(10)})}).result(timeout_s=20)
    return info.step, target["own"].value["t"].tolist()


def test_damage_that_only_one_rank_reads_moves_all_to_the_same_older_one(tmp_path):
    """Rank 1's file is damaged: all ranks, and not just rank 1, restore the older checkpoint."""
    assert values(spawn_ranks(_damaged, 3, tmp_path)) == [(1, [1] * 10)] * 3
    assert steps(tmp_path) == ["step-00000001", "step-00000003"]
    assert steps(tmp_path / ".safe_ckpt/quarantine") == ["step-00000002"]


def _all_damaged(rank, path):
    with Checkpointer(path, CONFIG) as ckpt:
        ckpt.save(1, {"a": 1}).result(timeout_s=20)
        if rank == 0:
            (path / "step-00000001/a.json").write_text("7")
        dist.barrier()
        try:
            ckpt.resume({"a": 0})
        except NoValidCheckpointError as error:
            return error


def test_a_resume_without_a_usable_checkpoint_raises_on_every_rank(tmp_path):
    """When no checkpoint is usable all ranks raise the same error, and none starts afresh."""
    errors = values(spawn_ranks(_all_damaged, 3, tmp_path))
    assert len({str(error) for error in errors}) == 1
    assert steps(tmp_path) == ["step-00000001"]


def _resume_per_rank(rank, path):
    with Checkpointer(path, CONFIG) as ckpt:
        state = {"a": 0}
        assert ckpt.resume(state).world_size == 2
        assert state == {"a": 5}
        try:
            ckpt.resume({"own": PerRank(0)})
        except RestoreError as error:
            return error


def _save_two(rank, path):
    with Checkpointer(path, CONFIG) as ckpt:
        ckpt.save(1, {"a": 5, "own": PerRank(rank)})


def test_shared_items_resume_on_any_number_of_ranks(tmp_path):
    """Shared items restore on any number of ranks; per-rank items that a rank does not have are an error on all."""
    values(spawn_ranks(_save_two, 2, tmp_path))
    for error in values(spawn_ranks(_resume_per_rank, 3, tmp_path)):
        assert "saved by 2 ranks" in str(error)
        assert "rank 2" in str(error)


def _die_in_flight(rank, path, victim):
    slow = CheckpointConfig(timeouts=QUICK, retention=Retention(keep_last=1))
    ckpt = Checkpointer(path, slow)
    ckpt.save(1, {"own": PerRank(rank)}).result(timeout_s=20)
    handle = ckpt.save(2, {"own": PerRank({"t": torch.ones(40_000_000 if rank == victim else 10)})})
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        handle.result(timeout_s=30)
    finally:
        assert time.monotonic() - begun < 20


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_in_flight_fails_the_save_of_the_others(tmp_path, victim):
    """A rank dies while it writes: the others get a named error within seconds, the previous checkpoint stays."""
    outcomes = spawn_ranks(_die_in_flight, 3, tmp_path, victim)
    for outcome in outcomes:
        if outcome.rank != victim:
            assert isinstance(outcome.error, PeerLostError | CommitOutcomeUnknown), outcome
    assert steps(tmp_path) == ["step-00000001"]
    with Checkpointer(tmp_path, CONFIG) as ckpt:
        assert ckpt.resume({}).step == 1
    assert names_in(tmp_path / ".safe_ckpt/pending") == []


def _rank_one_opens_elsewhere(rank, path):
    try:
        Checkpointer(path / ("b" if rank == 1 else "a"), CONFIG)
    except DesyncError as error:
        return error


def test_different_directories_are_refused(tmp_path):
    """One rank with another directory: all are told, and nothing stays locked."""
    for error in values(spawn_ranks(_rank_one_opens_elsewhere, 3, tmp_path)):
        assert error.what == "directory"
    Checkpointer(tmp_path / "a", CONFIG).close()


def _open_held(rank, path):
    try:
        Checkpointer(path, CONFIG)
    except DirectoryInUseError as error:
        return error.pid


def test_a_held_directory_is_refused_on_every_rank(tmp_path):
    """Another live job has it: every rank raises, naming that job."""
    with Checkpointer(tmp_path, CONFIG):
        assert values(spawn_ranks(_open_held, 2, tmp_path)) == [os.getpid()] * 2


def test_ranks_launched_by_torchrun_save_and_resume(tmp_path):
    """The same under torchrun, whose agent holds the default store."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(program_path("saves_under_a_launcher")), str(tmp_path / "exp")]
    done = warm.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert steps(tmp_path / "exp") == ["step-00000001"]


def _two_at_once(rank, path):
    slow = CheckpointConfig(
        timeouts=QUICK, writer=WriterConfig(direct_io="off", chunk_bytes=4096, flush_every_bytes=4096)
    )
    with Checkpointer(path / "a", slow) as one, Checkpointer(path / "b", slow) as other:
        first = one.save(1, {"own": PerRank({"t": torch.ones(6_000_000 if rank else 10)})})
        other.save(1, {"own": PerRank(rank)}).result(timeout_s=20)
        return first.result(timeout_s=50).step


def test_two_checkpointers_do_not_wait_for_each_other(tmp_path):
    """A long save of one Checkpointer does not make a short one of another look like a lost rank."""
    assert values(spawn_ranks(_two_at_once, 2, tmp_path)) == [1, 1]


def _rewind(rank, path):
    with Checkpointer(path, CONFIG) as ckpt:
        for step in (500, 1000):
            ckpt.save(step, {"x": step}).result(timeout_s=20)
        state = {"x": 0}
        assert ckpt.resume(state, step=500).step == 500
        assert state == {"x": 500}
        ckpt.save(600, {"x": 600}).result(timeout_s=20)
    with Checkpointer(path, CONFIG) as ckpt:
        with pytest.raises(CheckpointNotFoundError, match="step-00000007"):
            ckpt.resume(state, step=7)
        return ckpt.resume(state).step


def test_after_a_rewind_the_abandoned_future_does_not_win(tmp_path):
    """Back at step 500, then saved 600: the newest is 600, not the abandoned 1000."""
    assert values(spawn_ranks(_rewind, 2, tmp_path)) == [600, 600]


def test_ordinary_processes_that_just_end_lose_nothing(tmp_path):
    """Not children of multiprocessing: two scripts save and come to their end, without close or destroy_process_group."""
    command = [sys.executable, str(program_path("saves_and_just_ends")), str(tmp_path / "exp"), str(tmp_path / "store")]
    begun = time.monotonic()
    started = [warm.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True, finalize=True) for rank in (0, 1)]
    said = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert steps(tmp_path / "exp") == ["step-00000001"], said
    assert names_in(tmp_path / "exp/.safe_ckpt/pending") == []
    assert time.monotonic() - begun < 40


def _blind_to_the_newest(rank, path):
    with Checkpointer(path, CONFIG) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"x": step}).result(timeout_s=20)
        real = candidate.await_visible
        candidate.await_visible = lambda p, timeout_s: (
            real(p, timeout_s) and not (rank == 1 and "step-00000002" in str(p))
        )
        try:
            ckpt.resume({"x": 0})
        except DirectoryNotSharedError as error:
            return error.ranks


def test_a_checkpoint_that_one_rank_cannot_see_is_not_treated_as_corrupt(tmp_path):
    """A network file system that does not show the newest checkpoint to one rank: an error, on all, and no quarantine."""
    assert values(spawn_ranks(_blind_to_the_newest, 2, tmp_path)) == [(1,), (1,)]
    assert steps(tmp_path) == ["step-00000001", "step-00000002"]


SOON_S = stretched(1.25)


def _close_at_once(rank, path):
    slow = WriterConfig(chunk_bytes=4096, flush_every_bytes=4096, direct_io="off")
    config = CheckpointConfig(timeouts=replace(QUICK, shutdown_s=SOON_S), writer=slow)
    ckpt = Checkpointer(path, config)
    handle = ckpt.save(
        1, {"m": {"w": torch.zeros(1_000_000)}, "own": PerRank({"t": torch.zeros(5_000_000 * rank + 1)})}
    )
    begun = time.monotonic()
    ckpt.close()
    return handle.result().step, time.monotonic() - begun


def test_nobody_gives_up_while_another_rank_moves_bytes(tmp_path):
    """All ranks close at once; one has written its part long before the other, who takes longer than shutdown_s: committed."""
    for step, seconds in values(spawn_ranks(_close_at_once, 2, tmp_path)):
        assert step == 1
        assert seconds > SOON_S


def _interrupt_the_copy(rank, folder):
    copying = StagingCopy._copy

    def interrupted(self, *args, **kwargs):
        StagingCopy._copy = copying
        raise KeyboardInterrupt

    with Checkpointer(folder, CONFIG) as ckpt:
        if rank == 1:
            StagingCopy._copy = interrupted
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(1, {"own": PerRank(torch.ones(5))})
            with pytest.raises(SaveError, match="interrupted"):
                ckpt.wait()
        else:
            began = time.monotonic()
            with pytest.raises(SaveError, match="interrupted"):
                ckpt.save(1, {"own": PerRank(torch.ones(5))}).result(timeout_s=40)
            assert time.monotonic() - began < 15
        return ckpt.save(2, {"own": PerRank(torch.ones(5))}).result(timeout_s=40).step


def test_ctrl_c_while_one_rank_copies_ends_the_save_on_all(tmp_path):
    """The rank that is interrupted sees its KeyboardInterrupt, the others a named error within seconds; the next save works."""
    assert values(spawn_ranks(_interrupt_the_copy, 2, tmp_path)) == [2, 2]
