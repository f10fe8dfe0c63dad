"""``group=``: models that live on a part of the ranks, each part with a job's directory of its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import safe_ckpt
from kit import limits
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.errors import SafeCheckpointError

QUICK = CheckpointConfig(timeouts=limits.QUICK)


def _model(seed, group=None):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    if group is not None:
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    return model


def _whole(model):
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]


def _two_models(rank, path):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = rank // 2
    model = _model(half, groups[half])
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with Checkpointer(path / "ab"[half], QUICK, group=groups[half]) as ckpt:
        resumed = ckpt.resume(state)
        for _ in range(2 + half):  # one of them saves more often
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            state["step"] += 1
            ckpt.save(state["step"], state)
    dist.barrier()  # of all: rank 0 hosts the store of the process group
    return resumed and resumed.step, state["step"], _whole(model)


def test_disjoint_groups_save_models_of_their_own(tmp_path):
    """Two sharded models on two ranks each are saved side by side, at paces of their own, and each goes on where it was."""
    first = values(spawn_ranks(_two_models, 4, tmp_path))
    again = values(spawn_ranks(_two_models, 4, tmp_path))
    assert [(resumed, step) for resumed, step, _ in first] == [(None, 2), (None, 2), (None, 3), (None, 3)]
    assert [(resumed, step) for resumed, step, _ in again] == [(2, 4), (2, 4), (3, 6), (3, 6)]
    assert all(map(torch.equal, again[0][2], again[1][2]))
    assert not any(map(torch.equal, again[0][2], again[2][2]))


def _trainer_and_rollout(rank, path):
    trainers, rollouts = dist.new_group([0, 1]), dist.new_group([2, 3])
    read = []
    if rank < 2:
        model = _model(1, trainers)
        with Checkpointer(path, QUICK, group=trainers) as ckpt:
            for step in (1, 2):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(1)
                ckpt.save(step, {"model": model}).result()
                dist.barrier()  # of all ranks: a checkpoint is there
                dist.barrier()  # and was read, while the directory is held
                read.append(_whole(model))
    else:
        model = _model(7)
        for step in (1, 2):
            dist.barrier()
            assert safe_ckpt.load(path, {"model": model}, group=rollouts).step == step
            read.append(_whole(model))
            dist.barrier()
    return read


def test_rollout_ranks_read_what_the_trainers_save(tmp_path):
    """Trainer ranks save in shards and hold the directory. The other ranks of the job load each one, whole, meanwhile."""
    found = values(spawn_ranks(_trainer_and_rollout, 4, tmp_path / "run"))
    for step in range(2):
        for other in found[1:]:
            assert all(map(torch.equal, found[0][step], other[step]))


def _only_one_group(rank, path):
    group = dist.new_group([1, 2])
    if rank == 0:
        dist.barrier()  # it hosts the store of the process group
        return "never asked"
    try:
        with Checkpointer(path, QUICK, group=group) as ckpt:
            ckpt.save(1 if rank == 1 else 2, {"step": 1})
    except SafeCheckpointError as error:
        first = error
    with Checkpointer(path, QUICK, group=group) as ckpt:
        ckpt.save(3, {"step": 3})
    dist.barrier()
    return first


def test_a_rank_outside_takes_no_part(tmp_path):
    """A rank that is not in the group is not waited for. Errors count ranks as the group does, and name what differs."""
    found = values(spawn_ranks(_only_one_group, 3, tmp_path / "run"))
    assert found[0] == "never asked"
    for error in found[1:]:
        assert "step" in str(error)
        assert "rank 2" not in str(error)
    assert safe_ckpt.newest(tmp_path / "run").step == 3


def _stranger(rank, path):
    group = dist.new_group([0])
    said = None
    try:
        with Checkpointer(path, QUICK, group=group):
            pass
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    dist.barrier()
    return said


def test_a_rank_that_is_not_in_the_group_is_refused(tmp_path):
    """A rank that is given a group without it raises ``ConfigError`` at once; the group's own ranks are not held up."""
    found = values(spawn_ranks(_stranger, 2, tmp_path / "run"))
    assert found[0] is None
    assert "ConfigError" in found[1]
    assert "a process group that this rank is in" in found[1]
