"""A program in ``torch.inference_mode()`` saves, resumes and exports as anywhere: what it gets can be trained with later.

An inference tensor can never be changed outside of that mode, and a DTensor cannot be detached in it: torch's own
``state_dict`` of a model under FSDP2 fails there. A default type is tried with the same programs.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from safe_ckpt import CheckpointConfig, Checkpointer, load


@contextlib.contextmanager
def default_type(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {"inference": torch.inference_mode, "float64": lambda: default_type(torch.float64)}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


@pytest.fixture(params=["whole", "sharded"])
def made(request):
    """Return a function that makes a state, from a seed; ``fresh``: its optimizer has not stepped."""
    sharded = request.param == "sharded"
    if sharded:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def make(seed, *, fresh=False):
        torch.manual_seed(seed)
        layers = [
            torch.nn.Linear(4, 8),
            torch.nn.Identity() if sharded else torch.nn.BatchNorm1d(8),
            torch.nn.Linear(8, 2),
        ]
        model = torch.nn.Sequential(*layers)
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        state = {
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters()),
            "data": {"t": torch.rand(3), "n": seed},
        }
        if fresh:
            state["data"] = {}
        else:
            train(state)
        return state

    yield make
    if sharded:
        dist.destroy_process_group()


def train(state):
    torch.manual_seed(5)
    state["model"](torch.randn(5, 4)).sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    if state["data"]:
        state["data"]["t"].add_(1)


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def values(state):
    found = {name: whole(tensor) for name, tensor in state["model"].state_dict().items()}
    for number, kept in enumerate(state["optimizer"].state.values()):
        found |= {f"{number}.{key}": whole(tensor) for key, tensor in kept.items()}
    return {**found, "t": state["data"]["t"].clone(), "n": torch.tensor(state["data"]["n"])}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert torch.equal(one[name], other[name]), name


@modes
@pytest.mark.parametrize("snapshot", ["eager", "overlapped"])
def test_saves_in_and_outside_of_the_mode_take_turns(tmp_path, made, mode, snapshot):
    """Each has the values of its step, also where training goes on at once; nothing that one leaves is in the other's way."""
    state, expected = made(1), {}
    with Checkpointer(tmp_path, CheckpointConfig(snapshot=snapshot)) as ckpt:
        for step in range(1, 4):
            with mode() if step % 2 else contextlib.nullcontext():
                handle = ckpt.save(step, state)
            expected[step] = values(state)
            if state["data"]:
                handle.wait_snapshot()
            train(state)
            handle.result(timeout_s=30)
    found = made(2)
    for step, before in expected.items():
        load(tmp_path, found, step=step)
        assert_equal(values(found), before)


@modes
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "trained"])
@pytest.mark.parametrize("way", ["resume", "load"])
def test_what_was_restored_in_the_mode_is_trained_with_outside(tmp_path, made, mode, fresh, way):
    """All that the optimizer has is the checkpoint's, and the next step is that of a run that never stopped."""
    state, found = made(1), made(2, fresh=fresh)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state).result(timeout_s=30)
    if way == "load":
        with mode():
            load(tmp_path, found)
    else:
        with Checkpointer(tmp_path) as ckpt, mode():
            assert ckpt.resume(found).step == 1
    assert_equal(values(found), values(state))
    for one in (state, found):
        train(one)
    assert_equal(values(found), values(state))


@modes
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_an_optimizer_of_another_type_that_was_restored_in_the_mode_steps_outside(tmp_path, mode, dtype):
    """Its moments are made anew, in the type of its parameters: it can be trained with as one that was restored outside."""
    model = torch.nn.Linear(4, 2)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    train({**state, "data": {}})
    found = []
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state).result(timeout_s=30)
        for within in (mode, contextlib.nullcontext):
            model = torch.nn.Linear(4, 2).to(dtype)
            other = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
            with within():
                ckpt.resume(other)
            model(torch.ones(1, 4, dtype=dtype)).sum().backward()
            other["optimizer"].step()
            found.append(model.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@modes
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_an_export_in_the_mode_has_the_weights(tmp_path, made, mode, dtype):
    """Gathered or converted, and as they are."""
    from safetensors.torch import load_file

    model = made(1)["model"]
    with Checkpointer(tmp_path / "run") as ckpt, mode():
        ckpt.export(model, tmp_path / "out", dtype=dtype).result(timeout_s=30)
    found = load_file(tmp_path / "out" / "model.safetensors")
    weight = whole(model.state_dict()["0.weight"])
    assert torch.equal(found["0.weight"], weight if dtype is None else weight.to(dtype))


def test_parameters_made_in_inference_mode_are_copied_at_once(tmp_path):
    """They have no version that would tell of a change, so none is deferred, also where an optimizer has them."""
    with torch.inference_mode():
        model = torch.nn.Linear(3, 3)
        state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with Checkpointer(tmp_path, CheckpointConfig(snapshot="overlapped")) as ckpt:
        for step in (1, 2, 3):
            handle = ckpt.save(step, state)
            expected = whole(model.weight)
            with torch.inference_mode():
                model.weight.add_(1)
            handle.result(timeout_s=30)
            ckpt.resume({"model": model})
            assert torch.equal(whole(model.weight), expected)


class Average:
    """An object of the user's, whose values were made in the mode in which it is loaded."""

    def __init__(self):
        self.value = torch.ones(3)

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value.copy_(state["value"])
        self.value.add_(0)


def test_an_object_of_the_users_is_loaded_in_the_mode_of_the_call(tmp_path):
    """It may change its inference tensors, which it could not outside; and no gradient is wanted within no_grad."""
    with torch.inference_mode():
        average = Average()
    leaf = Average()
    leaf.value.requires_grad_()
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"average": Average()}).result(timeout_s=30)
        with torch.inference_mode():
            average.value.zero_()
            ckpt.resume({"average": average})
        with torch.no_grad():
            leaf.value.zero_()
            ckpt.resume({"average": leaf})
    assert average.value.tolist() == leaf.value.tolist() == [1, 1, 1]
