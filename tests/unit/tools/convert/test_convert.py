"""safe-ckpt convert: every source to every target, read back by the tools themselves."""

import json
import os
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from safe_ckpt import Checkpointer
from safe_ckpt.tools.cli.app import app
from support import flip_bit, needs_root, program_path, small_disk

RUNNER = CliRunner()
FORMS = ("safetensors", "torch", "dcp")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5))
        self.head = torch.nn.Linear(5, 2, dtype=torch.bfloat16)
        self.register_buffer("flags", torch.tensor([True, False]))


def trained():
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return net, optimizer


def make_sources(folder):
    """One state as each tool writes it; the weights are under the name that the tool gives them."""
    net, optimizer = trained()
    state = {
        "state_dict": net.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "epoch": 2,
        "global_step": 30,
    }
    torch.save(state, folder / "stock.ckpt")
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": net.state_dict(), "epoch": 2}, checkpoint_id=folder / "dcp", no_dist=True)
    save_file(net.state_dict(), folder / "plain.safetensors")
    with Checkpointer(folder / "ours") as ckpt:
        ckpt.save(30, {"model": net, "optimizer": optimizer, "epoch": 2}).result()
    accelerate = folder / "accelerate"
    accelerate.mkdir()
    save_file(net.state_dict(), accelerate / "model.safetensors")
    torch.save(optimizer.state_dict(), accelerate / "optimizer.bin")
    torch.save({"step": 3, "torch_manual_seed": torch.get_rng_state()}, accelerate / "random_states_0.pkl")
    return {
        "stock": folder / "stock.ckpt",
        "dcp": folder / "dcp",
        "safetensors": folder / "plain.safetensors",
        "ours": folder / "ours/step-00000030",
        "accelerate": accelerate,
    }


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return make_sources(tmp_path_factory.mktemp("sources"))


def convert(*args):
    return RUNNER.invoke(app, ["convert", *map(str, args)])


def weights_of(form, path, source):
    """The weights that were written, read by the tool that the form is for."""
    if form == "safetensors":
        return load_file(path / "model.safetensors")
    key = {"stock": "state_dict", "safetensors": None}.get(source, "model")
    if form == "torch":
        loaded = torch.load(path, weights_only=True)
        return loaded if key is None else loaded[key]
    key = key or "model"
    state = {key: {name: torch.empty_like(tensor) for name, tensor in Net().state_dict().items()}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=path, no_dist=True)
    return state[key]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("source", ["stock", "dcp", "safetensors", "ours", "accelerate"])
def test_weights_of_every_source_come_back_from_every_target(tmp_path, sources, source, form):
    """The weights come back exactly, through the reader of the tool that the target is for."""
    target = tmp_path / "out"
    extra = ("--drop-objects",) if source == "accelerate" else ()
    done = convert(sources[source], target, "--to", form, *extra)
    assert done.exit_code == 0, done.output
    expected = trained()[0].state_dict()
    found = weights_of(form, target, source)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert RUNNER.invoke(app, ["verify", str(target)]).exit_code == 0


def in_shards(folder, stem, suffix):
    """The weights as a directory of Hugging Face has them: in three files, with an index that is not one of them."""
    weights = list(trained()[0].state_dict().items())
    folder.mkdir()
    names = [f"{stem}-{n + 1:05}-of-00003.{suffix}" for n in range(3)]
    for n, name in enumerate(names):
        part = dict(weights[n::3])
        save_file(part, folder / name) if suffix == "safetensors" else torch.save(part, folder / name)
    places = {key: names[n % 3] for n, (key, _) in enumerate(weights)}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


@pytest.mark.parametrize(
    ("stem", "suffix", "form"),
    [*(("model", "safetensors", form) for form in FORMS), ("pytorch_model", "bin", "torch")],
)
def test_the_shards_of_a_directory_are_one_model(tmp_path, stem, suffix, form):
    """All tensors of all shards arrive, of safetensors and of torch.save; the index is none."""
    source = in_shards(tmp_path / "sharded", stem, suffix)
    done = convert(source, tmp_path / "out", "--to", form)
    assert done.exit_code == 0, done.output
    expected = trained()[0].state_dict()
    if form == "safetensors":
        found = load_file(tmp_path / "out/model.safetensors")
    elif form == "torch":
        found = torch.load(tmp_path / "out", weights_only=True)[stem]
    else:
        whole = {stem: {name: torch.empty_like(tensor) for name, tensor in expected.items()}}
        with pytest.warns(UserWarning, match="single process"):
            dcp.load(whole, checkpoint_id=tmp_path / "out", no_dist=True)
        found = whole[stem]
    assert {name: tensor.tolist() for name, tensor in found.items()} == {n: t.tolist() for n, t in expected.items()}


def test_a_conversion_to_torch_keeps_optimizer_and_versions(tmp_path, sources):
    """To torch: optimizer, numbers and the versions of modules; a job goes on from it."""
    assert convert(sources["stock"], tmp_path / "all.pt").exit_code == 0
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert (loaded["epoch"], loaded["global_step"]) == (2, 30)
    assert isinstance(loaded["state_dict"], OrderedDict)
    assert loaded["state_dict"]._metadata["body.1"] == {"version": 2}
    net, optimizer = trained()
    fresh = torch.optim.Adam(Net().parameters())
    fresh.load_state_dict(loaded["optimizer_states"][0])
    assert torch.equal(fresh.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_convert_obeys_max_shard_size_and_dtype(tmp_path, sources):
    """--max-shard-size and --dtype do as they say; integers and flags keep their type."""
    done = convert(
        sources["stock"], tmp_path / "out", "--to", "safetensors", "--max-shard-size", "100B", "--dtype", "float64"
    )
    assert done.exit_code == 0, done.output
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    found = {}
    for name in set(index["weight_map"].values()):
        found |= load_file(tmp_path / "out" / name)
    assert found["body.0.weight"].dtype == torch.float64
    assert found["flags"].dtype == torch.bool
    assert torch.equal(found["head.weight"], trained()[0].head.weight.double())


class Surprise:
    """Anything of a class that torch does not know."""


def test_convert_refuses_objects_by_name_and_builds_none(tmp_path):
    """A class in the source: refused by name, left out with --drop-objects."""
    torch.save({"state_dict": {"w": torch.ones(2)}, "extra": Surprise()}, tmp_path / "odd.ckpt")
    done = convert(tmp_path / "odd.ckpt", tmp_path / "out.pt")
    assert done.exit_code == 1
    assert "extra: <test_convert.Surprise>" in done.output
    assert not (tmp_path / "out.pt").exists()
    assert convert(tmp_path / "odd.ckpt", tmp_path / "out.pt", "--drop-objects").exit_code == 0
    assert torch.load(tmp_path / "out.pt", weights_only=True).keys() == {"state_dict"}


def test_convert_names_files_from_before_the_zip_format(tmp_path):
    """Named as such, and what to do."""
    torch.save({"model": {"w": torch.arange(4)}}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    refused = convert(tmp_path / "old.pt", tmp_path / "new.pt")
    assert (refused.exit_code, "before 1.6" in refused.output) == (1, True)
    assert not (tmp_path / "new.pt").exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--to", "onnx"], "expected one of safetensors"),
        (["--to", "lightning"], "expected one of safetensors"),
        (["--to", "safetensors", "--item", "nothing.here"], "there is state_dict, optimizer_states"),
        (["--to", "safetensors", "--dtype", "int8"], "floating-point"),
        (["--to", "safetensors", "--max-shard-size", "much"], "max-shard-size"),
    ],
)
def test_wrong_requests_to_convert_write_nothing(tmp_path, sources, args, says):
    """A sentence that says what to do, and nothing is written."""
    done = convert(sources["stock"], tmp_path / "out", *args)
    assert done.exit_code in (1, 2)
    assert says in done.output
    assert not (tmp_path / "out").exists()


def test_convert_names_the_checkpoints_in_a_directory_of_them(tmp_path):
    """Given in place of one: no item of it could be the weights."""
    for name in ("epoch=7-step=176.ckpt", "last.ckpt"):
        torch.save({"state_dict": Net().state_dict(), "loops": {}, "lr_schedulers": []}, tmp_path / name)
    result = convert(tmp_path, tmp_path / "new", "--to", "safetensors")
    assert result.exit_code == 1
    assert "is a directory for checkpoints, and no checkpoint; name one of them: " in result.stderr
    assert "epoch=7-step=176.ckpt" in result.stderr
    assert "last.ckpt" in result.stderr


def test_convert_refuses_an_existing_target_and_a_damaged_source(tmp_path, sources):
    """A destination that exists is left alone; a source with a flipped bit is refused by name."""
    (tmp_path / "there").write_text("mine")
    done = convert(sources["stock"], tmp_path / "there", "--to", "torch")
    assert done.exit_code == 2
    assert (tmp_path / "there").read_text() == "mine"
    bad = tmp_path / "bad.ckpt"
    bad.write_bytes(sources["stock"].read_bytes())
    flip_bit(bad, bad.stat().st_size // 3)
    done = convert(bad, tmp_path / "out", "--to", "safetensors")
    assert done.exit_code == 1
    assert "nothing was converted" in done.output
    assert sorted(os.listdir(tmp_path)) == ["bad.ckpt", "there"]


@needs_root
@pytest.mark.parametrize("form", FORMS)
def test_a_full_disk_ends_convert_by_name_and_no_file_stays(tmp_path, form):
    """Whatever writes, the error is one line that names the target; not a file of it is left, hidden ones included."""
    torch.save({"state_dict": {"w": torch.ones(1 << 19)}}, tmp_path / "a.ckpt")
    with small_disk(tmp_path / "disk", "1m") as disk:
        done = convert(tmp_path / "a.ckpt", disk / "out", "--to", form)
        assert done.exit_code == 1
        assert str(disk) in done.output
        assert "Traceback" not in done.output
        assert list(disk.iterdir()) == []


@pytest.mark.slow
def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """240 MiB of tensors of 16 MiB each become each of the forms within 150 MiB of memory of the program's own."""
    torch.save({"state_dict": {f"w{n}": torch.full((4 << 20,), float(n)) for n in range(15)}}, tmp_path / "a.ckpt")
    command = [sys.executable, program_path("measures_conversions"), str(tmp_path / "a.ckpt"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("ANON")[1]) < 150 << 10
