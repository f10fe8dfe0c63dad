"""Sharded items that are as they were at the save before are not planned again; whatever has changed is, on every rank."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from kit.limits import QUICK
from kit.ranks import spawn_ranks, values
from safe_ckpt import CheckpointConfig, Checkpointer
from safe_ckpt.adapters import Attempt
from safe_ckpt.adapters.strategy import Sharded
from safe_ckpt.core.saving.engine import Engine
from safe_ckpt.errors import StateError


def build(world):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 5), torch.nn.BatchNorm1d(5))
    mesh = init_device_mesh("cpu", (world,))
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    step(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def step(model, optimizer):
    torch.manual_seed(dist.get_rank())
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def content(state):
    """All values of a state that every rank has, whole. A collective."""
    state["model"].state_dict()  # FSDP2 shows sharded parameters again
    found = {}
    for name, tensor in state["model"].named_parameters():
        found[name] = tensor.detach().full_tensor()
    for number, slots in state["optimizer"].state_dict()["state"].items():
        for key, value in slots.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{number}.{key}"] = whole.clone() if isinstance(whole, torch.Tensor) else whole
    found["groups"] = copy.deepcopy(state["optimizer"].state_dict()["param_groups"])
    return found


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        equal = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else repr(value) == repr(other[name])
        assert equal, name


def trained(state, rank):
    step(state["model"], state["optimizer"])


def slower(state, rank):
    step(state["model"], state["optimizer"])
    state["optimizer"].param_groups[0]["lr"] *= 0.5
    state["optimizer"].param_groups[0]["betas"] = (0.5, 0.25)


def looked_at(state, rank):
    state["model"](torch.randn(4, 6))  # leaves whole parameters in the module


def other_memory(state, rank):
    if rank == 1:
        optimizer = state["optimizer"]
        first = next(iter(optimizer.state.values()))
        first["exp_avg"] = first["exp_avg"].clone()


def another_option(state, rank):
    state["optimizer"].param_groups[0]["maximize"] = True


def longer_text(state, rank):
    state["optimizer"].param_groups[0]["note"] = "x" * 300


def growing_text(state, rank):
    group = state["optimizer"].param_groups[0]
    group["note"] = group.get("note", "") + "x" * (100 + rank)


def without_state(state, rank):
    state["optimizer"].state.clear()


def another_dtype(state, rank):
    for slots in state["optimizer"].state.values():
        slots["exp_avg_sq"] = slots["exp_avg_sq"].double()


def renamed(state, rank):
    parts = state["model"]._modules
    parts["last"] = parts.pop(list(parts)[-1])


def counted_in_its_state(state, rank):
    for slots in state["optimizer"].state.values():
        slots["seen"] = slots.get("seen", 0.5) + 1.0


KNOWN = [trained, slower, looked_at]
ANEW = [
    other_memory,
    another_option,
    longer_text,
    growing_text,
    without_state,
    another_dtype,
    renamed,
    counted_in_its_state,
]


def _save_changed(rank, folder, change):
    planned, original = [], DefaultSavePlanner.create_local_plan

    def note(self):
        planned.append(rank)
        return original(self)

    DefaultSavePlanner.create_local_plan = note
    state, expected, counts = build(dist.get_world_size()), {}, []
    with Checkpointer(folder, CheckpointConfig(timeouts=QUICK)) as ckpt:
        for number in (1, 2, 3, 4):
            if number > 2:
                change(state, rank)
            planned.clear()
            ckpt.save(number, state).result()
            counts.append(len(planned))
            expected[number] = content(state)
    return counts, expected if rank == 0 else None


def _resume_each(rank, folder, change, expected):
    state = build(dist.get_world_size())
    if change is renamed:
        change(state, rank)
    with Checkpointer(folder, CheckpointConfig(timeouts=QUICK)) as ckpt:
        for number in (3, 4):
            ckpt.resume(state, step=number)
            same(expected[number], content(state))


SHORT = (slower, looked_at, other_memory, growing_text, counted_in_its_state)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, id=change.__name__, marks=() if change in SHORT else pytest.mark.thorough)
        for change in (*KNOWN, *ANEW)
    ],
)
def test_a_plan_is_made_again_when_something_has_changed_and_only_then(tmp_path, change):
    """FSDP2 and AdamW: 4 saves, a change before the third and fourth. Resumed by another number of ranks, equal to the bit."""
    outcomes = values(spawn_ranks(_save_changed, 2, str(tmp_path), change, timeout_s=100))
    for rank, (counts, _) in enumerate(outcomes):
        assert counts[:2] == [2, 0]
        if change in KNOWN:
            assert counts[2:] == [0, 0]
        else:
            assert counts[2] > 0 or (change is other_memory and rank == 0)
    values(spawn_ranks(_resume_each, 3, str(tmp_path), change, outcomes[0][1], timeout_s=100))


class _Fails:
    def __init__(self, wanted):
        self.wanted = wanted

    def state_dict(self):
        if self.wanted:
            raise ValueError("mine")
        return {"a": 1}

    def load_state_dict(self, state):
        pass


def _fail_between(rank, folder):
    state = build(2)
    with Checkpointer(folder, CheckpointConfig(timeouts=QUICK)) as ckpt:
        for number in (1, 2):
            ckpt.save(number, {**state, "more": _Fails(False)}).result()
        with pytest.raises((StateError, RuntimeError, ValueError), match="mine"):
            ckpt.save(3, {**state, "more": _Fails(rank == 1)})
        trained(state, rank)
        ckpt.save(4, {**state, "more": _Fails(False)}).result()
        expected = content(state)
        trained(state, rank)
        ckpt.resume(state, step=4)
        same(expected, content(state))


def test_after_a_save_that_one_rank_could_not_plan_the_next_is_right(tmp_path):
    """What is remembered on the ranks goes on fitting together."""
    values(spawn_ranks(_fail_between, 2, str(tmp_path), timeout_s=100))


class Wrapper(torch.nn.Module):
    """Saves its state in its own way, so it is planned each time."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def state_dict(self, *args, **options):
        return super().state_dict(*args, **options)


def _wrap_later(rank, folder):
    state = build(2)
    with Checkpointer(folder, CheckpointConfig(timeouts=QUICK)) as ckpt:
        for number in (1, 2):
            ckpt.save(number, state).result()
        wrapped = {"first": Wrapper(state["model"]), **state}
        for number in (3, 4):
            ckpt.save(number, wrapped).result()
        expected = content(state)
        trained(state, rank)
        ckpt.resume(wrapped, step=4)
        same(expected, content(state))
    return [names_in(folder, number) for number in (1, 2, 3, 4)]


def names_in(folder, step):
    """The names under which the moments of the first parameter are saved."""
    reader = FileSystemReader(f"{folder}/step-{step:08d}")
    names = reader.read_metadata().state_dict_metadata
    return sorted(name for name in names if name.endswith("0.weight.exp_avg") and name.startswith("optimizer."))


def test_an_optimizer_is_saved_by_the_names_of_the_module_that_it_would_get_now(tmp_path):
    """A wrapper that comes first in the state later on gives its parameters other names."""
    for found in values(spawn_ranks(_wrap_later, 2, str(tmp_path), timeout_s=100)):
        bare, wrapped = ["optimizer.state.0.weight.exp_avg"], ["optimizer.state.inner.0.weight.exp_avg"]
        assert found == [bare, bare, wrapped, wrapped]


def _delete(rank, folder):
    state = build(2)
    alive = [weakref.ref(state["model"]), weakref.ref(state["optimizer"])]
    alive += [weakref.ref(slots["exp_avg"]) for slots in state["optimizer"].state.values()]
    with Checkpointer(folder, CheckpointConfig(timeouts=QUICK)) as ckpt:
        for number in (1, 2, 3):
            ckpt.save(number, state).result()
        del state
        gc.collect()
        return [ref() is None for ref in alive]


def test_what_is_remembered_keeps_no_sharded_state_alive(tmp_path):
    """Neither the model nor the optimizer, nor its tensors."""
    for gone in values(spawn_ranks(_delete, 2, str(tmp_path), timeout_s=100)):
        assert all(gone), gone


def _as_adapters_do(rank, folder):
    planned, original = [], DefaultSavePlanner.create_local_plan

    def note(self):
        planned.append(rank)
        return original(self)

    DefaultSavePlanner.create_local_plan = note
    state = build(2)
    engine = Engine(CheckpointConfig(timeouts=QUICK))
    sharded, counts = Sharded(engine), []
    for number in range(4):
        weights, moments = get_state_dict(state["model"], state["optimizer"])
        if number == 3:
            moments["param_groups"][0]["maximize"] = True
        planned.clear()
        (file, *_) = sharded.plan({"model": weights, "optimizer": moments}, Attempt()).files
        counts.append(len(planned))
        held = {tensor.data_ptr() for _, tensor in file.tensors}
        parts = [part.to_local() for part in weights.values() if isinstance(part, DTensor)]
        assert held >= {part.data_ptr() for part in parts if part.numel()}
        trained(state, rank)
    engine.close()
    return counts


def test_the_state_dicts_of_frameworks_are_known_as_well(tmp_path):
    """``get_state_dict`` makes other objects each time; they show the same memory, and only a change is planned anew."""
    for counts in values(spawn_ranks(_as_adapters_do, 2, str(tmp_path), timeout_s=100)):
        assert counts == [2, 0, 0, 1]
