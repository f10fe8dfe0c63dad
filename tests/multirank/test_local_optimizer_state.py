"""Optimizers that keep a part of their state on each rank, in tensors that do not say so: refused at the save, by name."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from kit.ranks import spawn_ranks, values
from safe_ckpt import Checkpointer, dcp
from safe_ckpt.adapters import Attempt
from safe_ckpt.adapters.strategy import Whole
from safe_ckpt.dcp.saver import saver_for
from safe_ckpt.errors import StateError

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Keeps(torch.optim.Optimizer):
    """Keeps some state of each parameter.

    Args:
        parameters: to step.
        makes: from a parameter's local part to its state.
    """

    def __init__(self, parameters, makes):
        super().__init__(parameters, {"lr": 0.1})
        self.makes = makes

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self.makes(parameter)


def _local(parameter):
    """As TransformerEngine's FusedAdam has it."""
    return {"exp_avg": torch.ones_like(parameter.to_local()), "step": torch.tensor(1.0)}


OTHERS = {
    "scalars": lambda parameter: {"step": torch.tensor(1.0), "count": 1},
    "factored": lambda parameter: {"row": torch.ones(parameter.shape[0]), "one": torch.ones(1)},
    "8 bits": lambda parameter: {"codes": torch.ones(parameter.numel(), dtype=torch.uint8), "scale": torch.ones(3)},
    "DTensors": lambda parameter: {"exp_avg": torch.ones_like(parameter)},
    "whole": lambda parameter: {"exp_avg": torch.ones(parameter.shape)},
}


def _made(makes):
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = Keeps(model.parameters(), makes)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def _doors(path, model, optimizer):
    """Every way to save: its name, and a function."""
    functions = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    flat = {**functions, "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT)}
    objects = {"model": model, "optimizer": optimizer}

    def save(state):
        with Checkpointer(path / "run") as checkpointer:
            checkpointer.save(1, state)

    def gather(state):
        error = Whole(saver_for(None).engine, lambda _: []).plan(state, Attempt()).error
        if error is not None:
            raise error

    return {
        "objects": lambda: save(objects),
        "a state dict beside the model": lambda: save({**objects, "optimizer": functions["optimizer"]}),
        "state dicts": lambda: save(functions),
        "dcp": lambda: dcp.save(objects, checkpoint_id=path / "dcp-1"),
        "dcp of functions": lambda: dcp.save(functions, checkpoint_id=path / "dcp-2"),
        "dcp of flattened ones": lambda: dcp.save(flat, checkpoint_id=path / "dcp-3"),
        "gathered": lambda: gather(functions),
    }


def _tries(rank, path, makes):
    said = {}
    for name, save in _doors(path, *_made(makes)).items():
        try:
            save()
            said[name] = ""
        except StateError as error:
            said[name] = str(error)
    return said


def _saves_others(rank, path):
    return {kind: list(filter(None, _tries(rank, path / kind, makes).values())) for kind, makes in OTHERS.items()}


@pytest.mark.timeout(300)
def test_plain_state_beside_dtensors_is_refused_by_name_on_all_ranks(tmp_path):
    """By every way to save, and nothing is there afterwards: one rank's would have been saved for all."""
    for said in values(spawn_ranks(_tries, 2, tmp_path, _local)):
        assert len(said) == 7
        for name, text in said.items():
            assert "0.weight" in text or "0: exp_avg" in text, (name, text)
            assert "exp_avg" in text
            assert "torch.optim.AdamW(fused=True)" in text
    assert [name for name in os.listdir(tmp_path / "run") if name.startswith("step-")] == []
    assert [name for name in os.listdir(tmp_path) if name.startswith("dcp-")] == []


@pytest.mark.timeout(300)
def test_other_state_beside_dtensors_is_saved(tmp_path):
    """Scalars, factored and 8-bit states, and what is whole or a DTensor; on one rank its part is the whole."""
    for said in values(spawn_ranks(_saves_others, 2, tmp_path)):
        assert said == {kind: [] for kind in OTHERS}
    assert set(values(spawn_ranks(_tries, 1, tmp_path / "one", _local))[0].values()) == {""}


class Consolidated:
    """What the error says."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.load_state_dict = optimizer.load_state_dict

    def state_dict(self):
        for rank in range(dist.get_world_size()):
            self.optimizer.consolidate_state_dict(to=rank)
            if rank == dist.get_rank():
                state = self.optimizer.state_dict()
        return state


def _zero(seed):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns when it is imported

    torch.manual_seed(seed)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)


def _train(model, optimizer, begin, end):
    for step in range(begin, end):
        optimizer.zero_grad()
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(inputs).square().mean().backward()
        optimizer.step()


def _redundancy(rank, path):
    model, optimizer = _zero(1)
    _train(model, optimizer, 0, 3)
    said = []
    with Checkpointer(path / "run") as checkpointer:
        for save in (
            lambda: checkpointer.save(3, {"model": model, "optimizer": optimizer}),
            lambda: dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path / "dcp-1"),
        ):
            try:
                save()
            except StateError as error:
                said.append(str(error))
        checkpointer.save(3, {"model": model, "optimizer": Consolidated(optimizer)})
        again = _zero(7)
        checkpointer.resume({"model": again[0], "optimizer": Consolidated(again[1])})
    _train(*again, 3, 6)
    _train(model, optimizer, 3, 6)
    same = all(map(torch.equal, model.parameters(), again[0].parameters()))
    return said, same


@pytest.mark.timeout(120)
def test_a_zero_redundancy_optimizer_is_told_what_to_do(tmp_path):
    """On every rank, by both ways; and what it says goes on bit for bit."""
    for said, same in values(spawn_ranks(_redundancy, 2, tmp_path)):
        assert len(said) == 2
        assert all("ZeroRedundancyOptimizer" in text and "consolidate_state_dict(to=rank)" in text for text in said)
        assert same
