"""``safe_ckpt.load`` and ``newest``: several real ranks read what they do not hold."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import safe_ckpt
from kit.ranks import spawn_ranks, values
from safe_ckpt import Checkpointer, PerRank
from safe_ckpt.errors import DesyncError, NoValidCheckpointError, RestoreError
from support import flip_bit, names_in, needs_root, program_path


def _sharded(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def _save(rank, path, steps):
    model = _sharded(1)
    optimizer = torch.optim.Adam(model.parameters())
    with Checkpointer(path) as ckpt:
        for step in steps:
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            ckpt.save(step, {"model": model, "optimizer": optimizer, "epoch": step, "mine": PerRank(rank)})
    return [parameter.full_tensor() for parameter in model.parameters()]


def _load(rank, path, names, verify):
    model, state = _sharded(7), {"epoch": 0}
    state |= dict.fromkeys(names, model)
    info = safe_ckpt.load(path, state, verify=verify)
    return info.step, state["epoch"], [parameter.full_tensor() for parameter in model.parameters()]


def test_a_sharded_checkpoint_is_loaded_on_any_number_of_ranks(tmp_path):
    """What 2 ranks saved in shards, 3 and 1 read, verified or not; the directory is as it was."""
    saved = values(spawn_ranks(_save, 2, tmp_path / "run", (1, 2)))[0]
    before = names_in(tmp_path)
    for size in (3, 1):
        for verify in (True, False):
            for step, epoch, found in values(spawn_ranks(_load, size, tmp_path / "run", ["model"], verify)):
                assert (step, epoch) == (2, 2)
                assert all(torch.equal(one, other) for one, other in zip(found, saved, strict=True))
    assert names_in(tmp_path) == before


def _mine(rank, path):
    state = {"mine": PerRank(-1)}
    try:
        safe_ckpt.load(path, state)
    except RestoreError as error:
        return error
    return state["mine"].value


def test_each_rank_loads_its_own_per_rank_item(tmp_path):
    """``PerRank`` on as many ranks; on more, those that have none raise on all, by name."""
    values(spawn_ranks(_save, 2, tmp_path / "run", (1,)))
    assert values(spawn_ranks(_mine, 2, tmp_path / "run")) == [0, 1]
    for error in values(spawn_ranks(_mine, 3, tmp_path / "run")):
        assert isinstance(error, RestoreError)
        assert "mine" in str(error)


def _damaged(rank, path):
    state = {"model": _sharded(7), "epoch": 0}
    step = safe_ckpt.load(path, state).step
    try:
        safe_ckpt.load(path, state, step=2)
    except NoValidCheckpointError as error:
        return step, safe_ckpt.newest(path).step, error
    return None


def test_a_load_passes_over_a_damaged_checkpoint_and_leaves_it(tmp_path):
    """All ranks take the one before it; asked for by its step all raise, and say why. Nothing is moved."""
    values(spawn_ranks(_save, 2, tmp_path / "run", (1, 2)))
    shard = next((tmp_path / "run/step-00000002/model").glob("*.distcp"))
    flip_bit(shard, 200)
    for step, newest, error in values(spawn_ranks(_damaged, 2, tmp_path / "run")):
        assert (step, newest) == (1, 1)
        assert shard.name in str(error)
    assert (tmp_path / "run/step-00000002").is_dir()


def _differ(rank, path):
    try:
        safe_ckpt.load(path, {"epoch": 0}, step=rank + 1)
    except DesyncError as error:
        return error
    return None


def test_loads_of_different_steps_raise_on_all_ranks(tmp_path):
    """All raise ``DesyncError``."""
    values(spawn_ranks(_save, 2, tmp_path / "run", (1, 2)))
    assert all(isinstance(error, DesyncError) for error in values(spawn_ranks(_differ, 2, tmp_path / "run")))


def _read_again_and_again(rank, path, times):
    seen = []
    for _ in range(times):
        state = {f"part{n}": torch.full((1 << 16,), -1.0) for n in range(8)}
        info = safe_ckpt.load(path, state)
        found = {tensor.unique().tolist()[0] for tensor in state.values() if len(tensor.unique()) == 1}
        assert found == {float(info.step)}, (info, found)
        seen.append(info.step)
    return seen


def test_a_load_beside_a_job_that_keeps_one_checkpoint_is_whole(tmp_path):
    """A job deletes each checkpoint as soon as the next one is there. What is read is always one of them, whole."""
    command = [sys.executable, program_path("keeps_only_the_newest"), tmp_path / "run"]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(3):
            assert job.stdout.readline()
        seen = values(spawn_ranks(_read_again_and_again, 2, tmp_path / "run", 6, timeout_s=100))
        assert seen[0] == seen[1]
        assert len(set(seen[0])) > 1
        assert seen[0] == sorted(seen[0])
        job.send_signal(signal.SIGINT)
    finally:
        job.kill()
        job.communicate(timeout=30)


@needs_root
def test_a_load_from_another_users_directory_needs_no_write_permission(tmp_path):
    """A directory in which one may not write is read, beside the live job that holds it."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    with Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(5, {"epoch": 5})
        ckpt.wait()
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, program_path("reads_as_another_user"), tmp_path / "run"],
            capture_output=True, text=True, check=False, timeout=60, env=environment, cwd=Path("/"),
        )  # fmt: skip
        assert done.stdout.split() == ["5", "5", "5"], done.stderr


def _deleted_for_one(rank, path):
    os.chdir(path / ("after" if rank else "before"))
    state = {"epoch": 0}
    info = safe_ckpt.load("/proc/self/cwd/run", state)  # one path on all ranks
    return info.step, state["epoch"], safe_ckpt.newest("/proc/self/cwd/run").step


def test_what_is_deleted_before_a_rank_looks_is_passed_over_by_all(tmp_path):
    """A live job deletes the newest after rank 0 has listed it: all ranks take the next one, and none says that the
    directory is not shared.
    """
    with Checkpointer(tmp_path / "before/run") as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"epoch": step}).result()
    shutil.copytree(tmp_path / "before", tmp_path / "after")
    shutil.rmtree(tmp_path / "after/run/step-00000002")
    assert values(spawn_ranks(_deleted_for_one, 2, tmp_path, timeout_s=100)) == [(1, 1, 1)] * 2


def _beside_a_job(rank, url):
    """Ranks 0 and 1 hold the bucket's directory and save in it; 2 and 3 read it meanwhile."""
    jobs, readers = dist.new_group([0, 1]), dist.new_group([2, 3])
    if rank < 2:
        with Checkpointer(url, group=jobs) as ckpt:
            for step in (1, 2):
                ckpt.save(step, {"model": {"w": torch.full((1000,), float(step))}, "mine": PerRank(rank)}).result()
                dist.barrier()  # a checkpoint is there
                dist.barrier()  # it was read
        return None
    found = []
    for _ in (1, 2):
        dist.barrier()
        state = {"model": {"w": torch.zeros(1000)}}
        info, newest = safe_ckpt.load(url, state, group=readers), safe_ckpt.newest(url, readers)
        found.append((info.step, newest.step, state["model"]["w"].unique().tolist()))
        dist.barrier()
    return found


def test_a_load_from_a_bucket_that_a_live_job_holds_is_of_one_step(bucket):
    """The address of a directory in an object store is read beside the job that saves there, and as one step alone."""
    outcomes = values(spawn_ranks(_beside_a_job, 4, bucket.url()))
    assert outcomes[2] == outcomes[3] == [(1, 1, [1.0]), (2, 2, [2.0])]
