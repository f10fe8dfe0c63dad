"""A program that has set torch's default device, or its default type: its checkpoints are the same.

Of sharded states tests/unit/test_tree.py sees that each tensor says where it is: on meta, torch cannot cut them itself.
"""

import random

import pytest
import torch

from safe_ckpt import CheckpointConfig, Checkpointer, RngState, load


@pytest.fixture
def default_device():
    """Meta: whatever is made there by mistake has no values, and every use of them fails."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def trained(seed):
    with torch.device("cpu"):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "loose": {"t": torch.arange(6, device="cpu").view(2, 3).t()}}


def values(state):
    with torch.device("cpu"):
        found = {**state["model"].state_dict(), "loose": state["loose"]["t"]}
        found |= {f"{n}.{k}": v for n, of in state["optimizer"].state_dict()["state"].items() for k, v in of.items()}
        return {name: value.detach().clone() for name, value in found.items()}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].device.type == "cpu", name
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("snapshot", ["eager", "overlapped"])
def test_a_job_goes_on_under_a_default_device(tmp_path, default_device, snapshot):
    """A first save, a second one of the same layout, a resume into another state, and a look from beside."""
    state, fresh, seen = trained(1), trained(2), trained(3)
    config = CheckpointConfig(snapshot=snapshot, record_events=False)
    with Checkpointer(tmp_path / "run", config) as ckpt:
        ckpt.resume(state)
        for step in (1, 2):
            ckpt.save(step, state).result(timeout_s=30)
    with Checkpointer(tmp_path / "run", config) as ckpt:
        assert ckpt.resume(fresh).step == 2
    load(tmp_path / "run", seen)
    assert_equal(values(fresh), values(state))
    assert_equal(values(seen), values(state))


def test_generators_go_on_under_a_default_device(tmp_path, default_device):
    """Those of Python and torch draw the same again; numpy's, too, where the program uses it."""
    with Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"rng": RngState()}).result(timeout_s=30)
        drawn = random.random(), torch.rand(3, device="cpu")
        ckpt.resume({"rng": RngState()})
        assert random.random() == drawn[0]
        assert torch.equal(torch.rand(3, device="cpu"), drawn[1])


def test_an_export_under_a_default_device_has_the_weights(tmp_path, default_device):
    """Converted on the way to 16 bits."""
    from safetensors.torch import load_file

    model = trained(1)["model"]
    with Checkpointer(tmp_path / "run") as ckpt:
        ckpt.export(model, tmp_path / "out", dtype=torch.bfloat16).result(timeout_s=30)
    with torch.device("cpu"):
        found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["0.weight"], model.state_dict()["0.weight"].to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_default_type_changes_nothing(tmp_path, dtype):
    """Each tensor keeps the type and the values that it had."""
    state, fresh = trained(1), trained(2)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with Checkpointer(tmp_path / "run") as ckpt:
            ckpt.save(1, state).result(timeout_s=30)
            ckpt.resume(fresh)
    finally:
        torch.set_default_dtype(before)
    assert_equal(values(fresh), values(state))
