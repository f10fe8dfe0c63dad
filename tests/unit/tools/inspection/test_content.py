import json
import math
import sys
import warnings
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from typer.testing import CliRunner

from fuzz.fuzz_formats import zip_of
from kit import warm
from safe_ckpt import Checkpointer
from safe_ckpt.adapters.one_shot import save_archive
from safe_ckpt.errors import CorruptCheckpointError
from safe_ckpt.tools.cli.app import app
from safe_ckpt.tools.inspection import pickle_reader
from safe_ckpt.tools.inspection.check import plan_tasks, verify_tasks
from safe_ckpt.tools.inspection.content import read_content, read_structure
from safe_ckpt.tools.inspection.pickle_reader import read_pickle
from safe_ckpt.tools.inspection.values import Mapped, same
from support import program_path


def save_dcp(folder, state):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a single process
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def differences(one, other):
    done = CliRunner().invoke(app, ["inspect", str(one), str(other), "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == (0 if found["equal"] else 1)
    return {row["name"]: (row["max_abs_difference"], row["what"]) for row in found["differences"]}


def saved(folder, name, state):
    torch.save(state, folder / name)
    return folder / name


DTYPES = [getattr(torch, name) for name in (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64",
    "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
)]  # fmt: skip


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_tensors_of_every_dtype_are_read_from_a_torch_file(tmp_path, new):
    """Types, shapes and numbers of what torch.save wrote; of a file from before the zip format types and shapes."""
    state = {str(dtype): torch.ones(2, 3).to(dtype) for dtype in DTYPES}
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=new)
    content = read_content(tmp_path / "x.pt")
    assert {f"torch.{entry.dtype}" for entry in content.tensors} == set(state)
    for entry in content.tensors:
        assert (entry.name, entry.shape) == (f"torch.{entry.dtype}", (2, 3))
        if new:
            found = Mapped().tensor(entry)
            assert found.dtype == state[entry.name].dtype
            assert torch.equal(found.view(torch.uint8), state[entry.name].view(torch.uint8))


def test_views_ties_and_subclasses_are_read_as_torch_load_does(tmp_path):
    """Sliced, transposed and tied tensors, parameters and buffers are read as torch.load would give them."""
    whole = torch.arange(24.0).reshape(4, 6)
    state = {
        "whole": whole,
        "slice": whole[1:3, ::2],
        "turned": whole.t(),
        "scalar": whole[2, 3],
        "tied": whole,
        "parameter": torch.nn.Parameter(whole),
        "buffer": torch.nn.Buffer(torch.ones(2)),
        "repeated": torch.ones(1).expand(5),
        "empty": torch.empty(0, 3),
    }
    content = read_content(saved(tmp_path, "x.pt", state))
    assert [entry.name for entry in content.tensors] == list(state)
    maps = Mapped()
    for entry in content.tensors:
        assert torch.equal(maps.tensor(entry), state[entry.name].detach()), entry.name


@pytest.mark.filterwarnings("ignore:.*quantized tensor.*", "ignore:.*quantize_per_tensor.*", "ignore:.*TypedStorage.*")
def test_sparse_quantized_and_meta_tensors_are_shown_as_such(tmp_path):
    """Sparse, quantized and meta tensors and tensor subclasses: shown, and never taken for something else."""

    class Mine(torch.Tensor):
        pass

    state = {
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        "meta": torch.empty(2, 2, device="meta"),
        "mine": torch.ones(3).as_subclass(Mine),
        "last": torch.ones(1),
    }
    globals()["Mine"] = Mine
    Mine.__qualname__ = "Mine"
    content = read_content(saved(tmp_path, "x.pt", state))
    tensors = {entry.name: entry for entry in content.tensors}
    assert (tensors["meta"].shape, tensors["meta"].note, tensors["meta"].pieces) == ((2, 2), "no data (meta)", ())
    assert tensors["mine"].shape == (3,)
    assert "Mine" in tensors["mine"].note
    assert tensors["last"].note == ""
    shown = {name.partition(".")[0] for name in (*tensors, *(value.name for value in content.values))}
    assert shown == set(state)


def test_numbers_of_another_byte_order_are_not_misread(tmp_path):
    """A big-endian file: shapes and types are told, its numbers are not compared as if they were little-endian."""
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    records = {name: b"big" if name.endswith("byteorder") else data for name, data in records.items()}
    (tmp_path / "big.pt").write_bytes(zip_of(records))
    (entry,) = read_content(tmp_path / "big.pt").tensors
    assert (entry.shape, entry.pieces, entry.note) == ((2,), (), "big-endian")
    assert "cannot be compared" in differences(tmp_path / "x.pt", tmp_path / "big.pt")["w"][1]


def test_memory_order_is_no_difference(tmp_path):
    """channels_last and transposed tensors in a safetensors file of ours: the numbers in their places."""
    image = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    state = {"image": image, "turned": torch.arange(6.0).reshape(2, 3).t(), "again": image}
    with Checkpointer(tmp_path / "d") as ckpt:
        place = ckpt.save(1, {"m": state}).result(timeout_s=20).path
    found = {entry.name: Mapped().tensor(entry) for entry in read_content(place).tensors}
    for name, tensor in state.items():
        assert torch.equal(found[f"m:{name}"], tensor)


def test_differences_between_tensors_are_exact_for_every_dtype(tmp_path):
    """The largest absolute difference, per tensor; NaN equals NaN; integers, booleans, complex numbers, bfloat16."""
    nan, inf = math.nan, math.inf
    one = {
        "same": torch.tensor([1.0, nan, inf]),
        "float": torch.tensor([1.0, 2.0]),
        "nan": torch.tensor([1.0, nan]),
        "inf": torch.tensor([1.0, inf]),
        "int": torch.tensor([1, 2**40]),
        "bool": torch.tensor([True, False]),
        "bf16": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        "complex": torch.tensor([1 + 1j]),
        "shape": torch.ones(2, 3),
        "dtype": torch.ones(2),
        "first": torch.ones(1),
    }
    other = {
        "same": torch.tensor([1.0, nan, inf]),
        "float": torch.tensor([1.25, 2.0]),
        "nan": torch.tensor([1.0, 2.0]),
        "inf": torch.tensor([1.0, -inf]),
        "int": torch.tensor([1, 2**40 + 3]),
        "bool": torch.tensor([True, True]),
        "bf16": torch.tensor([1.0, 2.5], dtype=torch.bfloat16),
        "complex": torch.tensor([1 + 4j]),
        "shape": torch.ones(3, 2),
        "dtype": torch.ones(2, dtype=torch.float64),
        "second": torch.ones(1),
    }
    odd = "values: one has NaN or an infinity where the other has not"
    assert differences(saved(tmp_path, "a.pt", one), saved(tmp_path, "b.pt", other)) == {
        "float": (0.25, "values"),
        "nan": (None, odd),
        "inf": (None, odd),
        "int": (3.0, "values"),
        "bool": (1.0, "values"),
        "bf16": (0.5, "values"),
        "complex": (3.0, "values"),
        "shape": (None, "[2, 3] / [3, 2]"),
        "dtype": (0.0, "float32 / float64"),
        "first": (None, "only in the first"),
        "second": (None, "only in the second"),
    }


def test_values_are_compared_whole(tmp_path):
    """Long lists and texts that begin alike, sets in any order, objects by what they are made of."""
    alike = {"list": list(range(100)), "text": "x" * 500, "set": {"a", "b", "c"}, "nan": math.nan, "path": Path("a")}
    other = {
        "list": [*range(99), 7],
        "text": "x" * 499 + "y",
        "set": {"c", "a", "d"},
        "nan": math.nan,
        "path": Path("b"),
    }
    a, b = saved(tmp_path, "a.pt", alike), saved(tmp_path, "b.pt", alike)
    assert differences(a, b) == {}
    assert set(differences(a, saved(tmp_path, "c.pt", other))) == {"list", "text", "set", "path"}
    assert not same(1, True)
    assert not same({"a": 1}, {"a": 1, "b": 2})
    loop = read_pickle(b"\x80\x02]q\x00h\x00a.", "x")
    assert same(loop, read_pickle(b"\x80\x02]q\x00h\x00a.", "x"))


def test_one_state_has_one_set_of_names(tmp_path):
    """A Lightning-like file, a DCP directory, one of ours and a legacy file of the same state: the same names, in inspect."""
    state = {
        "state_dict": OrderedDict(w=torch.ones(2, 3), b=torch.zeros(2)),
        "optimizer_states": [{"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
        "epoch": 3,
    }
    torch.save(state, tmp_path / "x.ckpt")
    torch.save(state, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    save_archive(state, tmp_path / "ours.ckpt", sequence=1)
    save_dcp(tmp_path / "dcp", state)
    names = [
        {leaf.name for leaf in (*content.tensors, *content.values)}
        for content in map(read_content, [tmp_path / n for n in ("x.ckpt", "legacy.pt", "ours.ckpt", "dcp")])
    ]
    assert names[0] >= {
        "state_dict.w",
        "optimizer_states.0.state.0.step",
        "optimizer_states.0.param_groups.0.lr",
        "epoch",
    }
    assert names[0] == names[1] == names[2] == names[3]
    assert differences(tmp_path / "x.ckpt", tmp_path / "ours.ckpt") == {}
    assert differences(tmp_path / "x.ckpt", tmp_path / "dcp") == {}
    assert read_structure(tmp_path / "dcp")["optimizer_states"][0]["param_groups"] == [{"lr": 0.1, "params": [0]}]
    with Checkpointer(tmp_path / "d") as ckpt:
        place = ckpt.save(1, {"model": state["state_dict"], "trainer": {"epoch": 3}}).result(timeout_s=20).path
    ours = read_content(place)
    assert {leaf.name for leaf in (*ours.tensors, *ours.values)} >= {"model:w", "model:b", "trainer:epoch"}


def test_parts_of_a_tensor_are_put_together(tmp_path):
    """A tensor that two ranks wrote, with DCP or with us: told with its parts, and equal to the whole one."""
    whole = torch.arange(40.0).reshape(8, 5)
    program = [sys.executable, "-W", "ignore", str(program_path("saves_two_parts"))]
    arguments = [*program, str(tmp_path / "dcp"), str(tmp_path / "store")]
    ranks = [warm.Popen([*arguments, str(rank)]) for rank in range(2)]
    assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]
    content = read_content(tmp_path / "dcp")
    found = {entry.name: entry for entry in content.tensors}
    assert {name: entry.note for name, entry in found.items()} == {
        "w": "in 2 parts along dimension 0",
        "v": "in 2 parts along dimension 1",
    }
    for entry in found.values():
        assert len(entry.pieces) == 2
        assert torch.equal(Mapped().tensor(entry), whole)
    assert differences(tmp_path / "dcp", saved(tmp_path, "x.pt", {"w": whole, "v": whole, "n": 1})) == {}
    with Checkpointer(tmp_path / "whole") as ckpt:
        unsharded = ckpt.save(1, {"m": {"w": whole, "v": whole}}).result(timeout_s=20).path
    ours = tmp_path / "dcp-ours/step-00000001"
    assert {entry.name: len(entry.pieces) for entry in read_content(ours).tensors} == {"m:w": 2, "m:v": 2}
    found_differences = differences(ours, unsharded)
    assert {name for name in found_differences if name in ("m:w", "m:v")} == set()
    (tmp_path / "dcp/__1_0.distcp").unlink()
    missing = verify_tasks([plan_tasks(tmp_path / "dcp")])[0]
    assert missing.state == "damaged"
    assert "__1_0.distcp" in {judgement.file for judgement in missing.files if judgement.state == "damaged"}


@pytest.mark.parametrize("suffix", ["index", "shard"])
def test_a_missing_shard_is_damage(tmp_path, suffix):
    """An index that names a shard which is not there, or is cut: damaged, by name."""
    for number in (1, 2):
        save_file({f"w{number}": torch.ones(2)}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    where = {f"w{number}": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert {entry.name for entry in read_content(tmp_path).tensors} == {"model:w1", "model:w2"}
    assert verify_tasks([plan_tasks(tmp_path)])[0].state == "cannot tell"
    if suffix == "shard":
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
    else:
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w1": "model-0')
    bad = [
        judgement.file for judgement in verify_tasks([plan_tasks(tmp_path)])[0].files if judgement.state == "damaged"
    ]
    assert bad[0] == {"shard": "model-00002-of-00002.safetensors", "index": "model.safetensors.index.json"}[suffix]


def test_a_verdict_of_cannot_tell_says_how_much_is_covered(tmp_path):
    """safetensors, JSON, legacy pickles and .metadata carry nothing; the share of bytes under a checksum is told."""
    save_file({"w": torch.ones(1000)}, tmp_path / "model.safetensors")
    torch.save({"x": torch.ones(1000)}, tmp_path / "optimizer.bin")
    torch.save({"x": 1}, tmp_path / "random_states_0.pkl", _use_new_zipfile_serialization=False)
    (tmp_path / "trainer_state.json").write_text("{}")
    verdict = verify_tasks([plan_tasks(tmp_path)])[0]
    assert (verdict.state, verdict.kind) == ("cannot tell", "Accelerate directory")
    states = {judgement.file: (judgement.state, judgement.covered_bytes) for judgement in verdict.files}
    size = (tmp_path / "optimizer.bin").stat().st_size
    assert states == {
        "model.safetensors": ("cannot tell", 0),
        "optimizer.bin": ("valid", size),
        "random_states_0.pkl": ("cannot tell", 0),
        "trainer_state.json": ("cannot tell", 0),
    }
    done = CliRunner().invoke(app, ["verify", str(tmp_path)])
    total = sum(judgement.size_bytes for judgement in verdict.files)
    assert done.exit_code == 3
    assert f"{int(1000 * size / total) / 10:g} % under checksums" in done.stdout


def test_a_checksum_of_zero_is_none(tmp_path):
    """torch under skip_data, and our own .distcp files, leave CRC-32s out: that is no damage, and not called valid either."""
    with torch.serialization.skip_data():
        torch.save({"w": torch.ones(1000)}, tmp_path / "x.pt")
    (found,) = verify_tasks([plan_tasks(tmp_path / "x.pt")])[0].files
    assert (found.state, found.size_bytes - found.covered_bytes) == ("cannot tell", 4000)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"], "DeepSpeed directory"),
        (["model.safetensors", "random_states_0.pkl", "optimizer.bin"], "Accelerate directory"),
        (
            ["model.safetensors", "trainer_state.json", "optimizer.pt", "rng_state.pth"],
            "Transformers Trainer directory",
        ),
        (["model.safetensors"], "Hugging Face directory"),
        (["a.pt", "b.pt"], "files"),
    ],
)
def test_damage_in_a_directory_of_any_tool_is_found(tmp_path, names, kind):
    """Each tool by the names that it gives; damage in any of its archives is found."""
    (tmp_path / "c").mkdir()
    for name in names:
        if name.endswith(".safetensors"):
            save_file({"w": torch.ones(2)}, tmp_path / "c" / name)
        elif name.endswith(".json"):
            (tmp_path / "c" / name).write_text("{}")
        else:
            torch.save({"w": torch.ones(2), "d": defaultdict(list)}, tmp_path / "c" / name)
    verdict = verify_tasks([plan_tasks(tmp_path / "c")])[0]
    expected = {"cannot tell", "valid"}
    assert verdict.state in expected
    if len(names) > 1:
        assert verdict.kind == kind
    archives = [name for name in names if name.endswith((".pt", ".bin", ".pkl", ".pth"))]
    for name in archives[:1]:
        data = bytearray((tmp_path / "c" / name).read_bytes())
        data[len(data) // 2] ^= 16
        (tmp_path / "c" / name).write_bytes(data)
        assert verify_tasks([plan_tasks(tmp_path / "c")])[0].state == "damaged"


def test_files_that_differ_from_their_metadata_are_refused(tmp_path):
    """.metadata of one save beside the files of another: refused, not mixed."""
    save_dcp(tmp_path / "a", {"w": torch.ones(4)})
    save_dcp(tmp_path / "b", {"w": torch.ones(2, 2)})
    (tmp_path / "a/.metadata").write_bytes((tmp_path / "b/.metadata").read_bytes())
    with pytest.raises(CorruptCheckpointError):
        read_content(tmp_path / "a")


def test_a_pickle_too_long_to_look_at_is_not_called_damaged(tmp_path, monkeypatch):
    """The pickle of a hundred thousand tensors: its checksums are compared all the same, and the rest is "cannot tell"."""
    monkeypatch.setattr(pickle_reader, "_MOST_WORK", 10_000)
    monkeypatch.setattr(pickle_reader, "_LARGE_BYTES", 30_000)
    pickle = b"\x80\x02](" + b"cx\ny\n)R" * 5_000 + b"e."
    records = {"a/data.pkl": pickle, "a/byteorder": b"little", "a/data/0": bytes(100)}
    (tmp_path / "x.pt").write_bytes(zip_of(records))
    (found,) = verify_tasks([plan_tasks(tmp_path / "x.pt")])[0].files
    assert (found.state, found.covered_bytes) == ("cannot tell", found.size_bytes)
    assert "longer than is looked at" in found.reason
    (tmp_path / "x.pt").write_bytes(zip_of(records).replace(bytes(100), bytes(99) + b"x"))
    (found,) = verify_tasks([plan_tasks(tmp_path / "x.pt")])[0].files
    assert (found.state, found.names) == ("damaged", ("a/data/0",))
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "x.pt")])
    assert (done.exit_code, "longer than is looked at" in done.stderr) == (1, True)
    (tmp_path / "d").mkdir()
    (tmp_path / "d/.metadata").write_bytes(pickle)
    (tmp_path / "d/__0_0.distcp").write_bytes(b"x")
    assert verify_tasks([plan_tasks(tmp_path / "d")])[0].state == "cannot tell"
