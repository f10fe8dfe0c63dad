"""What ``Checkpointer`` saves of sharded items is one checkpoint of ``torch.distributed.checkpoint``."""

import contextlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsdp_runs import CONFIG, build, same, train_and_save, whole
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import safe_ckpt.dcp
from kit.ranks import spawn_ranks, values
from safe_ckpt import Checkpointer


def test_stock_tools_read_what_was_written(tmp_path):
    """``dcp.load`` of model and optimizer at once, stock and ours, and DCP's own conversion to one file."""
    taken, rate = values(spawn_ranks(train_and_save, 2, 2, str(tmp_path), None, "eager", True))[0]
    folder = tmp_path / "step-00000002"
    one_rank = pytest.warns(UserWarning, match="single process")
    for load, quiet in ((dcp.load, one_rank), (safe_ckpt.dcp.load, contextlib.nullcontext())):
        state = {
            "model": {name: torch.zeros_like(value) for name, value in taken.items() if "/" not in name},
            "optimizer": {"state": {"0.weight": {"exp_avg": torch.zeros_like(taken["0.weight/exp_avg"])}}},
        }
        with quiet:
            load(state, checkpoint_id=folder, no_dist=True)
        for name, value in state["model"].items():
            assert torch.equal(value, taken[name])
        assert torch.equal(state["optimizer"]["state"]["0.weight"]["exp_avg"], taken["0.weight/exp_avg"])
    dcp_to_torch_save(folder, tmp_path / "one.pt")
    loaded = torch.load(tmp_path / "one.pt", weights_only=True)
    assert torch.equal(loaded["optimizer"]["state"]["0.weight"]["exp_avg"], taken["0.weight/exp_avg"])
    assert loaded["optimizer"]["param_groups"][0]["lr"] == rate


def _like_torch(rank, folder):
    model, optimizer = build(2)
    names, state = get_state_dict(model, optimizer)
    dcp.load({"model": names, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=names, optim_state_dict=state)
    return whole(model, optimizer)


def test_torchs_own_recipe_resumes_from_it(tmp_path):
    """``get_state_dict``, ``dcp.load`` of the checkpoint and ``set_state_dict``, on two ranks: bit for bit."""
    taken = values(spawn_ranks(train_and_save, 2, 2, str(tmp_path), None, "eager", True))[0]
    for found in values(spawn_ranks(_like_torch, 2, str(tmp_path / "step-00000002"))):
        same(found, taken)


def _bare(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    with Checkpointer(folder, CONFIG) as ckpt:
        ckpt.save(1, {"w": weight, "more": {"b": weight, "n": 3}}).result()
    room = {"w": torch.zeros(8)}
    dcp.load(room, checkpoint_id=f"{folder}/step-00000001")
    state = {"w": distribute_tensor(torch.zeros(8), mesh, [Replicate()]), "more": {"b": torch.zeros(8), "n": 0}}
    with Checkpointer(folder, CONFIG) as ckpt:
        ckpt.resume(state)
    return room["w"].tolist(), state["w"].full_tensor().tolist(), state["more"]["b"].tolist(), state["more"]["n"]


def test_a_tensor_lies_under_its_own_name(tmp_path):
    """An item that is one DTensor is a name of the checkpoint, as in a state dict that stock ``dcp.save`` would get."""
    numbers = [*map(float, range(8))]
    assert values(spawn_ranks(_bare, 2, str(tmp_path))) == [(numbers, numbers, numbers, 3)] * 2
