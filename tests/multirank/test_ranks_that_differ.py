"""Ranks that hold other things under one name: refused where one of them would be lost, saved where all can be kept."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from kit.limits import QUICK
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer, PerRank
from safe_ckpt.core.formats.manifest import read_manifest
from safe_ckpt.errors import DesyncError, RestoreError

CONFIG = CheckpointConfig(timeouts=QUICK)


class Stage(torch.nn.Module):
    """One of the layers of a model of four, as a pipeline has them."""

    def __init__(self, layer, width=4):
        super().__init__()
        self.layers = torch.nn.ModuleDict({str(layer): torch.nn.Linear(width, 4)})


class Extra(torch.nn.Linear):
    """Every rank's extra state has another size."""

    def get_extra_state(self):
        return torch.zeros(dist.get_rank() + 1)

    def set_extra_state(self, state):
        pass


class Object:
    """A Stateful of the user's own."""

    def state_dict(self):
        return {"n": 1}

    def load_state_dict(self, state):
        pass


class Other(Object):
    """What stands in for it on the other ranks."""


class Place(Object):
    """The place of one rank in its data, as torchtitan names it."""

    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        return {f"dp_rank_{self.rank}": b"place", "world_size": 2}


def differing(rank):
    """Names to states in which rank 1 holds something that would be lost."""
    stage, trained = Stage(rank), Stage(0, 4 + rank)
    with_state = torch.optim.AdamW(trained.parameters())
    trained.layers["0"](torch.ones(1, 4 + rank)).sum().backward()
    with_state.step()
    return {
        "stages": {"x": stage},
        "state dicts": {"x": stage.state_dict()},
        "shapes": {"x": Stage(0, 4 + rank)},
        "types": {"x": Stage(0).to(torch.float64 if rank else torch.float32)},
        "optimizers": {"x": with_state},
        "optimizers without state": {
            "x": torch.optim.SGD([*Stage(0).parameters(), *(Stage(1).parameters() if rank else ())])
        },
        "kinds of optimizers": {"x": (torch.optim.SGD, torch.optim.AdamW)[rank](Stage(0).parameters())},
        "kinds": {"x": Stage(0) if rank else {"a": 1}},
        "tensors": {"x": torch.zeros(2 + rank)},
        "names of ranks": {"x": {f"dp_rank_{rank}": {"at": 5}, "world_size": 2}},
        "names of ranks with nothing in them": {"x": {f"dp_rank_{rank}": {}, "world_size": 2}},
        "an object with names of ranks": {"x": Place(rank)},
        "names of ranks within": {"x": {"lr": 0.1, "data": {"loader": {f"dp_rank{rank}": 5}}}},
        "names of two kinds of ranks": {"x": {f"dp_rank_{rank}": 1, "pp_rank_0": 1}},
        "nested": {"x": {"a": [1, {"b": torch.zeros(2)}] if rank else [1, None]}},
    }


def equal_enough(rank):
    """What ranks may hold: other values, and nothing or no tensors where rank 0 has some."""
    return {
        "values": {"loss": 0.5 * rank, "best": None if rank else 0.5, "seen": {str(rank): rank}},
        "gathered": {"rank_0": rank, "rank_1": rank},
        "lora": {f"lora_rank_{1}": 8},
        "average": Stage(0) if rank == 0 else None,
        "best": {"best": torch.zeros(2) if rank == 0 else None},
        "stands_in": Other() if rank else Object(),
        "extra": Extra(3, 3),
        "own": PerRank(Stage(rank)),
    }


def _refused_each(rank, folder):
    found = {}
    with Checkpointer(folder, CONFIG) as ckpt:
        for step, (what, state) in enumerate(differing(rank).items()):
            for _ in range(2):  # the plan of a rank that was refused is known
                try:
                    ckpt.save(step, state).result()
                    found[what] = None
                except DesyncError as error:
                    found[what] = str(error)
        for step in (100, 101):
            ckpt.save(step, equal_enough(rank)).result()
    return found


def test_tensors_that_rank_0_would_not_save_are_refused_by_name(tmp_path):
    """Pipeline stages, other shapes, types and kinds under one name: an error on all ranks that names it, and no loss.

    Values that differ, and a rank that holds nothing, are saved as rank 0 has them.
    """
    for found in values(spawn_ranks(_refused_each, 2, str(tmp_path))):
        for what, text in found.items():
            assert text is not None, what
            assert "disagree on state['x']" in text, what
            assert "PerRank" in text, what
        assert found.keys() == differing(0).keys()
    assert read_manifest(tmp_path / "step-00000101").step == 101


# ---------------------------------------------------------------- experts


class Experts(torch.nn.Module):
    """A shared layer, and of four experts those that this rank has. One is never used; each has an extra state."""

    def __init__(self, mine):
        super().__init__()
        self.shared = torch.nn.Linear(4, 4)
        self.experts = torch.nn.ModuleDict({f"e{n}": Extra(4, 4) for n in mine})
        self.idle = torch.nn.ModuleDict({f"e{n}": torch.nn.Linear(4, 4) for n in mine})
        self.scale = torch.nn.ParameterDict({f"e{n}": torch.nn.Parameter(torch.ones(3)) for n in mine})

    def forward(self, x):
        x = self.shared(x)
        for name, expert in self.experts.items():
            x = x + expert(x) * self.scale[name].sum()
        return x


def experts(rank, groups):
    """Every group of ranks has experts of its own, sharded over that group; what is ``scale`` is no DTensor."""
    world, size = dist.get_world_size(), dist.get_world_size() // groups
    both = init_device_mesh("cpu", (groups, size), mesh_dim_names=("group", "shard"))
    group, each = rank // size, 4 // groups
    torch.manual_seed(group)
    model = Experts(range(group * each, group * each + each))
    with torch.no_grad():
        model.shared.weight.fill_(0.1)
        model.shared.bias.fill_(0.2)
    for part in (*model.experts.values(), *model.idle.values()):
        fully_shard(part, mesh=both["shard"])
    fully_shard(model.shared, mesh=init_device_mesh("cpu", (world,)))
    everything = list(model.parameters())
    groups_of_it = [{"params": everything[:2], "lr": 0.25}, {"params": everything[2:], "lr": 0.125}]
    return model, torch.optim.AdamW(groups_of_it)


def step_of(model, optimizer):
    torch.manual_seed(dist.get_rank())
    model(torch.randn(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def content(model, optimizer):
    """Whole tensors by name, of those that this rank has."""

    def full(value):
        return (value.full_tensor() if isinstance(value, DTensor) else value).clone()

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {name: full(value) for name, value in model.state_dict().items() if "_extra_state" not in name}
    for parameter, state in list(optimizer.state.items()):
        found.update({f"{names[id(parameter)]}/{key}": full(value) for key, value in state.items()})
    return found


def _save_experts(rank, folder):
    model, optimizer = experts(rank, 2)
    with Checkpointer(folder, CONFIG) as ckpt:
        ckpt.save(0, {"model": model, "optimizer": optimizer, "dict": {"m": model.state_dict(), "n": 1}}).result()
        step_of(model, optimizer)
        ckpt.save(1, {"model": model, "optimizer": optimizer, "dict": {"m": model.state_dict(), "n": 1}}).result()
        return content(model, optimizer)


def _resume_experts(rank, folder, groups, expected):
    model, optimizer = experts(rank, groups)
    step_of(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "dict": {"m": model.state_dict(), "n": 0}}
    names = list(state["dict"]["m"])
    with Checkpointer(folder, CONFIG) as ckpt:
        assert ckpt.resume(state, step=0).step == 0
        assert not optimizer.state
        for group in optimizer.param_groups:
            group["lr"] = 0.5
        assert ckpt.resume(state, step=1).step == 1
        assert list(state["dict"]["m"]) == names  # nothing of the other ranks' experts
        assert state["dict"]["n"] == 1
        for name, value in content(model, optimizer).items():
            assert torch.equal(value, expected[name]), name
        assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]
        assert len(optimizer.state) == sum(1 for name, _ in model.named_parameters() if "idle" not in name)
        step_of(model, optimizer)
        stepped = [p for name, p in model.named_parameters() if "scale" not in name]
        other = torch.optim.AdamW([{"params": stepped[:2]}, {"params": stepped[2:]}])
        failed = []
        for items in ({"model": Experts([0, 1])}, {"model": model, "optimizer": other}):
            try:
                ckpt.resume(items, step=1)
            except RestoreError as error:
                failed.append(str(error))
    return failed


def test_experts_of_which_ranks_have_others_are_saved_and_go_on(tmp_path):
    """``e0`` and ``e1`` on ranks 0 and 1, ``e2`` and ``e3`` on ranks 2 and 3: weights, optimizer, rates, plain tensors.

    Resumed with as many groups, and on one rank that has all of them. What no rank has a place for is refused.
    """
    saved = values(spawn_ranks(_save_experts, 4, str(tmp_path)))
    expected = {**saved[0], **saved[2]}
    for world, groups in ((4, 2), (1, 1)):
        for failed in values(spawn_ranks(_resume_experts, world, str(tmp_path), groups, expected)):
            assert "no place for" in failed[0]
            assert "experts.e2.weight" in failed[0]
            assert "does not step" in failed[1]
            assert "scale.e0" in failed[1]


def _same_name(rank, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
    found = []
    with Checkpointer(folder, CONFIG) as ckpt:
        for here, there in ((torch.zeros(4), torch.zeros(6)), (torch.zeros(4), torch.zeros(4).double())):
            state = {"w": {"t": distribute_tensor(here if rank < 2 else there, mesh, [Shard(0)], src_data_rank=None)}}
            with pytest.raises(DesyncError) as caught:
                ckpt.save(1, state)
            found.append(str(caught.value))
        part = distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None)
        for state in (
            {"t": part, "p": torch.zeros(2 + rank)},
            {"t": part, "p": {"q": torch.ones(2)} if rank else None},
        ):
            with pytest.raises(DesyncError) as caught:
                ckpt.save(1, {"w": state})
            found.append(str(caught.value))
        ckpt.save(2, {"w": {"t": part, "p": {"q": rank} if rank else None}}).result()
        back = {"w": {"t": part, "p": 3}}
        ckpt.resume(back)
        assert back["w"]["p"] is None  # what is no tensor is as rank 0 had it
    return found


def test_other_tensors_under_one_name_of_a_sharded_item_are_refused(tmp_path):
    """Another shape or type of a DTensor or of a tensor beside it: an error that names it, and what the ranks have."""
    for found in values(spawn_ranks(_same_name, 4, str(tmp_path))):
        for text, (name, sizes) in zip(
            found, [("t", "(6,)"), ("t", "float64"), ("p", "(3,)"), ("p.q", "(2,)")], strict=True
        ):
            assert f"state['w']: {name}" in text
            assert sizes in text


def _two_meshes(rank, folder):
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))["shard"], []
    kinds = {"sharded": [Shard(0)], "whole": [Replicate()]}
    for kind, placements in kinds.items():
        with Checkpointer(f"{folder}/{kind}", CONFIG) as ckpt:
            part = distribute_tensor(torch.arange(4.0), mesh, placements, src_data_rank=None)
            for step, more in enumerate((7, 1, rank // 2), 1):  # replicas are stepped alike, and then are not
                part.to_local().add_(more)  # in the memory of the save before
                state = {"w": {"t": part}, "n": step}
                try:
                    ckpt.save(step, state).result()
                except DesyncError as error:
                    found.append(str(error))
            part.to_local().zero_()
            found.append((ckpt.resume(state).step, part.full_tensor().tolist()))
    return found


def test_one_name_on_two_meshes_is_saved_where_the_values_are_the_same(tmp_path):
    """Replicas of a sharded tensor are one tensor. Others would be lost: refused by name, also when they differ later."""
    for found in values(spawn_ranks(_two_meshes, 4, str(tmp_path))):
        for text, back in (found[:2], found[2:]):
            assert "disagree on state['w']: t" in text
            assert "ranks [2]: other values on the mesh that begins with rank 2" in text
            assert back == (2, [8.0, 9.0, 10.0, 11.0])
