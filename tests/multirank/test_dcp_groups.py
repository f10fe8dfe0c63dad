"""``safe_ckpt.dcp`` where the ranks are in several groups: what was reported of DCP, and of trainers with their own groups."""

import shutil
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from kit.ranks import spawn_ranks, values
from safe_ckpt import Retention, dcp


def _model(mesh, seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    return fully_shard(model, mesh=mesh)


def _whole(model):
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def _own_collectives(rank, path):
    model = _model(init_device_mesh("cpu", (2,)), 0)
    state = {"model": model.state_dict(), "large": torch.ones(1 << 20)}
    upload = dcp.async_save(state, checkpoint_id=path / "one")
    sums = []
    for number in range(100):
        total = torch.full((4,), float(number))
        dist.all_reduce(total)
        sums.append(total[0].item())
    return sums == [2.0 * number for number in range(100)], sorted(upload.result(60).state_dict_metadata)


def test_a_background_save_does_not_meet_the_programs_own_collectives(tmp_path):
    """Both use WORLD at one time, and neither meets the other's messages: with DCP they hang or give wrong sums.

    Reported in KempnerInstitute/KempnerForge, pull request 105.
    """
    names = [*(f"model.{layer}.{kind}" for layer in (0, 1) for kind in ("bias", "weight"))]
    assert values(spawn_ranks(_own_collectives, 2, tmp_path)) == [(True, ["large", *names])] * 2


def _of_a_mesh(rank, path, order):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=order)
    group, number = mesh.get_group("shard"), mesh["other"].get_local_rank()
    model, again = _model(mesh["shard"], number), _model(mesh["shard"], 9)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path / f"{number}", process_group=group)
    state = {"model": again.state_dict()}
    dcp.load(state, checkpoint_id=path / f"{number}", process_group=group)
    again.load_state_dict(state["model"])
    mine, theirs = _whole(model), _whole(again)
    dist.barrier()  # of the test: rank 0 hosts the group's store
    return number, all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("order", [("other", "shard"), ("shard", "other")])
def test_each_group_of_a_mesh_saves_and_loads_its_own_model(tmp_path, order):
    """A model for each group, neighbours or not, of which one does not have WORLD's rank 0 in it.

    Reported in pytorch/pytorch, issues 118277, 118337 and 152310, and pull request 136854.
    """
    found = values(spawn_ranks(_of_a_mesh, 4, tmp_path, order))
    assert [same for _, same in found] == [True] * 4
    assert sorted(number for number, _ in found) == [0, 0, 1, 1]


def _overlapping(rank, path):
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    for number, group in enumerate(groups):
        if rank in dist.get_process_group_ranks(group):
            dcp.save({"t": torch.full((2,), float(number))}, checkpoint_id=path / f"{number}", process_group=group)
    nothing_on_0 = {} if rank == 0 else {"t": torch.full((2,), 7.0)}
    dcp.save(nothing_on_0, checkpoint_id=path / "all")
    found = []
    for name in ("0", "1", "all"):
        state = {"t": torch.zeros(2)} if rank < 2 else {}
        dcp.load(state, checkpoint_id=path / name)
        found.append(state["t"][0].item() if state else None)
    dist.barrier()
    return found


def test_a_rank_in_two_groups_saves_with_each_and_all_ranks_load(tmp_path):
    """A rank saves with one group and then with another; all load what a part has saved, also those with nothing to load."""
    found = values(spawn_ranks(_overlapping, 3, tmp_path))
    assert found == [[0.0, 1.0, 7.0]] * 2 + [[None] * 3]


def _by_its_members(rank, path):
    mine = rank // 2
    group = dist.new_group([2 * mine, 2 * mine + 1], use_local_synchronization=True)
    if mine:
        time.sleep(1)  # they do it later than the others: nobody waits for them
    begun = time.monotonic()
    dcp.save({"t": torch.full((2,), float(mine))}, checkpoint_id=path / f"{mine}", process_group=group)
    state = {"t": torch.zeros(2)}
    dcp.load(state, checkpoint_id=path / f"{mine}", process_group=group)
    took_s = time.monotonic() - begun
    dist.barrier()
    return state["t"].tolist(), took_s


def test_a_group_made_by_its_members_alone_needs_no_other_rank(tmp_path):
    """``use_local_synchronization``: ranks that are not in it take no part. Reported in huggingface/transformers, 48302."""
    found = values(spawn_ranks(_by_its_members, 4, tmp_path))
    assert [numbers for numbers, _ in found] == [[0.0] * 2] * 2 + [[1.0] * 2] * 2


class Vanishing:
    """Asked for its state, it deletes a checkpoint, as a job beside this one may at that very moment."""

    def __init__(self, newest):
        self.newest, self.loaded = newest, None

    def state_dict(self):
        shutil.rmtree(self.newest, ignore_errors=True)
        return {"step": 0}

    def load_state_dict(self, state_dict):
        self.loaded = state_dict["step"]


def _with_nothing_on_one(rank, path):
    asked = Vanishing(path / "step-2")
    dcp.load({} if rank else {"a": asked}, checkpoint_id=path)
    return asked.loaded


def test_a_rank_with_nothing_to_load_comes_along_to_the_next_checkpoint(tmp_path):
    """The newest vanishes while two ranks load it, one of which asks for nothing: both go on to the one before."""
    for step in (1, 2):
        dcp.save({"a": {"step": step}}, checkpoint_id=tmp_path / f"step-{step}")
    assert values(spawn_ranks(_with_nothing_on_one, 2, tmp_path)) == [1, None]


def _same_ranks(rank, path):
    groups, uploads = [dist.new_group([0, 1]), dist.new_group([0, 1])], []
    for number, group in enumerate(groups):
        state = {"number": number, "large": torch.full((1 << 20,), float(number))}
        uploads.append(dcp.async_save(state, checkpoint_id=path / "one", process_group=group))
    for upload in uploads:
        upload.result(60)
    state = {"number": -1, "large": torch.zeros(1 << 20)}
    dcp.load(state, checkpoint_id=path / "one")
    return state["number"], state["large"].unique().tolist()


def test_two_groups_saving_under_one_name_leave_the_later_as_a_whole(tmp_path):
    """In the background, one after the other: the later one stays, as a whole. DCP's may leave the earlier one."""
    assert values(spawn_ranks(_same_ranks, 2, tmp_path)) == [(1, [1.0])] * 2


def _train_and_roll_out(rank, path):
    trainers, rollouts = dist.new_group([0, 1]), dist.new_group([2, 3])
    over, found = path / "over", []
    if rank < 2:
        dcp.configure(retention=Retention(keep_last=1))
        mesh = DeviceMesh.from_group(trainers, "cpu")
        for step in range(1, 11):
            state = {"w": distribute_tensor(torch.full((64, 256), float(step)), mesh, [Shard(0)]), "step": step}
            dcp.async_save(state, checkpoint_id=path / f"run/step-{step}", process_group=trainers).result()
            if step == 1:
                dist.barrier()
        dist.barrier(group=trainers)
        over.touch()
    else:
        dist.barrier()
        last = False
        while not last:
            flag = torch.tensor([int(over.exists())])
            dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=rollouts)
            last = bool(flag[0])
            state = {"w": torch.zeros(64, 256), "step": 0}
            dcp.load(state, checkpoint_id=path / "run", process_group=rollouts)
            found.append((state["step"], state["w"].unique().tolist()))
    dist.barrier()
    return found


@pytest.mark.timeout(180)
def test_rollout_ranks_load_while_the_trainers_save_and_delete(tmp_path):
    """Each load gives one step as a whole, at last the newest: with one checkpoint kept DCP's loads fail beside such a job."""
    (*_, one, other) = values(spawn_ranks(_train_and_roll_out, 4, tmp_path, timeout_s=120))
    assert one == other
    assert all(numbers == [float(step)] for step, numbers in one)
    assert [step for step, _ in one] == sorted(step for step, _ in one)
    assert one[-1][0] == 10
