"""What a resume writes to: tensors without memory are refused before anything changes; what can be saved can be restored."""

import warnings

import pytest
import torch

import safe_ckpt
from kit.limits import QUICK
from safe_ckpt import CheckpointConfig, Checkpointer, PerRank
from safe_ckpt.errors import RestoreError, StateError

CONFIG = CheckpointConfig(timeouts=QUICK)
pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* support is in beta", "ignore:The PyTorch API of nested")


class Wrapper:
    """A Stateful that hands a module's state on."""

    def __init__(self, module):
        self.module = module

    def state_dict(self):
        return {"inner": self.module.state_dict()}

    def load_state_dict(self, state):
        self.module.load_state_dict(state["inner"])


class Assigns(torch.nn.Linear):
    """Takes the tensors that it is given in place of its own."""

    def load_state_dict(self, state_dict, strict=True, assign=False):
        return super().load_state_dict(state_dict, strict, assign=True)


def on_meta(*args, kind=torch.nn.Linear):
    with torch.device("meta"):
        return kind(*args)


def half_on_meta():
    module = torch.nn.BatchNorm1d(3)
    module.running_mean = module.running_mean.to("meta")
    return module


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run that has saved some of everything."""
    path = tmp_path_factory.mktemp("run")
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with Checkpointer(path, CONFIG) as ckpt:
        state = {"first": {"n": 1}, "module": module, "optimizer": optimizer, "norm": torch.nn.BatchNorm1d(3)}
        state |= {"data": {"t": torch.ones(3)}, "tensor": torch.ones(2), "own": PerRank([torch.ones(2)])}
        ckpt.save(1, {**state, "wrapped": Wrapper(module)}).result()
    return path


@pytest.mark.parametrize(
    "target",
    [
        lambda: {"module": on_meta(3, 2)},
        lambda: {"norm": half_on_meta()},
        lambda: {"optimizer": torch.optim.AdamW(on_meta(3, 2).parameters())},
        lambda: {"data": {"t": torch.empty(3, device="meta")}},
        lambda: {"data": {"t": (torch.empty(3, device="meta"),)}},
        lambda: {"tensor": torch.empty(2, device="meta")},
        lambda: {"own": PerRank([torch.empty(2, device="meta")])},
    ],
    ids=["module", "buffer", "optimizer", "dict", "tuple", "tensor", "per-rank"],
)
@pytest.mark.parametrize("load", [False, True], ids=["resume", "load"])
def test_what_has_no_memory_is_refused_before_anything_is_restored(saved, target, load):
    """Nothing would stay of what is copied to the meta device: the error names the tensor and what gives it memory."""
    first = {"n": 0}
    state = {"first": first, **target()}
    name = list(state)[1]
    with pytest.raises(RestoreError, match=r"meta device.*to_empty\(device='cpu'\)") as caught:
        if load:
            safe_ckpt.load(saved, state)
        else:
            with Checkpointer(saved, CONFIG) as ckpt:
                ckpt.resume(state)
    assert caught.value.key.startswith(f"state['{name}']")
    assert caught.value.key != f"state['{name}']" or name == "tensor"
    assert first == {"n": 0}


def test_memory_that_was_taken_away_is_refused_before_anything_is_restored(saved):
    """FSDP takes that of a module away between its steps: what lies there by now is somebody else's."""
    first, gone = {"n": 0}, torch.zeros(3)
    gone.untyped_storage().resize_(0)
    with pytest.raises(RestoreError, match="it was resized") as caught:
        safe_ckpt.load(saved, {"first": first, "data": {"t": gone}})
    assert caught.value.key == "state['data']['t']"
    assert first == {"n": 0}


def test_the_line_that_the_error_names_gives_memory(saved):
    """After ``to_empty`` the resume restores all of the module and of its optimizer."""
    module = on_meta(3, 2).to_empty(device="cpu")
    optimizer, whole = torch.optim.AdamW(module.parameters()), {"module": None, "optimizer": None}
    safe_ckpt.load(saved, {"module": module, "optimizer": optimizer})
    safe_ckpt.load(saved, whole)
    assert torch.equal(module.weight, whole["module"]["weight"])
    moment = optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(moment, whole["optimizer"]["state"][0]["exp_avg"])


def test_an_object_that_drops_what_it_is_given_is_told(saved):
    """What lies within an object of the user's is not known before: that torch would only warn of it is an error."""
    with warnings.catch_warnings(), pytest.raises(RestoreError, match="no-op") as caught:
        warnings.simplefilter("ignore")
        safe_ckpt.load(saved, {"wrapped": Wrapper(on_meta(3, 2))})
    assert caught.value.key == "state['wrapped']"


def test_a_module_that_takes_the_tensors_themselves_needs_no_memory(saved):
    """It restores on the meta device, too."""
    module, known = on_meta(3, 2, kind=Assigns), torch.nn.Linear(3, 2)
    safe_ckpt.load(saved, {"module": module})
    safe_ckpt.load(saved, {"module": known})
    assert torch.equal(module.weight, known.weight)


def test_a_module_that_learns_its_shapes_from_the_state_is_restored(saved):
    """A LazyLinear has no shapes yet, nor memory."""
    lazy, known = torch.nn.LazyLinear(2), torch.nn.Linear(3, 2)
    safe_ckpt.load(saved, {"module": lazy})
    safe_ckpt.load(saved, {"module": known})
    assert torch.equal(lazy.weight, known.weight)


def inference(*shape):
    with torch.inference_mode():
        return torch.zeros(*shape)


def nested(value, *lengths):
    return torch.nested.nested_tensor([torch.full((length,), value) for length in lengths])


# Not by torch 2.15.
NESTED = "torch._utils._rebuild_nested_tensor" in torch._weights_only_unpickler._get_allowed_globals()
only_where_it_is_read = pytest.mark.skipif(not NESTED, reason="this torch reads no nested tensor")


@pytest.mark.parametrize(
    "pair",
    [
        lambda: (torch.arange(3.0).expand(2, 3), torch.zeros(3).expand(2, 3)),
        lambda: (torch.tensor(torch.nan).expand(2, 2), torch.zeros(1).expand(2, 2)),
        lambda: (torch.ones(2, 1, 3).expand(2, 4, 3), torch.zeros(2, 1, 3).expand(2, 4, 3)),
        lambda: (torch.ones(3), inference(3)),
        lambda: (torch.eye(3).to_sparse_csr(), torch.zeros(3, 3).to_sparse_csr()),
        lambda: (torch.eye(3).to_sparse(), torch.zeros(3, 3).to_sparse()),
        pytest.param(lambda: (nested(1.0, 2, 3), nested(0.0, 2, 3)), marks=only_where_it_is_read),
    ],
    ids=["expanded", "nan", "middle", "inference", "csr", "coo", "nested"],
)
def test_what_is_saved_is_restored_in_place(tmp_path, pair):
    """Of whatever kind the tensor is: in a dict, in ``PerRank``, and as an item."""
    value, _ = pair()
    with Checkpointer(tmp_path, CONFIG) as ckpt:
        ckpt.save(1, {"a": {"t": value}, "b": PerRank({"t": value}), "c": value}).result()
        for name, wrap in {"a": lambda t: {"t": t}, "b": lambda t: PerRank({"t": t}), "c": lambda t: t}.items():
            _, target = pair()
            ckpt.resume({name: wrap(target)}, step=1)
            for one, other in zip(_parts(target), _parts(value), strict=True):
                assert torch.allclose(one, other, rtol=0, atol=0, equal_nan=True), name


@pytest.mark.skipif(NESTED, reason="this torch reads a nested tensor")
def test_a_tensor_that_this_torch_would_not_read_is_refused_at_the_save(tmp_path):
    """Else it would be saved and never resumed."""
    with (
        Checkpointer(tmp_path, CONFIG) as ckpt,
        pytest.raises(StateError, match=r"needs torch._utils._rebuild_nested_tensor") as caught,
    ):
        ckpt.save(1, {"a": {"t": nested(1.0, 2, 3)}}).result()
    assert "['t']" in caught.value.key


def test_a_function_that_torch_load_would_refuse_is_refused_at_the_save(tmp_path, monkeypatch):
    """Whatever this release of torch knows: what it would not read is not saved."""
    admitted = dict(torch._weights_only_unpickler._get_allowed_globals())
    del admitted["torch._utils._rebuild_sparse_tensor"]
    monkeypatch.setattr(torch._weights_only_unpickler, "_get_allowed_globals", lambda: admitted)
    state = {"a": {"t": torch.eye(3).to_sparse()}}
    with Checkpointer(tmp_path, CONFIG) as ckpt, pytest.raises(StateError, match="_rebuild_sparse_tensor") as caught:
        ckpt.save(1, state).result()
    assert caught.value.key == "state['a']['t']"


def _parts(tensor):
    if tensor.is_nested:
        return tensor.unbind()
    return [tensor.to_dense() if tensor.layout is not torch.strided else tensor]


def test_a_view_of_what_was_expanded_has_its_values(tmp_path):
    """The tensor behind it is restored: that is what the program goes on with."""
    row = torch.zeros(3)
    with Checkpointer(tmp_path, CONFIG) as ckpt:
        ckpt.save(1, {"d": {"t": torch.arange(3.0).expand(2, 3)}}).result()
        ckpt.resume({"d": {"t": row.expand(2, 3)}})
    assert row.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (lambda: (torch.arange(6.0).view(2, 3), torch.zeros(3).expand(2, 3)), "memory is the same"),
        pytest.param(
            lambda: (nested(1.0, 2, 3), nested(0.0, 2, 4)), r"\(\(2,\), \(3,\)\)", marks=only_where_it_is_read
        ),
        (lambda: (torch.eye(3).to_sparse(), torch.zeros(3, 3)), "sparse_coo"),
    ],
    ids=["values", "lengths", "layout"],
)
def test_a_tensor_that_cannot_take_the_values_is_told_before_anything_is_restored(tmp_path, pair, words):
    """The item before it keeps what it had."""
    first, (value, target) = {"n": 0}, pair()
    with Checkpointer(tmp_path, CONFIG) as ckpt:
        ckpt.save(1, {"first": {"n": 1}, "d": {"t": value}}).result()
        with pytest.raises(RestoreError, match=words) as caught:
            ckpt.resume({"first": first, "d": {"t": target}})
    assert caught.value.key == "state['d']"
    assert first == {"n": 0}


def test_a_module_is_restored_that_torch_would_not_load(tmp_path):
    """With an expanded buffer, or made in inference mode: it was saved, so it is restored."""
    net, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    net.register_buffer("places", torch.arange(3).expand(2, 3))
    other.register_buffer("places", torch.zeros(3, dtype=torch.int64).expand(2, 3))
    net.register_buffer("seen", torch.ones(2))
    other.register_buffer("seen", inference(2))
    with torch.inference_mode():
        made = torch.nn.Linear(3, 2)
    with Checkpointer(tmp_path, CONFIG) as ckpt:
        ckpt.save(1, {"net": net, "made": torch.nn.Linear(3, 2)}).result()
        ckpt.resume(whole := {"net": None, "made": None})
        ckpt.resume({"net": other, "made": made})
        assert other.places.tolist() == [[0, 1, 2], [0, 1, 2]]
        assert torch.equal(other.weight, net.weight)
        assert other.seen.tolist() == [1, 1]
        assert torch.equal(made.weight, whole["made"]["weight"])
        other.places = torch.zeros(1, dtype=torch.int64).expand(2, 3)
        other.weight.data.zero_()
        with pytest.raises(RestoreError, match="memory is the same"):
            ckpt.resume({"net": other})
        assert not other.weight.any()


def test_a_row_of_one_is_restored_into_a_number_and_not_the_other_way_round(tmp_path):
    """As torch does it: checkpoints of its oldest releases have no numbers."""
    number, row = torch.nn.Module(), torch.nn.Module()
    number.scale, row.scale = torch.nn.Parameter(torch.zeros(())), torch.nn.Parameter(torch.zeros(1))
    with Checkpointer(tmp_path, CONFIG) as ckpt:
        ckpt.save(1, {"row": {"scale": torch.ones(1)}, "number": {"scale": torch.ones(())}}).result()
        ckpt.resume({"row": number})
        assert number.scale.item() == 1
        with pytest.raises(RestoreError, match="size mismatch"):
            ckpt.resume({"number": row})


def test_a_save_still_refuses_the_meta_device(tmp_path):
    """As before."""
    with Checkpointer(tmp_path, CONFIG) as ckpt, pytest.raises(StateError, match="meta device"):
        ckpt.save(1, {"module": on_meta(3, 2)})
