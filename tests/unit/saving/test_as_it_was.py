"""What was saved comes back as it was, in all that a tensor and a mapping are."""

import os
import random
from collections import OrderedDict

import numpy
import pytest
import safetensors.torch
import torch

import safe_ckpt
from safe_ckpt import Checkpointer, PerRank, RngState
from safe_ckpt.errors import StateError


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


def test_views_of_one_memory_as_other_types_are_saved_though_one_requires_a_gradient(tmp_path):
    """Beside its bytes, a tensor that requires a gradient comes back requiring it; stock torch.load reads both."""
    numbers = torch.ones(3, requires_grad=True)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"state": {"numbers": numbers, "bytes": numbers.detach().view(torch.uint8), "count": 1}}).result()
        into = {"state": None}
        ckpt.resume(into)
    for found in (into["state"], torch.load(tmp_path / "step-00000001" / "state.pt", weights_only=True)):
        assert found["numbers"].requires_grad
        assert found["numbers"].is_leaf
        assert torch.equal(found["numbers"], numbers)
        assert found["bytes"].data_ptr() == found["numbers"].data_ptr()


def test_numbers_of_eight_bits_that_require_a_gradient_come_back_requiring_it(tmp_path):
    """Beside something that is no tensor; stock torch.load reads them, which it does not from its own torch.save."""
    eight = torch.ones(3).to(torch.float8_e4m3fn).requires_grad_()
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"state": {"eight": eight, "set": {1}}}).result()
        into = {"state": None}
        ckpt.resume(into)
    for found in (into["state"], torch.load(tmp_path / "step-00000001" / "state.pt", weights_only=True)):
        assert (found["eight"].dtype, found["eight"].requires_grad) == (torch.float8_e4m3fn, True)
        assert torch.equal(found["eight"].float(), torch.ones(3))


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


class Own:
    """A Stateful whose state is what it is given."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def told(value):
    """All that is to come back of a tensor, or of a mapping of them in its order."""
    if isinstance(value, torch.Tensor):
        return type(value), value.requires_grad, value.dtype, value.tolist()
    return type(value), getattr(value, "_metadata", None), [(name, told(tensor)) for name, tensor in value.items()]


def mappings():
    """Mappings of tensors whose order, or whose kinds, a safetensors file does not say by itself."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    tied = OrderedDict({"second": weights["0.weight"], **weights, "last": weights["2.bias"]})
    tied.move_to_end("0.bias", last=False)
    return {
        "reversed": dict(reversed(weights.items())),
        "ordered": OrderedDict(weights),
        "tied": tied,
        "parameters": dict(model.named_parameters()),
        "mixed": {"b": torch.ones(2, requires_grad=True), "a": torch.nn.Parameter(torch.ones(3, dtype=torch.float64))},
        "state": model.state_dict(),
        "one": torch.nn.Parameter(torch.ones(2)),
    }


@pytest.mark.parametrize("name", list(mappings()))
def test_a_mapping_of_tensors_comes_back_in_its_order_and_kind(tmp_path, name):
    """Order, dict or OrderedDict, Parameter or plain, trained or not: as saved, by ``resume``, ``load`` and in a Stateful."""
    saved = mappings()[name]
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"item": saved, "own": Own(saved) if isinstance(saved, dict) else None}).result()
        resumed, loaded = ({"item": None, "own": Own() if isinstance(saved, dict) else None} for _ in range(2))
        ckpt.resume(resumed)
        safe_ckpt.load(tmp_path, loaded)
    for found in (resumed, loaded):
        assert told(found["item"]) == told(saved)
        if isinstance(saved, dict):
            assert told(found["own"].state) == told(saved)
    kept = safetensors.torch.load_file(tmp_path / "step-00000001" / "item.safetensors")  # other tools read it as well
    values = saved if isinstance(saved, dict) else {"item": saved}
    assert kept
    assert all(torch.equal(tensor, values[key]) for key, tensor in kept.items())


def test_names_of_one_tensor_are_names_of_one_tensor_again(tmp_path):
    """A Parameter with two names is one Parameter with two names after a resume, and a plain name of its memory stays plain."""
    weight = torch.nn.Parameter(torch.ones(3))
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"tied": {"b": weight, "data": weight.data, "a": weight}}).result()
        into = {"tied": None}
        ckpt.resume(into)
    tied = into["tied"]
    assert list(tied) == ["b", "data", "a"]
    assert tied["a"] is tied["b"]
    assert type(tied["data"]) is torch.Tensor
    assert len({tensor.data_ptr() for tensor in tied.values()}) == 1


def test_a_module_in_shards_is_a_mapping_in_its_order(tmp_path):
    """Where what is not trained has files of its own, the module's state still has the order that it has in the module."""
    model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(4, 4), torch.nn.Linear(600, 600))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": model}).result()
        into = {"model": None}
        ckpt.resume(into)
    assert (tmp_path / "step-00000001" / "model.safetensors.index.json").exists()
    assert told(into["model"]) == told(model.state_dict())


def test_one_memory_as_two_types_comes_back_as_both(tmp_path):
    """A tensor and the same bits as another type are no two names of one tensor: each comes back with its own type."""
    floats = torch.randn(6)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"both": {"a": floats, "bits": floats.view(torch.int32)}}).result()
        into = {"both": None}
        ckpt.resume(into)
    assert told(into["both"]) == told({"a": floats, "bits": floats.view(torch.int32)})
    assert into["both"]["a"].data_ptr() == into["both"]["bits"].data_ptr()


@pytest.mark.parametrize("text", ["\ud83d", "\ud83d\ude00", "x\ude00\ud83d"], ids=ascii)
def test_lone_surrogates_come_back_as_they_were(tmp_path, text):
    """Two of them in a row are no character, in a text, as a key, and as the name of a tensor; other tools read the file."""
    state = {"text": text, "keys": {text: [text]}, "named": {text: torch.ones(1)}}
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state).result()
        into = dict.fromkeys(state)
        ckpt.resume(into)
    assert into == state
    assert list(torch.load(tmp_path / "step-00000001" / "named.pt", weights_only=True)) == [text]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_quantized_tensor_comes_back_with_its_scale(tmp_path):
    """By tensor and by channel, in place too, and as other tools read it. What torch cannot copy is refused."""
    scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([1, 2])
    by_tensor = torch.quantize_per_tensor(torch.randn(6), 0.1, 3, torch.quint8)
    by_channel = torch.quantize_per_channel(torch.randn(2, 3), scales, zeros, 0, torch.qint8)
    own = torch.quantize_per_tensor(torch.zeros(6), 0.5, 0, torch.quint8)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"q": {"tensor": by_tensor, "channel": by_channel}}).result()
        into = {"q": {"tensor": own, "channel": None}}
        ckpt.resume(into)
        with pytest.raises(StateError, match="quint4x2"):
            ckpt.save(2, {"q": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint4x2)})
    stock = torch.load(tmp_path / "step-00000001" / "q.pt", weights_only=True)
    for found in (into["q"], stock):
        assert torch.equal(found["tensor"], by_tensor)
        assert torch.equal(found["channel"], by_channel)
        assert found["channel"].q_per_channel_scales().tolist() == scales.double().tolist()
    assert into["q"]["tensor"] is own
    assert own.q_scale() == by_tensor.q_scale()


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_any_generator_that_is_numpys_global_one_goes_on(tmp_path, kind):
    """Also where it was set to another kind, and the process that resumes has the usual one."""
    before = numpy.random.get_state(legacy=False)["bit_generator"]
    try:
        numpy.random.set_bit_generator(getattr(numpy.random, kind)(5))
        numpy.random.normal()  # and keeps a second one
        with Checkpointer(tmp_path) as ckpt:
            ckpt.save(1, {"rng": PerRank(RngState())}).result()
            drawn = numpy.random.normal(size=3)
            numpy.random.set_bit_generator(numpy.random.MT19937(1))
            ckpt.resume({"rng": PerRank(RngState())})
        assert numpy.random.normal(size=3).tolist() == drawn.tolist()
    finally:
        numpy.random.set_bit_generator(getattr(numpy.random, before)())


@pytest.mark.parametrize("kind", ["Generator", "seed", "BitGenerator.__init__", "nothing"])
def test_a_generator_that_numpy_has_not_is_refused_and_the_present_one_stays(kind):
    """What a file names is looked up among numpy's generators; whatever else has the name is not called."""
    before = numpy.random.get_state()
    state = RngState().state_dict()
    state["numpy"]["kind"] = kind
    with pytest.raises(ValueError, match=f"numpy has no generator {kind}"):
        RngState().load_state_dict(state)
    after = numpy.random.get_state()
    assert before[0] == after[0]
    assert before[1].tolist() == after[1].tolist()


@pytest.mark.parametrize("kind", ["MT19937", "PCG64"])
def test_generators_of_a_rank_that_saved_none_are_its_own(kind):
    """The same at each such resume, and others on each rank."""
    before = numpy.random.get_state(legacy=False)["bit_generator"]
    saved, drawn = RngState().state_dict(), []
    try:
        for rank in (1, 1, 2):
            numpy.random.set_bit_generator(getattr(numpy.random, kind)())
            RngState().start_anew(saved, rank)
            drawn.append((random.random(), torch.rand(1).item(), numpy.random.normal()))
    finally:
        RngState().load_state_dict(saved)
        numpy.random.set_bit_generator(getattr(numpy.random, before)())
    assert drawn[0] == drawn[1]
    assert not set(drawn[1]) & set(drawn[2])


@pytest.mark.parametrize("empty", [b"", bytearray()], ids=["bytes", "bytearray"])
@pytest.mark.parametrize("first", [True, False])
def test_empty_bytes_beside_one_memory_of_two_types_come_back(tmp_path, empty, first):
    """Each needs a way of its own to be written. One state has both, in either order, and again deeper within."""
    numbers = torch.arange(6, dtype=torch.float32)
    pair = [("empty", empty), ("floats", numbers), ("whole", numbers.view(torch.int32))]
    item = dict(pair if first else reversed(pair))
    item["deeper"] = [b"", {"bytes": numbers.view(torch.uint8), "more": (b"", 1)}]
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"item": item}).result()
        found = {"item": None}
        ckpt.resume(found)
    back = found["item"]
    assert (bytes(back["empty"]), back["deeper"][0], back["deeper"][1]["more"]) == (b"", b"", (b"", 1))
    assert torch.equal(back["floats"], numbers)
    assert torch.equal(back["whole"], numbers.view(torch.int32))
    assert torch.equal(back["deeper"][1]["bytes"], numbers.view(torch.uint8))
