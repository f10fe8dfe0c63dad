"""What is not trained goes to shards of its own: names, versions, ties and norms are as in one file."""

import pytest
import safetensors.torch
import torch
from frozen_jobs import SIZE, Job, digest
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from safe_ckpt import CheckpointConfig, Checkpointer, Health
from safe_ckpt.core.formats import file_plan
from safe_ckpt.core.formats.manifest import read_manifest


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(file_plan, "FROZEN_BYTES", 2 << 20)


class Versioned(torch.nn.Module):
    _version = 3

    def __init__(self, parts=2):
        super().__init__()
        self.seen = []
        self.parts = torch.nn.ParameterList(torch.randn(SIZE, SIZE) for _ in range(parts))

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        self.seen.append(metadata.get("version"))
        super()._load_from_state_dict(state, prefix, metadata, *args)


@pytest.mark.parametrize("trained", [False, True])
def test_versions_of_modules_come_back(tmp_path, trained):
    """Also where nothing is trained, in several shards: a module that migrates old states must not migrate new ones."""
    module = torch.nn.ModuleDict({"old": Versioned()}).requires_grad_(requires_grad=False)
    if trained:
        module["new"] = torch.nn.Linear(3, 3)
    expected = digest(module)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": module}).result()
        module["old"].parts[0].data.zero_()
        ckpt.resume({"model": module})
    assert module["old"].seen == [3]
    assert digest(module) == expected
    assert len(list(tmp_path.glob("step-*/model-*.safetensors"))) == 2 + trained


def test_a_tied_tensor_is_there_once(tmp_path):
    """Where a shard ends between its names, too; both names come back as one memory's bytes."""
    model = torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(3)), torch.nn.Linear(SIZE, 2))
    model[2].weight = model[0].weight
    model[:3].requires_grad_(requires_grad=False)
    expected = digest(model)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": model}).result()
        with torch.no_grad():
            model[0].weight.zero_()
        ckpt.resume({"model": model})
    assert digest(model) == expected
    sizes = [path.stat().st_size for path in tmp_path.glob("step-*/model-*.safetensors")]
    assert sum(sizes) < 2 * 4 * SIZE * SIZE + 50_000, sizes


@pytest.mark.parametrize("order", ["compiled", "checkpointed", "both", "both, the other way"])
def test_wrapped_layers_are_shared(tmp_path, order):
    """Activation checkpointing and ``torch.compile`` in either order: the frozen layer is written once."""
    layer = torch.nn.Linear(SIZE, SIZE).requires_grad_(requires_grad=False)
    if order == "both, the other way":
        layer = torch.compile(layer, backend="eager")
    if order != "compiled":
        layer = checkpoint_wrapper(layer)
    if order in ("compiled", "both"):
        layer = torch.compile(layer, backend="eager")
    model = torch.nn.Sequential(layer, torch.nn.Linear(SIZE, 2))
    with Checkpointer(tmp_path) as ckpt:
        for number in (1, 2):
            ckpt.save(number, {"model": model}).result()
    frozen = list(tmp_path.glob("step-*/model-00002-of-00002.safetensors"))
    assert [path.stat().st_nlink for path in frozen] == [2, 2]
    assert any("weight" in name for name in safetensors.torch.load_file(frozen[0]))


def test_a_layer_that_is_trained_from_now_on_is_no_jump_of_the_norm(tmp_path):
    """Its numbers are in another file then. A real jump is noticed after it as before."""
    layers = [torch.nn.Linear(SIZE, SIZE).requires_grad_(requires_grad=False) for _ in range(2)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(SIZE, 2))
    with Checkpointer(tmp_path, CheckpointConfig(health=Health(norm_jump=5.0))) as ckpt:
        for number in range(1, 6):
            if number == 3:
                layers[0].requires_grad_(requires_grad=True)
            if number == 5:
                layers[0].weight.data.mul_(100)
            info = ckpt.save(number, {"model": model}).result()
            assert info.marked == (number == 5), number
        assert ckpt.resume({"model": model}).step == 4
    assert read_manifest(tmp_path / "step-00000004").health


@pytest.mark.parametrize("name", ["backbone", "module"])
def test_a_frozen_part_may_have_any_name(tmp_path, name):
    """Also that of what DDP wraps, with a trained layer of the same name beside it."""
    backbone = torch.nn.ModuleDict({"body": torch.nn.Linear(SIZE, SIZE), "head": torch.nn.Linear(SIZE, 9)})
    model = torch.nn.ModuleDict({name: backbone, "head": torch.nn.Linear(9, 9)})
    backbone.requires_grad_(requires_grad=False)
    with Checkpointer(tmp_path) as ckpt:
        for number in (1, 2, 3):
            model["head"].weight.data.add_(1)
            ckpt.save(number, {"model": model}).result()
    frozen = list(tmp_path.glob("step-*/model-00002-of-00002.safetensors"))
    assert [path.stat().st_nlink for path in frozen] == [3, 3, 3]
    assert set(safetensors.torch.load_file(frozen[0])) == {
        f"{name}.{part}.{which}" for part in ("body", "head") for which in ("weight", "bias")
    }


@pytest.mark.parametrize("names", [("model", "other"), ("base+lora", "base"), ("x.y", "x-y")])
def test_what_comes_back_without_a_module_has_its_order(tmp_path, names):
    """The first save and the second one, which shares the frozen shards: keys and values are those of the module. In the
    name of an item nothing is a pattern: another item whose name fits it as one keeps what is its own.
    """
    state = {name: Job().model for name in names}
    expected = {item: list(module.state_dict()) for item, module in state.items()}
    with Checkpointer(tmp_path) as ckpt:
        for number in (1, 2):
            info = ckpt.save(number, state).result()
            found = dict.fromkeys(state)
            ckpt.resume(found)
            assert {item: list(tensors) for item, tensors in found.items()} == expected, number
            for item, module in state.items():
                assert all(torch.equal(found[item][key], value) for key, value in module.state_dict().items()), item
    assert sum(path.stat().st_nlink == 2 for path in info.path.glob("*-00002-of-00002.safetensors")) == 2
