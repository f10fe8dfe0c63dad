"""A tensor whose memory was taken away is refused by name, before a byte is read, whatever saves it."""

import pytest
import torch

from safe_ckpt import CheckpointConfig, Checkpointer, PerRank
from safe_ckpt.adapters import one_shot, torch_file
from safe_ckpt.core.formats import hugging_face
from safe_ckpt.core.formats.refusals import is_short
from safe_ckpt.core.formats.safetensors import named_safetensors_plan
from safe_ckpt.core.state.overlap import OverlapPlan
from safe_ckpt.errors import RestoreError, StateError


def short(tensor, keep=16):
    tensor.untyped_storage().resize_(keep)
    return tensor


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(300, 1000)  # large enough for copies in pieces
        self.second = torch.nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4))


def trained():
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def parts(model, optimizer):
    return {
        "first.weight": model.first.weight,
        "second.bias": model.second.bias,
        "mask": model.mask,
        "exp_avg": optimizer.state[model.second.weight]["exp_avg"],
    }


@pytest.mark.parametrize("snapshot", ["eager", "overlapped"])
@pytest.mark.parametrize("part", ["first.weight", "second.bias", "mask", "exp_avg"])
@pytest.mark.parametrize("keep", [0, 8])
def test_a_model_that_lost_memory_is_refused_at_any_save(tmp_path, snapshot, part, keep):
    """By name, at the first save and at one behind saves of the same tensors; saves of the others go on."""
    config = CheckpointConfig(snapshot=snapshot)
    with Checkpointer(tmp_path, config) as ckpt:
        for before in (0, 2):
            model, optimizer = trained()
            state = {"model": model, "optimizer": optimizer}
            for step in range(before):
                ckpt.save(step, state).result()
            tensor = parts(model, optimizer)[part]
            short(tensor.data if tensor.requires_grad else tensor, keep)
            with pytest.raises(StateError, match=part):
                ckpt.save(5, state)
            del state["optimizer" if part == "exp_avg" else "model"]
            ckpt.save(6, state).result()


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (short(torch.ones(9)), "alone"),
        (PerRank({"inner": short(torch.ones(9))}), "inner"),
        ({"a": 1, "deep": [(short(torch.ones(9)),)]}, "deep"),
        ({"a": 1, "of it": torch.nn.Parameter(short(torch.ones(9)))}, "of it"),
        ({"a": torch.ones(3), "b": short(torch.ones(3, 3)[1:, 1:], 20)}, "b"),
        ({"a": 1, "half": short(torch.ones(3, 3, dtype=torch.float8_e8m0fnu).t(), 4)}, "half"),
        ({"whole": torch.ones(2), "none": short(torch.ones(2), 0), "nor this": short(torch.ones(2), 0)}, "none"),
    ],
    ids=["tensor", "per rank", "nested", "parameter", "view", "odd type", "two of one address"],
)
def test_a_tensor_in_data_that_lost_memory_is_refused_by_place(tmp_path, value, where):
    """The error names the place in the state."""
    with Checkpointer(tmp_path) as ckpt, pytest.raises(StateError, match=where):
        ckpt.save(1, {"alone": value})


@pytest.mark.skipif(
    "torch._utils._rebuild_nested_tensor" not in torch._weights_only_unpickler._get_allowed_globals(),
    reason="this torch reads no nested tensor: each is refused",
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("keep", [0, 8])
def test_a_nested_tensor_that_lost_memory_is_refused(tmp_path, keep):
    """By name, at the save: nobody could read it back."""
    rows = torch.nested.nested_tensor([torch.ones(3), torch.ones(4)])
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": {"rows": rows, "n": 1}}).result()
        short(rows, keep)
        with pytest.raises(StateError, match=r"\['rows'\]: a nested tensor"):
            ckpt.save(2, {"x": {"rows": rows, "n": 1}})


def test_memory_that_came_back_at_its_old_place_is_saved_whole(tmp_path):
    """What is known of the save before is not taken for what is there now: its file may have whole storages."""
    large = torch.arange(3000.0)
    state = {"x": {"slice": large[:10], "n": 1}}
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state).result()
        large.untyped_storage().resize_(10 * 4)
        ckpt.save(2, state).result()
        found = {"x": {"slice": torch.zeros(10), "n": 0}}
        ckpt.resume(found)
    assert torch.equal(found["x"]["slice"], torch.arange(10.0))


@pytest.mark.parametrize("part", ["model", "data"])
def test_a_resume_into_lost_memory_is_refused_before_anything_is_applied(tmp_path, part):
    """What lies there is somebody else's. The error names the tensor."""
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"data": {"a": [torch.ones(900)], "n": (1,)}, "model": Model()}).result()
        state = {"data": {"a": [torch.zeros(900)], "n": (0,)}, "model": Model()}
        before = state["model"].second.weight.clone()
        short(state["model"].first.weight.data if part == "model" else state["data"]["a"][0], 0)
        with pytest.raises(RestoreError, match=r"first\.weight|a'\]\[0"):
            ckpt.resume(state)
        assert state["data"]["n"] == (0,)
        assert torch.equal(state["model"].second.weight, before)


def test_a_module_without_shapes_is_resumed(tmp_path):
    """One that gets them from what it loads."""
    with Checkpointer(tmp_path) as ckpt:
        saved = torch.nn.Linear(3, 4)
        ckpt.save(1, {"model": saved}).result()
        lazy = torch.nn.LazyLinear(4)
        ckpt.resume({"model": lazy})
        assert torch.equal(lazy.weight, saved.weight)


def test_exports_and_adapters_files_refuse_a_tensor_without_memory(tmp_path):
    """Exports, what adapters write with torch's format, and files that are written at once."""
    bad = {"fine": torch.ones(2), "bad": short(torch.ones(2))}
    bad["bad"].untyped_storage().resize_(0)
    ways = [
        lambda: torch_file("x.bin", bad),
        lambda: torch_file("x.bin", {"optimizer": [bad]}),
        lambda: one_shot.save_archive(bad, tmp_path / "x.ckpt", sequence=1),
        lambda: hugging_face.plans(bad, 1 << 30),
        lambda: hugging_face.plans(bad, 1),
        lambda: named_safetensors_plan("x", bad),
        lambda: hugging_face.refuse_unsaveable("bad", bad["bad"], torch.float32),
    ]
    with Checkpointer(tmp_path / "d") as ckpt:
        ways += [lambda: ckpt.export(bad, tmp_path / "e"), lambda: ckpt.export(bad, tmp_path / "e", dtype=torch.half)]
        for way in ways:
            with pytest.raises(StateError, match=r"bad.*needs 8 bytes"):
                way()
    assert not (tmp_path / "x.ckpt").exists()
    assert not (tmp_path / "e").exists()


def test_an_unsaved_parameter_without_memory_fails_no_save():
    """A parameter without memory is not watched for changes while the others are copied."""
    model, optimizer = trained()
    short(model.first.weight.data, 0)
    plan = OverlapPlan([model], [optimizer])
    assert plan.detector()() == ""
    assert not plan.covers(torch.ones(3))


class Wrapped(torch.Tensor):
    """Has its values in another tensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 4),
        torch.ones(3, 4).t()[1:],
        torch.ones(1).expand(5, 5),
        torch.ones(0),
        short(torch.ones(0, 7), 0),
        torch.tensor(3.0),
        torch.ones(3, device="meta"),
        torch.ones(3).to_sparse(),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.nn.UninitializedParameter(),
        Wrapped(torch.ones(3)),
        torch.ones(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        torch.as_strided(torch.ones(6), (2, 2), (4, 1), 0),
    ],
)
def test_odd_tensors_that_have_their_memory_are_not_refused(tensor):
    """Views, expanded, empty and odd tensors; of those that keep their values elsewhere nothing is claimed."""
    assert not is_short(tensor)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
def test_quantized_and_nested_tensors_are_not_refused():
    """They are strided by their own word, and have their values elsewhere or no shape."""
    assert not is_short(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    assert not is_short(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


@pytest.mark.parametrize("final", [torch.float16, torch.float32])
def test_a_type_that_no_export_has_is_refused_at_the_call(tmp_path, final):
    """Two numbers in one byte have no conversion, and sparse ones no place: the error names it, and nothing is begun."""
    packed = torch.ones(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with Checkpointer(tmp_path / "d") as ckpt:
        with pytest.raises(StateError, match=r"packed.*cannot convert"):
            ckpt.export({"packed": packed}, tmp_path / "e", dtype=final)
        with pytest.raises(StateError, match=r"plain.*float4"):
            ckpt.export({"plain": torch.ones(2)}, tmp_path / "e", dtype=torch.float4_e2m1fn_x2)
        with pytest.raises(StateError, match=r"rows.*sparse_coo tensor does not fit safetensors"):
            ckpt.export({"rows": torch.eye(2).to_sparse()}, tmp_path / "e", dtype=final)
    assert not (tmp_path / "e").exists()
