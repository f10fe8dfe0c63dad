"""One plain name for a tensor, whatever wraps its module: for health, for exports and for resuming."""

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from safe_ckpt import Checkpointer
from safe_ckpt.core.formats.names import as_named, matched, plain_name, plain_names
from safe_ckpt.errors import RestoreError

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")  # by importing the compiler


class Holds(torch.nn.Module):
    """A user's own, with an attribute that is called as data parallelism calls its."""

    def __init__(self):
        super().__init__()
        self.module = torch.nn.Linear(3, 3)
        self.weight = torch.nn.Parameter(torch.randn(3, 3))
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))


def layers(model):
    model.net[0] = torch.compile(model.net[0])
    return model


def parallel_part(model):
    model.net = torch.nn.DataParallel(torch.compile(model.net))
    return model


def recomputed(model):
    model.net[0], model.module = checkpoint_wrapper(model.net[0]), checkpoint_wrapper(model.module)
    return model


WAYS = {
    "plain": lambda model: model,
    "compiled": torch.compile,
    "layers": layers,
    "parallel": torch.nn.DataParallel,
    "part": parallel_part,
    "recomputed": recomputed,
    "all": lambda model: torch.compile(torch.nn.DataParallel(parallel_part(recomputed(layers(model))))),
}
PLAIN = set(Holds().state_dict())


def made(way, seed):
    torch.manual_seed(seed)
    return WAYS[way](Holds())


def test_only_a_wrappers_part_of_a_name_goes():
    """Whole parts between dots, at any place, also several in a row."""
    name = "_orig_mod._fsdp_wrapped_module.a._checkpoint_wrapped_module._orig_mod.w"
    assert plain_name(name) == "a.w"
    assert plain_name("my_orig_mod.module.x_orig_mod") == "my_orig_mod.module.x_orig_mod"


@pytest.mark.parametrize("way", WAYS)
def test_the_type_of_a_module_tells_a_wrapper_from_a_users_name(way):
    """``module`` is left out of data parallelism's names, and stays in the user's."""
    model = made(way, 1)
    assert set(plain_names(model.state_dict(), model).values()) == PLAIN


def test_two_names_never_become_one():
    """They keep what tells them apart."""
    names = ["a._orig_mod.w", "a.w", "b._orig_mod.w"]
    assert plain_names(names) == {"a._orig_mod.w": "a._orig_mod.w", "a.w": "a.w", "b._orig_mod.w": "b.w"}
    assert plain_names(["module.w", "w"]) == {"module.w": "module.w", "w": "w"}


def test_names_are_matched_all_together():
    """Of a wrapped model one has the name that another one has without: neither is taken for the other."""
    wrapped = {"module.module.w": "module.w", "module.w": "w"}
    assert matched(wrapped.values(), wrapped) == {plain: name for name, plain in wrapped.items()}
    assert matched(["a.w", "new"], ["a._orig_mod.w", "old"]) == {"a.w": "a._orig_mod.w"}
    assert matched(["w"], ["module.w", "w"]) == {"w": "w"}


def test_a_model_goes_on_wrapped_in_another_way(tmp_path):
    """49 pairs of ways, BatchNorm's buffers and versions included; what has no place is still an error."""
    for way in WAYS:
        with Checkpointer(tmp_path / way) as ckpt:
            ckpt.save(1, {"model": made(way, 1)}).result()
            for other in WAYS:
                model = made(other, 2)
                ckpt.resume({"model": model})
                saved = zip(model.state_dict().values(), made(way, 1).state_dict().values(), strict=True)
                assert all(torch.equal(now, then) for now, then in saved), (way, other)
            with pytest.raises(RestoreError, match=r"[Uu]nexpected"):
                ckpt.resume({"model": Holds().net})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_exports_have_plain_names(tmp_path, way, dtype):
    """Other tools know nothing of wrappers. Also of a state dict, as far as names alone can tell."""
    model = made(way, 1)
    with Checkpointer(tmp_path / "d") as ckpt:
        ckpt.export(model, tmp_path / "e", dtype=dtype).result()
        assert set(load_file(tmp_path / "e/model.safetensors")) == PLAIN
        ckpt.export(layers(Holds()).state_dict(), tmp_path / "f", dtype=dtype).result()
        assert set(load_file(tmp_path / "f/model.safetensors")) == PLAIN


@pytest.mark.parametrize("way", WAYS)
def test_health_knows_a_tensor_by_its_plain_name(tmp_path, way):
    """A mask in a wrapped module may be infinite, and may lose some of that; a trained parameter may not."""
    torch.manual_seed(1)
    model = Holds()
    model.net[0].register_buffer("inner", torch.full((3,), -torch.inf))
    model.module.register_buffer("mask", torch.full((3,), -torch.inf))
    masks, trained = [model.net[0].inner, model.module.mask], [model.net[0].bias, model.module.bias, model.weight]
    wrapped = WAYS[way](model)
    with Checkpointer(tmp_path) as ckpt:
        assert not ckpt.save(1, {"model": wrapped}).result().marked
        for mask in masks:
            mask[0] = 1.0
        assert not ckpt.save(2, {"model": wrapped}).result().marked
    for number, weight in enumerate(trained):
        with Checkpointer(tmp_path / f"first{number}") as ckpt, torch.no_grad():
            kept = weight.clone()
            weight[0] = torch.inf
            assert ckpt.save(1, {"model": wrapped}).result().marked, number
            weight.copy_(kept)


@pytest.mark.parametrize("way", WAYS)
def test_a_saved_state_has_the_names_of_the_module_that_takes_it(way):
    """From each way that it was saved, with its values and the versions of its modules; one that has them stays as it is."""
    model = made(way, 1)
    own = model.state_dict()
    assert as_named(model, own) is own
    for other in WAYS:
        renamed = as_named(model, made(other, 2).state_dict())
        assert list(renamed) == list(own), (way, other)
        assert all(map(torch.equal, renamed.values(), made(way, 2).state_dict().values())), (way, other)
        (norm,) = (name.rpartition(".")[0] for name in own if name.endswith("running_mean"))
        assert renamed._metadata[norm] == {"version": torch.nn.BatchNorm1d._version}, (way, other)


def test_a_plain_module_with_the_names_that_were_saved_is_not_asked_for_its_state():
    """Its state dict may be expensive, or something that all ranks must ask for together."""

    class Collective(torch.nn.Linear):
        def state_dict(self, *args, **kwargs):
            raise AssertionError("asked")

    saved = torch.nn.Linear(2, 2).state_dict()
    assert as_named(Collective(2, 2), saved) is saved


def test_a_wrapped_module_gets_the_names_of_a_state_that_has_nothing_of_wrappers():
    """Also where no name of either looks like a wrapper's, but for what wraps the module today; and the other way round."""
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2))
    for wrap in (torch.compile, torch.nn.DataParallel):
        wrapped = wrap(torch.nn.Sequential(torch.nn.Linear(2, 2)))
        assert list(as_named(wrapped, plain.state_dict())) == list(wrapped.state_dict()) != list(plain.state_dict())
        assert list(as_named(plain, wrapped.state_dict())) == list(plain.state_dict())
