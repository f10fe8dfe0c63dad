"""Optimizers that keep a part of their state on each rank, in tensors that do not say so."""

import os
import signal

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
from safe_ckpt.errors import RestoreError, StateError

OF_OBJECTS = ["objects", "dcp"]
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
    """In a state dict, by every way to save, and nothing is there afterwards: one rank's would have been saved for all."""
    for said in values(spawn_ranks(_tries, 2, tmp_path, _local)):
        assert [said.pop(name) for name in OF_OBJECTS] == ["", ""]
        assert len(said) == 5
        for name, text in said.items():
            assert "0.weight" in text or "0: exp_avg" in text, (name, text)
            assert "exp_avg" in text
            assert "Hand over the optimizer itself" in text
            assert "torch.optim.AdamW(fused=True)" in text
    assert [name for name in os.listdir(tmp_path / "run") if name.startswith("step-")] == ["step-00000001"]
    assert [name for name in os.listdir(tmp_path) if name.startswith("dcp-")] == ["dcp-1"]


@pytest.mark.timeout(300)
def test_other_state_beside_dtensors_is_saved(tmp_path):
    """Scalars, factored and 8-bit states, and what is whole or a DTensor; on one rank its part is the whole."""
    for said in values(spawn_ranks(_saves_others, 2, tmp_path)):
        assert said == {kind: [] for kind in OTHERS}
    assert set(values(spawn_ranks(_tries, 1, tmp_path / "one", _local))[0].values()) == {""}


class Momentum(torch.optim.Optimizer):
    """SGD with momentum, in plain tensors of this rank's parts, and beside these in whole ones."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                local, grad = parameter.to_local(), parameter.grad.to_local()
                state = self.state[parameter]
                if not state:
                    state.update(
                        momentum=torch.zeros_like(local), seen=torch.zeros(parameter.shape), step=torch.tensor(0.0)
                    )
                state["step"] += 1
                state["seen"] += 1
                state["momentum"].mul_(0.9).add_(grad.float())
                local.sub_(group["lr"] * state["momentum"])


def _sharded(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, Momentum(model.parameters())


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


MAKES = {"zero": _zero, "plain": _sharded}


def _everything(model, optimizer):
    """What this rank has of weights and state."""
    named = {id(one): name for name, one in model.named_parameters()}
    found = {name: one.detach() for name, one in model.named_parameters()}
    for parameter, state in getattr(optimizer, "optim", optimizer).state.items():
        found.update((f"{named[id(parameter)]}.{key}", one) for key, one in state.items())
    return {name: getattr(one, "_local_tensor", one).clone() for name, one in found.items()}


def _wholes(model, optimizer):
    """Whole weights and moments, from what all ranks have."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, _everything(model, optimizer))
    found = {}
    for name in sorted({name for one in gathered for name in one}):
        parts = [one[name] for one in gathered if name in one]
        divided = isinstance(optimizer, Momentum) and not name.endswith((".seen", ".step"))
        found[name] = torch.cat(parts) if divided else parts[0]
    return found


def _dies(rank, path):
    """Trains to the end, and once more with saves by each door; dies behind the last one, some steps later."""
    for kind, make in MAKES.items():
        parts = make(1)
        _train(*parts, 0, 6)
        torch.save(_everything(*parts), path / f"{kind}-{rank}-6.pt")
        model, optimizer = make(1)
        state = {"model": model, "optimizer": optimizer}
        checkpointer = Checkpointer(path / kind)
        checkpointer.save(0, state)  # no state yet
        _train(model, optimizer, 0, 3)
        checkpointer.save(3, state).result()
        dcp.save(state, checkpoint_id=path / f"{kind}-dcp")
        wholes = _wholes(model, optimizer)
        if rank == 0:
            torch.save(wholes, path / f"{kind}-3.pt")
        _train(model, optimizer, 3, 5)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _resumes(rank, path):
    for kind, make in MAKES.items():
        for door in ("checkpointer", "dcp"):
            model, optimizer = make(7)
            state = {"model": model, "optimizer": optimizer}
            if door == "dcp":
                dcp.load(state, checkpoint_id=path / f"{kind}-dcp")
            else:
                with Checkpointer(path / kind) as checkpointer:
                    assert checkpointer.resume(state).step == 3
            found, wanted = _wholes(model, optimizer), torch.load(path / f"{kind}-3.pt")
            assert found.keys() == wanted.keys(), (kind, door, found.keys(), wanted.keys())
            assert all(torch.equal(found[name], wanted[name]) for name in wanted), (kind, door)
            _train(model, optimizer, 3, 6)
            if dist.get_world_size() == 2:
                found, wanted = _everything(model, optimizer), torch.load(path / f"{kind}-{rank}-6.pt")
                assert found.keys() == wanted.keys(), (kind, door)
                assert all(torch.equal(found[name], wanted[name]) for name in wanted), (kind, door)
            if kind == "plain":
                assert all(type(one) is torch.Tensor for kept in optimizer.state.values() for one in kept.values())


@pytest.mark.timeout(300)
def test_each_rank_gets_back_its_part_of_the_state_of_an_optimizer(tmp_path):
    """A ``ZeroRedundancyOptimizer``, and one with plain tensors beside DTensors: killed, then resumed by both doors.

    On two ranks as a run that never stopped, bit for bit; on three and on one with the same weights and state.
    """
    dead = spawn_ranks(_dies, 2, tmp_path)
    assert [outcome.exit_code for outcome in dead] == [-9, -9], dead
    for count in (2, 3, 1):
        values(spawn_ranks(_resumes, count, tmp_path))


def _alone(rank, path):
    parts = _sharded(1)
    with Checkpointer(path) as checkpointer:
        if dist.get_world_size() == 1:
            _train(*parts, 0, 1)
            checkpointer.save(1, dict(zip(("model", "optimizer"), parts, strict=True)))
            checkpointer.resume(dict(zip(("model", "optimizer"), parts, strict=True)))
        else:
            with pytest.raises(RestoreError, match="resume on one rank"):
                checkpointer.resume(dict(zip(("model", "optimizer"), parts, strict=True)))
            _train(*parts, 0, 1)
            parts[1].state[parts[0][0].weight]["momentum"] = torch.ones(1)
            with pytest.raises(StateError, match=r"0\.weight|0\.bias"):
                checkpointer.save(2, dict(zip(("model", "optimizer"), parts, strict=True)))


@pytest.mark.timeout(120)
def test_plain_tensors_that_do_not_say_what_they_are_are_refused_by_name(tmp_path):
    """Saved on one rank they may be wholes or parts: more ranks do not take them. And parts and others under one key."""
    for count in (1, 2):
        values(spawn_ranks(_alone, count, tmp_path))
