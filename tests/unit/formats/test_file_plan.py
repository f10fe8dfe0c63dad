"""Formats: what is written, other tools read, and it comes back exactly."""

import codecs
import io
import json
import shutil
import struct
import subprocess
import zipfile
import zlib
from collections import Counter

import numpy
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.states import DTYPES, EVERYTHING, bits, same
from kit.writing import write_file
from safe_ckpt.core.formats import dtypes, file_plan, torch_archive
from safe_ckpt.core.formats.file_plan import KnownBytes
from safe_ckpt.core.formats.manifest import RECORD_NAME, archive_digest, read_manifest
from safe_ckpt.core.formats.safetensors import fits_safetensors, safetensors_plan
from safe_ckpt.core.formats.verify import verify_archive, verify_files, verify_if_ours
from safe_ckpt.core.formats.zip_archive import Record
from safe_ckpt.core.sharding import dcp_entries
from safe_ckpt.core.staging import snapshot
from safe_ckpt.core.staging.buffer import SharedBuffer
from safe_ckpt.core.storage.direct_io import WriteOptions
from safe_ckpt.errors import CorruptCheckpointError, StateError
from support import Quiet

OPTIONS = WriteOptions(direct=True, chunk_bytes=1 << 20, flush_every_bytes=64 << 20)


def write(image, folder, manifest=None):
    buffer = SharedBuffer()
    tasks = snapshot.take([image], buffer, str(folder), manifest or {})
    result = write_file(tasks[0], memoryview(buffer.memory), OPTIONS, Quiet())
    return folder / image.path, result


def torch_file(obj, folder, *, strict=True):
    return write(torch_archive.torch_plan("x.pt", obj, strict=strict, key="x"), folder)[0]


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_torch_archive_gives_everything_back(tmp_path, mmap, weights_only):
    """torch.load, mapped or not, restricted or not, returns exactly what was saved: dtypes, strides, containers, keys."""
    file = torch_file(EVERYTHING, tmp_path)
    loaded = torch.load(file, mmap=mmap, weights_only=weights_only)
    same(EVERYTHING, loaded)


def test_shared_storage_stays_shared(tmp_path):
    """Tied and overlapping tensors are stored once and share memory again after loading."""
    base = torch.arange(1000.0)
    file = torch_file({"a": base, "b": base, "head": base[:5], "tail": base[3:], "grid": base.view(10, 100)}, tmp_path)
    assert file.stat().st_size < 2 * base.nbytes
    loaded = torch.load(file, weights_only=True)
    loaded["a"][4] = -1
    assert loaded["b"][4] == loaded["head"][4] == loaded["tail"][1] == loaded["grid"][0, 4] == -1


@pytest.mark.parametrize("weights_only", [True, False])
def test_one_storage_viewed_with_two_dtypes(tmp_path, weights_only):
    """What torch.save refuses, two dtypes over one memory, comes back shared and exact."""
    floats = torch.arange(8, dtype=torch.float32)
    obj = {"floats": floats, "bits": floats.view(torch.int32), "part": floats.view(torch.int16)[4:]}
    loaded = torch.load(torch_file(obj, tmp_path), weights_only=weights_only)
    same(obj, loaded)
    loaded["floats"].zero_()
    assert not loaded["bits"].any()
    assert not loaded["part"].any()


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers()), inner, max_size=4),
    ),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(plain)
def test_any_plain_data_round_trips(tmp_path_factory, data):
    """Whatever nesting of plain values: the archive returns it with the same types."""
    same(data, torch.load(torch_file(data, tmp_path_factory.mktemp("x")), weights_only=True))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 5), max_size=4),
    st.integers(0, 3),
    st.booleans(),
)
def test_any_tensor_round_trips(tmp_path_factory, dtype, shape, skip, transpose):
    """Any dtype, shape, offset and stride comes back, in an archive and, if it fits, in safetensors."""
    base = (torch.rand([size + skip for size in shape]) * 2).to(dtype) if shape else torch.tensor(1).to(dtype)
    tensor = base[tuple(slice(skip, None) for _ in shape)] if shape else base
    tensor = tensor.transpose(0, -1) if transpose and len(shape) > 1 else tensor
    folder = tmp_path_factory.mktemp("x")
    same(tensor, torch.load(torch_file({"t": tensor}, folder), weights_only=True)["t"])
    if fits_safetensors({"t": tensor}):
        file, _ = write(safetensors_plan("x.safetensors", {"t": tensor}), folder)
        found = safetensors.torch.load_file(file)["t"]
        assert found.dtype == dtype
        assert bits(found).equal(bits(tensor))


def test_other_tools_find_the_archive_in_order(tmp_path):
    """Python's zipfile and Info-ZIP check every CRC of an archive of ours, with records below and above the page size."""
    obj = {str(size): torch.arange(size, dtype=torch.uint8) for size in (0, 1, 63, 4096, 65535, 65536, 3 << 20)}
    file = torch_file(obj, tmp_path)
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        large = archive.getinfo("archive/data/6")
        assert json.loads(archive.read(RECORD_NAME))["records"].keys() == set(archive.namelist()) - {RECORD_NAME}
    with file.open("rb") as stream:
        stream.seek(large.header_offset + 26)
        name, extra = (int.from_bytes(stream.read(2), "little") for _ in range(2))
    assert (large.header_offset + 30 + name + extra) % 4096 == 0
    if shutil.which("unzip"):
        done = subprocess.run(["unzip", "-tqq", str(file)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def fields_of(header):
    """The extra fields of a local header, by their numbers."""
    name, extra = struct.unpack("<2H", header[26:30])
    at = 30 + name
    while at < 30 + name + extra:
        number, size = struct.unpack("<2H", header[at : at + 4])
        yield number, header[at + 4 : at + 4 + size]
        at += 4 + size


def test_an_archive_beyond_4_gib_is_read_by_torch_and_zipfile(tmp_path):
    """Sizes and offsets beyond 32 bits: zip64, read back by torch and zipfile (the payload is sparse zeros)."""
    size = (1 << 32) + 10
    records, pieces, at = [], [], 0
    from safe_ckpt.core.formats import zip_archive

    for name, length in (("data/0", size), ("data/1", 5)):
        record = zip_archive.place_record(f"archive/{name}", length, at)
        pieces.append((record.header_offset, zip_archive.local_header(record)))
        records.append(record)
        at = record.end
    crcs = {"archive/data/0": 0xA0E3F60C, "archive/data/1": zlib.crc32(bytes(5))}
    file = tmp_path / "large.zip"
    with file.open("wb") as stream:
        for offset, data in pieces:
            stream.seek(offset)
            stream.write(data)
        for record in records:
            stream.seek(record.data_offset + record.size)
            stream.write(zip_archive.descriptor(crcs[record.name], record.size))
        stream.seek(at)
        stream.write(zip_archive.closing(records, crcs, at) + zip_archive.COMMENT_PREFIX + b"0" * 32)
    with zipfile.ZipFile(file) as archive:
        assert [entry.file_size for entry in archive.infolist()] == [size, 5]
        assert archive.infolist()[1].header_offset > 1 << 32
        assert archive.read("archive/data/1") == bytes(5)
        with archive.open("archive/data/0") as member:
            assert member.read(10) == bytes(10)
    assert next(fields_of(pieces[0][1])) == (1, bytes(16))  # of zip64, for who reads it from its beginning
    assert 1 not in dict(fields_of(pieces[1][1]))


SOME_FACTS = {"format": "safe_ckpt", "format_version": 1, "name": "x.ckpt", "sequence": 1, "step": 1, "op_id": "a",
              "world_size": 1, "metrics": {}, "versions": {}, "items": {}, "notes": {}, "created_at": "now"}  # fmt: skip


def test_the_damaged_record_of_a_file_is_named(tmp_path):
    """A flipped bit of a tensor names its record; damage outside of all records names none."""
    state = {"a": torch.full((300,), 3.5), "b": torch.full((300,), 4.5)}
    image = torch_archive.torch_plan("x.ckpt", state, strict=True, key="x")
    file, _ = write(file_plan.single(image, "x.ckpt"), tmp_path, SOME_FACTS)
    good = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        assert {"archive/data/0", "archive/data/1"} <= set(archive.namelist())
    found = {}
    for number, value in enumerate((3.5, 4.5)):
        at = good.index(numpy.full(300, value, numpy.float32).tobytes())
        found[f"archive/data/{number}"] = at + 7
    found[""] = len(good) - 1
    for record, at in found.items():
        file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(CorruptCheckpointError) as caught:
            verify_archive(file)
        assert caught.value.file == record


def test_every_single_flipped_byte_is_found(tmp_path):
    """Whichever byte of a single-file checkpoint changes, verification says so: payload, structure, directory, comment."""
    image = file_plan.single(
        torch_archive.torch_plan("x.ckpt", {"w": torch.arange(40)}, strict=True, key="x"), "x.ckpt"
    )
    file, result = write(image, tmp_path, SOME_FACTS)
    good = file.read_bytes()
    assert len(good) == result.size_bytes
    assert verify_files(file, read_manifest(file)) == len(good)
    missed = []
    for offset in range(len(good)):
        file.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
        try:
            verify_if_ours(file)
        except CorruptCheckpointError:
            continue
        except Exception as error:
            missed.append((offset, repr(error)))
            continue
        missed.append(offset)
    assert missed == []
    for length in range(0, len(good), 7):
        file.write_bytes(good[:length])
        assert archive_digest(file) is None


def test_safetensors_is_read_by_its_own_library(tmp_path):
    """Tied names once, with an alias; channels_last kept; the rest as safetensors itself would have it."""
    tied = torch.randn(4, 4)
    tensors = {"b": tied, "a": tied, "half": torch.ones(3, dtype=torch.float16), "flag": torch.tensor([True]),
               "image": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "none": torch.empty(0)}  # fmt: skip
    assert fits_safetensors(tensors)
    file, _ = write(safetensors_plan("x.safetensors", tensors), tmp_path)
    loaded = safetensors.torch.load_file(file)
    assert set(loaded) == {"b", "half", "flag", "image", "none"}
    for name in loaded:
        assert loaded[name].equal(tensors[name])
    with safetensors.safe_open(file, "pt") as opened:
        assert json.loads(opened.metadata()[dtypes.ALIASES_KEY]) == {"a": "b"}


@pytest.mark.parametrize(
    ("data", "fits"),
    [
        ({"a": torch.ones(2)}, True),
        ({}, False),
        ({"a": torch.ones(2), "b": 1}, False),
        ({"a": {"b": torch.ones(2)}}, False),
        ({1: torch.ones(2)}, False),
        ({"a": torch.ones(2, dtype=torch.complex128)}, False),
        ({"a": torch.eye(2).to_sparse()}, False),
        ({"a": torch.arange(9)[::2]}, False),
        ({"a": torch.ones(1).expand(3)}, False),
        ({"__metadata__": torch.ones(2)}, False),
    ],
)
def test_safetensors_is_chosen_only_where_it_is_exact(data, fits):
    """A dict goes to safetensors exactly when that format can hold it without loss."""
    assert fits_safetensors(data) is fits


def test_overlapping_tensors_do_not_go_to_safetensors():
    """Partly shared memory cannot be expressed there."""
    base = torch.arange(10)
    assert not fits_safetensors({"a": base[:6], "b": base[4:]})
    assert fits_safetensors({"a": base, "b": base})


@pytest.mark.parametrize(
    ("value", "exact"),
    [
        ({"a": [1, 2.5, "x", None, True]}, True),
        ({"a": (1,)}, False),
        ({1: 2}, False),
        (float("nan"), False),
        (1 << 300, True),
        ("\ud800", True),
        (b"", False),
        (numpy.float64(1), False),
    ],
)
def test_json_is_chosen_only_where_it_is_exact(value, exact):
    """JSON is used only for what it gives back exactly."""
    assert file_plan.is_exact_json(value) is exact
    if exact:
        image = file_plan.json_plan("x", value)
        assert json.loads(image.pieces[0][1]) == value


class Custom:
    pass


@pytest.mark.parametrize(
    ("state", "where", "words"),
    [
        ({"a": [1, {"b": Custom()}]}, "state['x']['a'][1]['b']", "Custom"),
        ({"a": lambda: 1}, "state['x']['a']", "function"),
        ({"a": frozenset([1])}, "state['x']['a']", "save a set"),
        ({"a": numpy.ones(2)}, "state['x']['a']", "torch.from_numpy"),
        ({"a": (0, numpy.float32(1))}, "state['x']['a'][1]", ".item()"),
        ({"a": 1 << 3000}, "state['x']['a']", "as text"),
        ({"a": torch.empty(2, device="meta")}, "state['x']['a']", "meta"),
        ({"a": open}, "state['x']['a']", "builtin"),
        ({"a": (x for x in ())}, "state['x']['a']", "generator"),
        ({"a": torch.nn.Linear(1, 1)}, "state['x']['a']", "Linear"),
    ],
)
def test_objects_that_weights_only_refuses_are_refused_at_the_save_by_name(state, where, words):
    """An object that weights_only loading would refuse is refused before anything is written, and named."""
    with pytest.raises(StateError) as caught:
        torch_archive.torch_plan("x.pt", state, strict=True, key="state['x']")
    assert caught.value.key == where
    assert words in str(caught.value)


def test_what_the_user_admits_to_weights_only_is_saved(tmp_path):
    """A function that this release of torch does not admit by itself: refused by name, until add_safe_globals names it."""
    state = {"a": codecs.decode}
    with pytest.raises(StateError, match=r"_codecs\.decode.*refuses it"):
        torch_archive.torch_plan("x.pt", state, strict=True, key="x")
    with torch.serialization.safe_globals([codecs.decode]):
        assert torch.load(torch_file(state, tmp_path), weights_only=True) == state


def test_a_bottomless_structure_is_refused():
    """A list nested ten thousand deep is an error, not a crash."""
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(StateError, match="nested too deeply"):
        torch_archive.torch_plan("x.pt", deep, strict=True, key="x")


def test_without_strict_anything_that_torch_saves_is_saved(tmp_path):
    """Lightning's checkpoints may hold arbitrary objects: numpy arrays are copied, classes kept."""
    array = numpy.arange(3)
    obj = {"array": array, "custom": Counter(a=1), "set": frozenset([1])}
    image = torch_archive.torch_plan("x.pt", obj, strict=False, key="x")
    array[0] = 99
    loaded = torch.load(write(image, tmp_path)[0], weights_only=False)
    assert loaded["array"].tolist() == [0, 1, 2]
    assert loaded["set"] == frozenset([1])


def test_torch_save_and_ours_load_alike():
    """The same object through torch.save and through ours is indistinguishable after loading."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    same(torch.load(stream, weights_only=True), state)


@pytest.mark.parametrize("records", [False, True], ids=["plain", "archive"])
def test_gaps_of_a_file_hold_nothing_of_an_earlier_snapshot(tmp_path, records):
    """The shared memory is used again: what lies between the parts of a file is zeros, as in one that is streamed."""
    buffer = SharedBuffer()
    buffer.reserve(1 << 20)
    buffer.bytes[:] = 0xAA
    if records:
        image = torch_archive.torch_plan("x.pt", {"a": torch.ones(3), "b": torch.ones(5)}, strict=True, key="x")
    else:
        tensors = [(64, torch.ones(3)), (4096, torch.ones(5))]
        image = file_plan.FilePlan(path="x.distcp", length=5000, pieces=[(0, b"head")], tensors=tensors)
    tasks = snapshot.take([image], buffer, str(tmp_path), {"name": "x"})
    write_file(tasks[0], memoryview(buffer.memory), OPTIONS, Quiet())
    assert b"\xaa" * 3 not in (tmp_path / image.path).read_bytes()
    buffer.close()


def test_bytes_of_a_file_are_those_of_its_pieces_to_the_first_and_last_one():
    """A read within one piece is answered, also of the whole of it; one that goes a byte beyond is refused."""
    known = KnownBytes(20, [(0, b"abcd"), (10, b"klmnop")])
    assert len(known) == 20
    assert (known[0:4], known[1:3], known[10:16], known[11:12], known[15:16]) == (b"abcd", b"bc", b"klmnop", b"l", b"p")
    for begin, end in ((0, 5), (3, 11), (9, 11), (15, 17), (4, 6), (16, 20)):
        with pytest.raises(ValueError, match=f"bytes {begin} to {end} are not at hand"):
            known[begin:end]


def test_tensors_are_found_again_by_where_they_lie_and_how():
    """Views of one memory are told apart by shape, strides and type; what is not among them is not found."""
    base = torch.arange(12.0).reshape(3, 4)
    among = [base, base.t(), base[:, :2], base[:, ::2], base[1:], base.t().view(torch.int32)]
    views = [base.t().view(torch.int32), base[:, ::2], base[:, :2], base.t(), base[1:], base.view(12)]
    assert file_plan.numbers_of(views, among) == [5, 3, 2, 1, 4, 0]
    assert file_plan.numbers_of([base, base[:, :3]], among) is None
    assert file_plan.numbers_of([base[:2]], among) is None


def test_more_tensors_than_one_archive_is_read_with_are_refused_at_the_save(monkeypatch):
    """No save that no resume takes: the item and both numbers are in the error."""
    monkeypatch.setattr(torch_archive, "_MOST_STORAGES", 3)
    state = [torch.zeros(1) for _ in range(4)]
    torch_archive.torch_plan("a.pt", [*state[:3], state[0]], strict=True, key="x")
    with pytest.raises(StateError, match="4 tensors are more than the 3 that one file is read with") as caught:
        torch_archive.torch_plan("a.pt", state, strict=True, key="x")
    assert caught.value.key == "x"


@pytest.mark.parametrize("records", [None, (), (Record("x/data/0", 0, 64, 4), Record("x/data.pkl", 84, 128, 9))])
def test_what_a_writer_is_to_write_arrives_as_it_was_given(records):
    """It goes to another process as JSON; the records keep their names."""
    task = file_plan.WriteTask(
        path="a.pt",
        offset=4096,
        length=99,
        records=records,
        manifest_name="x/m",
        manifest={"a": 1},
        observed={"b": [2]},
    )
    there = file_plan.WriteTask.from_json(json.loads(json.dumps(task.to_json())))
    assert there == task
    assert [one.end for one in there.records or ()] == [one.end for one in records or ()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (1, 40_000)])
def test_an_entry_of_a_shard_is_what_torch_reads(dtype, shape):
    """Head, elements and tail are an archive; its length and alignment are as announced."""
    tensor = torch.randint(0, 2, shape).to(dtype)
    around = dcp_entries.envelope(dtype, shape)
    entry = around.head + bits(tensor).numpy().tobytes() + around.tail
    assert len(entry) == around.length
    assert dcp_entries.behind(1, around.alignment) == around.alignment
    assert len(around.head) % around.alignment == 0
    same(torch.load(io.BytesIO(entry), weights_only=True), tensor)
