"""The bytes of a file are the same from whatever they come and however they are cut, and what looks at them harms none."""

import dataclasses
import random
import threading
import time

import pytest
import torch
import xxhash

from kit.states import DTYPES
from kit.writing import stream_file, write_file
from safe_ckpt.core.formats import file_plan, torch_archive
from safe_ckpt.core.formats.file_plan import FilePlan
from safe_ckpt.core.staging import snapshot
from safe_ckpt.core.staging.buffer import SharedBuffer
from safe_ckpt.core.storage.direct_io import Unwatched, WriteOptions
from safe_ckpt.core.writer.content import MemoryContent, TensorContent
from safe_ckpt.extensions.health import examine
from safe_ckpt.extensions.health.verdict import Expectation

PAGE = 4096


def gaps(chance):
    """A plan as that of a file with shards: pieces, tensors, and nothing in between."""
    at, pieces, tensors, names = 0, [], [], []
    for number in range(chance.randint(1, 12)):
        at += chance.choice([0, 1, 7, PAGE, 5000])
        if chance.random() < 0.4:
            pieces.append((at, chance.randbytes(chance.randint(1, 300))))
            at += len(pieces[-1][1])
            continue
        at = -(-at // 16) * 16
        shape = [chance.randint(1, 60) for _ in range(chance.randint(1, 3))]
        tensor = (torch.rand(shape) * 9).to(chance.choice(DTYPES))
        tensor = tensor.transpose(0, -1) if chance.random() < 0.3 else tensor
        tensors.append((at, tensor))
        names.append(f"t{number}")
        at += tensor.numel() * tensor.element_size()
    length = at + chance.choice([0, 3, PAGE, 9999])
    return FilePlan(path="a.distcp", length=length, pieces=pieces, tensors=tensors, names=names)


def as_placed(plan):
    """What the file has to be."""
    expected = bytearray(plan.length)
    for at, data in plan.pieces:
        expected[at : at + len(data)] = data
    for at, tensor in plan.tensors:
        data = bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
        expected[at : at + len(data)] = data
    return bytes(expected)


def in_all_ways(plan, folder, chunk_bytes, observed=None):
    """The file as it is written in each way, and what is reported of it."""
    for direct in (True, False):
        options = WriteOptions(direct=direct, chunk_bytes=chunk_bytes, flush_every_bytes=chunk_bytes)
        buffer = SharedBuffer()
        (task,) = snapshot.take([plan], buffer, str(folder), {"name": "x"})
        task = dataclasses.replace(task, observed=observed or {})
        mark = [task.offset]

        def fill(mark=mark, end=task.offset + task.length):
            while mark[0] < end:
                time.sleep(0.0002)
                mark[0] += max(1, plan.length // 20)

        filling = threading.Thread(target=fill)
        filling.start()
        for write in (
            lambda: write_file(task, memoryview(buffer.memory), options, ready=lambda: mark[0]),  # noqa: B023
            lambda: write_file(task, memoryview(buffer.memory), options),  # noqa: B023
            lambda: stream_file(plan, task, options),  # noqa: B023
        ):
            written = write()
            yield (folder / plan.path).read_bytes(), written
        filling.join()
        buffer.close()


@pytest.mark.parametrize("seed", range(8))
def test_every_source_of_a_file_gives_the_bytes_of_its_plan(tmp_path, seed):
    """Also with gaps, which are zeros, and with memory that is filled while it is written."""
    torch.manual_seed(seed)
    plan = gaps(random.Random(seed))
    expected = as_placed(plan)
    for data, written in in_all_ways(plan, tmp_path, PAGE << seed % 5):
        assert data == expected
        assert (written.size_bytes, written.xxh3_128) == (len(expected), xxhash.xxh3_128(expected).hexdigest())


@pytest.mark.parametrize("single", [True, False])
def test_every_source_of_an_archive_gives_the_same_bytes(tmp_path, single):
    """With its check sums, its manifest and its directory, and the same is found of its numbers."""
    state = {str(number): torch.full((number * 700,), float(number)) for number in range(1, 40)}
    plan = torch_archive.torch_plan("a.pt", state, strict=True, key="x")
    plan = file_plan.single(plan, "a.pt") if single else plan
    told = {"health": examine.told(plan, Expectation())}
    found = list(in_all_ways(plan, tmp_path, PAGE, told))
    assert all(one == found[0] for one in found)
    assert found[0][1].observed["health"]["numbers"] == sum(tensor.numel() for tensor in state.values())
    assert (b'"health"' in found[0][0]) == single


def test_content_from_tensors_can_be_streamed_again_and_fetched_content_not():
    """After a failed upload, say; what was fetched cannot."""
    plan = torch_archive.torch_plan("a.pt", {"w": torch.rand(9999)}, strict=True, key="x")
    (task,) = snapshot.list_tasks([plan], "/folder", {})
    content = TensorContent(task, plan)
    first, second = (b"".join(bytes(piece) for piece in content.pieces(PAGE)) for _ in range(2))
    assert first == second
    lazy = file_plan.LazyTensor(dtype=torch.float32, shape=(9999,), fetch=lambda: torch.ones(9999))
    plan = FilePlan(path="a", length=4 * 9999, pieces=[], lazies=[(0, lazy)])
    content = TensorContent(dataclasses.replace(task, records=None), plan)
    assert sum(map(len, content.pieces(PAGE))) == 4 * 9999 // PAGE * PAGE
    with pytest.raises(OSError, match="not there a second time"):
        next(content.pieces(PAGE))


class Broken:
    """An observer that fails at one of its calls, which ``told`` names."""

    def __init__(self, task, known, told):
        self._at = told["at"]
        self._fail("made")

    def _fail(self, at):
        if at == self._at:
            raise ValueError(at)

    def take(self, at, piece):
        self._fail("take")

    def found(self):
        self._fail("found")
        return 1

    def section(self):
        self._fail("section")
        return {"a": 1}


@pytest.mark.parametrize("at", ["imported", "made", "take", "found", "section"])
def test_an_observer_that_fails_costs_what_it_would_have_found(tmp_path, caplog, at):
    """The file is written, the other observer's findings are there, and one line says which one failed."""
    plan = file_plan.single(torch_archive.torch_plan("a.pt", {"w": torch.ones(99_999)}, strict=True, key="x"), "a.pt")
    broken = {"observer": f"{__name__ if at != 'imported' else 'no_such_module'}:Broken", "at": at}
    told = {"broken": broken, "health": examine.told(plan, Expectation())}
    for data, written in in_all_ways(plan, tmp_path, PAGE, told):
        assert written.xxh3_128 == xxhash.xxh3_128(data).hexdigest()
        assert written.observed.keys() == {"health"}
        assert b'"broken"' not in data or at == "found"
    assert [record for record in caplog.records if "what broken would find" in record.message]


def test_a_content_that_is_closed_early_leaves_no_thread():
    """The thread that hashes ahead ends also where the memory is never filled."""
    (task,) = snapshot.list_tasks([FilePlan(path="a", length=1 << 20, pieces=[])], "/folder", {})
    content = MemoryContent(task, memoryview(bytearray(2 << 20)), PAGE, Unwatched(), lambda: 0)
    assert any(thread.name == "safe_ckpt-hash" for thread in threading.enumerate())
    content.close()
    assert not any(thread.name == "safe_ckpt-hash" for thread in threading.enumerate())
    with pytest.raises(OSError, match="stopped"):
        content.closing()
