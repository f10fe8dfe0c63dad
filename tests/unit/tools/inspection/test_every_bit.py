import itertools
import random
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from safe_ckpt import Checkpointer
from safe_ckpt.adapters.one_shot import save_archive
from safe_ckpt.core.formats.manifest import parse_manifest
from safe_ckpt.core.storage import reader
from safe_ckpt.core.storage.reader import crc32
from safe_ckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from safe_ckpt.tools.inspection.check import plan_tasks, verify_tasks
from safe_ckpt.tools.inspection.files import Window
from safe_ckpt.tools.inspection.torch_reader import read_structure


class Memory(Window):
    """Bytes in memory, read as a file is."""

    path = Path("in memory")

    def __init__(self, data, start=0, size=None):
        self.data, self.start = data, start
        self.size = len(data) if size is None else size

    def read(self, offset, size):
        if offset < 0 or size < 0 or offset + size > self.size:
            raise CorruptCheckpointError(path="in memory", message="is cut off")
        return bytes(memoryview(self.data)[self.start + offset : self.start + offset + size])

    def part(self, start, size):
        return Memory(self.data, start, size)


def is_sound(source):
    """What verify asks of an archive, without the threads: fast enough to ask it of every bit."""
    try:
        spans = read_structure(source).spans()
    except CorruptCheckpointError:
        return False
    whole = Memory(source.data)
    return all(crc32(whole.read(span.start, span.end - span.start)) == span.crc for span in spans)


def unfound(data, source):
    """The bits whose flip is not found, as (byte, bit)."""
    assert is_sound(source)
    missed = []
    for at in range(source.start, source.start + source.size):
        for bit in range(8):
            data[at] ^= 1 << bit
            if is_sound(source):
                missed.append((at, bit))
            data[at] ^= 1 << bit
    return missed


def flips(file, places):
    """Each of these places damaged in turn."""
    data = bytearray(file.read_bytes())
    for at in places:
        bit = 1 << random.randrange(8)
        data[at] ^= bit
        file.write_bytes(data)
        yield at
        data[at] ^= bit
    file.write_bytes(data)


def verdict_of(path):
    return verify_tasks([plan_tasks(path)])[0]


def lightning_like():
    model = torch.nn.Linear(4, 3)
    model(torch.ones(4)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    callbacks = {"ModelCheckpoint{'monitor': 'loss'}": {"best_model_score": torch.tensor(0.5)}}
    loops = {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"ready": 1, "completed": 0}}}}
    return {
        "epoch": 1,
        "state_dict": model.state_dict(),
        "loops": loops,
        "callbacks": callbacks,
        "optimizer_states": [optimizer.state_dict()],
    }


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: {"a": torch.arange(6.0), "n": 1}, lightning_like], ids=["small", "lightning"])
def test_every_bit_of_a_stock_file_counts(tmp_path, make):
    """A flip of any single bit of what torch.save wrote is found: in a payload, a header, padding or the directory."""
    torch.save(make(), tmp_path / "x.ckpt")
    data = bytearray((tmp_path / "x.ckpt").read_bytes())
    if len(data) < 3000:
        assert unfound(data, Memory(data)) == []
    else:
        assert [at for at in range(0, len(data), 8) if _is_missed(data, at)] == []
    places = random.sample(range(len(data)), 40)
    assert [at for at in flips(tmp_path / "x.ckpt", places) if verdict_of(tmp_path / "x.ckpt").state != "damaged"] == []
    assert verdict_of(tmp_path / "x.ckpt").state == "valid"


def _is_missed(data, at):
    bit = 1 << random.randrange(8)
    data[at] ^= bit
    try:
        return is_sound(Memory(data))
    finally:
        data[at] ^= bit


def save_dcp(folder, state):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a single process
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def test_every_byte_of_a_dcp_file_counts(tmp_path):
    """A flip anywhere in a .distcp is found, and the tensor is named when it is in its numbers."""
    save_dcp(tmp_path / "d", {"w": torch.arange(40.0), "b": torch.ones(3, dtype=torch.bfloat16), "n": {"lr": 0.1}})
    file = tmp_path / "d/__0_0.distcp"
    sound = verdict_of(tmp_path / "d")
    assert sound.state == "cannot tell"  # .metadata
    assert [(f.file, f.state) for f in sound.files] == [(".metadata", "cannot tell"), ("__0_0.distcp", "valid")]
    size = file.stat().st_size
    missed = [at for at in flips(file, range(0, size, 23)) if verdict_of(tmp_path / "d").state != "damaged"]
    assert missed == []
    at = file.read_bytes().index(torch.arange(40.0).numpy().tobytes())
    for _ in flips(file, [at + 50]):
        (bad,) = (judgement for judgement in verdict_of(tmp_path / "d").files if judgement.state == "damaged")
        assert (bad.file, bad.names) == ("__0_0.distcp", ("w",))


def test_damage_in_a_torch_archive_is_named_by_file_and_tensors(tmp_path):
    """In a torch archive: the file, and every tensor that lies in the damaged record, views of it included."""
    weight = torch.arange(1000.0)
    torch.save({"model": {"w": weight, "half": weight[:10], "other": torch.ones(5)}}, tmp_path / "x.pt")
    at = (tmp_path / "x.pt").read_bytes().index(weight.numpy().tobytes())
    for _ in flips(tmp_path / "x.pt", [at, at + 3999]):
        (bad,) = verdict_of(tmp_path / "x.pt").files
        assert (bad.state, bad.file, bad.names) == ("damaged", "x.pt", ("model.w", "model.half"))


def test_every_byte_of_a_checkpoint_of_ours_counts(tmp_path):
    """A directory of ours: any flip in any file is found, and the manifest vouches for itself, bit by bit."""
    with Checkpointer(tmp_path) as ckpt:
        state = {"model": {"w": torch.arange(300.0)}, "more": {"t": torch.ones(4), "l": [1]}, "n": {"a": 1}}
        place = ckpt.save(1, state).result(timeout_s=20).path
    assert verdict_of(place).state == "valid"
    for file in sorted(place.iterdir()):
        places = random.sample(range(file.stat().st_size), min(30, file.stat().st_size))
        for at in flips(file, places):
            found = verdict_of(place)
            assert found.state == "damaged", (file, at)
            assert file.name in {judgement.file for judgement in found.files if judgement.state == "damaged"}
    data = bytearray((place / "manifest.json").read_bytes())
    for at, bit in itertools.product(range(len(data)), range(8)):
        data[at] ^= 1 << bit
        with pytest.raises((CorruptCheckpointError, UnsupportedFormatError)):
            parse_manifest(bytes(data), place)
        data[at] ^= 1 << bit


def test_every_byte_of_a_single_file_of_ours_counts(tmp_path):
    """A flip in a file of ours is found, also in the digest itself; never is it taken for another tool's file instead."""
    file = tmp_path / "epoch=0-step=1.ckpt"
    save_archive({"state_dict": {"w": torch.arange(30.0)}}, file, sequence=1)
    assert [f.state for f in verdict_of(file).files] == ["valid"]
    size = file.stat().st_size
    places = [*random.sample(range(size - 400), 60), *range(size - 400, size, 3), *range(size - 60, size)]
    assert [at for at in flips(file, places) if verdict_of(file).state != "damaged"] == []
    at = file.read_bytes().index(torch.arange(30.0).numpy().tobytes())
    for _ in flips(file, [at]):
        assert verdict_of(file).files[0].names == ("state_dict.w",)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "from_disk"])
def test_a_random_flip_in_a_larger_file_names_its_tensor_alone(tmp_path, monkeypatch, cached):
    """Megabytes, read in pieces or by several threads: the tensor in which the flip is, wherever it is, and no other."""
    monkeypatch.setattr(reader, "is_cached", lambda *_: cached)
    file = tmp_path / "x.pt"
    torch.save({f"w{index}": torch.full((2_000_000,), float(index)) for index in range(5)}, file)
    data = file.read_bytes()
    where = {f"w{index}": data.index(torch.full((1000,), float(index)).numpy().tobytes()) for index in range(1, 5)}
    with file.open("r+b") as stream:
        for name, start in where.items():
            at = start + random.choice([0, 7_999_999, random.randrange(8_000_000)])
            for byte, names in ((data[at] ^ 64, (name,)), (data[at], ())):
                stream.seek(at)
                stream.write(bytes([byte]))
                stream.flush()
                told = []
                (found,) = verify_tasks([plan_tasks(file)], progress=told.append)[0].files
                assert (found.names, found.state) == (names, "damaged" if names else "valid"), at
                assert sum(told) == len(data)


@pytest.mark.parametrize("kind", ["torch", "ours", "safetensors", "legacy"])
def test_no_truncation_passes(tmp_path, kind):
    """Cut off at any length, a file is damaged: also where no checksum could tell, for its structure can."""
    file = tmp_path / {"torch": "x.pt", "ours": "x.ckpt", "safetensors": "x.safetensors", "legacy": "x.pt"}[kind]
    tensors = {"w": torch.arange(8.0), "v": torch.ones(3, dtype=torch.int16)}
    if kind == "ours":
        save_archive(tensors, file, sequence=1)
    elif kind == "safetensors":
        save_file(tensors, file)
    else:
        torch.save(tensors, file, _use_new_zipfile_serialization=kind == "torch")
    data = file.read_bytes()
    step = max(1, len(data) // 150)
    for length in {*range(0, len(data), step), *range(len(data) - 30, len(data))}:
        file.write_bytes(data[:length])
        assert verdict_of(file).state == "damaged", length
    file.write_bytes(data + b"\0")
    assert verdict_of(file).state == "damaged"
