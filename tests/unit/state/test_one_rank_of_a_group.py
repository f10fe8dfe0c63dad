"""Sharded states of a job of one rank, in this process: what a plan remembers of them, and where they are read into."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from safe_ckpt import Checkpointer, load
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.core.state import fingerprint
from safe_ckpt.core.state.items import items_of


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def spread(local, mesh, placement):
    return DTensor.from_local(local, mesh, [placement], run_check=False)


def test_a_part_that_lies_otherwise_in_the_same_memory_is_planned_anew(mesh):
    """How a tensor is spread is part of what a plan depends on, also beside tensors that are whole."""
    whole, local = torch.ones(2), torch.zeros(4, 2)

    def view(placement):
        return fingerprint.of(fingerprint.of_data, {"whole": whole, "part": spread(local, mesh, placement)})

    rows = view(Shard(0))
    assert rows.sharded
    known = rows.remember()
    assert known.same_as(view(Shard(0)))
    assert not known.same_as(view(Shard(1)))
    assert not known.same_as(view(Replicate()))


def test_a_tensor_that_is_still_to_be_reduced_is_refused_as_a_target(mesh):
    """What is read into one part of a sum would be added to the others' parts."""
    loaded = {"t": torch.ones(4)}
    for placement in (Shard(0), Replicate()):
        (item,) = items_of({"x": {"t": spread(torch.zeros(4), mesh, placement)}})
        item.fit(loaded)
    (item,) = items_of({"x": {"t": spread(torch.zeros(4), mesh, Partial())}})
    with pytest.raises(ValueError, match="still to be reduced"):
        item.fit(loaded)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.first(x))


def job(mesh, seed):
    torch.manual_seed(seed)
    net = Net()
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    part = spread(torch.full((4,), float(seed)), mesh, Shard(0))
    data = {"parts": [spread(torch.full((2, 2), float(seed)), mesh, Shard(1))], "n": seed}
    return {"net": net, "optimizer": optimizer, "tensor": part, "data": data, "plain": {"seed": seed}}


def step(state):
    state["net"](torch.ones(3, 4)).square().sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def content(state):
    found = {f"net.{name}": value for name, value in state["net"].state_dict().items()}
    for number, one in enumerate(state["optimizer"].state.values()):
        found |= {f"optimizer.{number}.{key}": value for key, value in one.items()}
    found |= {"tensor": state["tensor"], "part": state["data"]["parts"][0]}
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
    return {name: value.tolist() for name, value in whole.items()}, state["data"]["n"], state["plain"]


def test_a_sharded_state_of_one_rank_goes_on(tmp_path, mesh):
    """Modules, optimizers, tensors and data that are sharded over one rank are each an item that a resume and a load take."""
    state = job(mesh, 1)
    step(state)
    expected = content(state)
    with Checkpointer(tmp_path) as ckpt:
        for number in (1, 2):  # the second one as it was planned
            info = ckpt.save(number, state).result()
        fresh = job(mesh, 2)
        ckpt.resume(fresh)
    assert content(fresh) == expected
    forms = {name: said["form"] for name, said in read_manifest(info.path).items.items()}
    assert forms == {**dict.fromkeys(("net", "optimizer", "tensor", "data"), "sharded"), "plain": "value"}
    again = job(mesh, 3)
    load(tmp_path, again)
    assert content(again) == expected
    step(state)
    step(again)
    assert content(again) == content(state)


def test_what_a_forward_pass_left_unsharded_is_looked_at_as_it_is_saved(mesh):
    """A forward pass without a backward one leaves whole parameters; what is saved, and remembered, are the parts."""
    net = fully_shard(Net(), mesh=mesh)
    known = fingerprint.of(fingerprint.of_module, net).remember()
    with torch.no_grad():
        net(torch.ones(1, 4))
    assert not any(isinstance(one, DTensor) for one in net.parameters())
    view = fingerprint.of(fingerprint.of_module, net)
    assert view.sharded
    assert known.same_as(view)


def test_a_hook_of_the_user_before_the_state_dict_is_run_at_each_save(tmp_path):
    """Nothing tells what it changes, so such a module is never taken for known."""
    net = torch.nn.Linear(2, 2)
    net.register_buffer("asked", torch.zeros(1))
    net.register_state_dict_pre_hook(lambda module, *_: module.asked.add_(1))
    assert fingerprint.of(fingerprint.of_module, net) is None
    found = []
    with Checkpointer(tmp_path) as ckpt:
        for number in (1, 2, 3):
            before = net.asked.item()
            ckpt.save(number, {"net": net}).result()
            found.append(net.asked.item() > before)
    assert found == [True, True, True]
