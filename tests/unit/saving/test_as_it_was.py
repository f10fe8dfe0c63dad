"""What was saved comes back as it was, in all that a tensor and a mapping are."""

import os

import pytest
import safetensors.torch
import torch

from safe_ckpt import Checkpointer


@pytest.fixture
def threads():
    """Sets how many threads torch copies with, and sets that back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def left_to_do():
    """Tensors that torch has yet to conjugate or negate, small and of more than a MiB, beside others of the same memory."""
    small, large = (torch.randn(side, side, dtype=torch.complex64) for side in (8, 512))
    negated = torch._neg_view(torch.randn(600, 600))
    return {"small": small, "small.c": small.conj(), "large": large, "large.c": large.conj(), "neg": negated}


@pytest.mark.parametrize("count", [1, 2])
def test_values_that_torch_has_yet_to_compute_are_saved_as_values(tmp_path, threads, count):
    """A tensor whose conjugate or negative is not in memory yet is exported, saved and resumed with the values it has."""
    threads(count)
    tensors = left_to_do()
    with Checkpointer(tmp_path / "runs") as ckpt:
        ckpt.export(tensors, tmp_path / "weights").result()
        ckpt.save(1, {"tensors": tensors}).result()
        into = {"tensors": None}
        ckpt.resume(into)
    for found in (into["tensors"], safetensors.torch.load_file(tmp_path / "weights" / "model.safetensors")):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(found[name].resolve_conj().resolve_neg(), tensor.resolve_conj().resolve_neg()), name


def test_views_of_one_memory_as_other_types_are_saved_and_one_of_them_conjugated(tmp_path):
    """One memory as complex numbers, as their negated imaginary parts and as bytes comes back as all three."""
    numbers = torch.randn(8, dtype=torch.complex64)
    state = {"numbers": numbers, "imag": numbers.conj().imag, "bytes": numbers.view(torch.uint8), "count": 1}
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"state": state}).result()
        into = {"state": None}
        ckpt.resume(into)
    found = into["state"]
    assert all(
        torch.equal(found[name], state[name]) and found[name].dtype == state[name].dtype for name in list(state)[:3]
    )
    loaded = torch.load(tmp_path / "step-00000001" / "state.pt", weights_only=True)
    assert torch.equal(loaded["imag"], numbers.conj().imag)


class Masked(torch.nn.Module):
    """49 bytes in front of two MiB of floats."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(7, 7).tril().bool())
        self.linear = torch.nn.Linear(1024, 512)


@pytest.mark.parametrize("count", [1, 2])
def test_a_tensor_behind_an_odd_number_of_bytes_is_exported(tmp_path, threads, count):
    """With one thread of torch and with two, a large tensor is exported also where no tensor of its type can begin."""
    threads(count)
    model = Masked()
    transposed = {
        "flag": torch.ones(1, dtype=torch.bool),
        "turned": torch.randn(700, 600).t(),
        "one": torch.tensor(3.0),
    }
    with Checkpointer(tmp_path / "runs") as ckpt:
        for name, tensors in (("model", model.state_dict()), ("turned", transposed)):
            ckpt.export(tensors, tmp_path / name).result()
            loaded = safetensors.torch.load_file(os.path.join(tmp_path, name, "model.safetensors"))
            assert all(torch.equal(loaded[key], tensor) for key, tensor in tensors.items())
